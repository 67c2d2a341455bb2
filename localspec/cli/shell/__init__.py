"""The parts of `cmd`, `commit` and `explain`. Nothing here imports click.

shells.py    the shell in which a command was typed, and our ancestor processes
failures.py  the hook by which a shell records its last failed command, and reading that record
asking.py    send a template about as much of a long text as fits
answers.py   extract one command or a commit message from the text of a model
proposal.py  show a command, then explain, edit, run or drop it by one key
staged.py    the changes that git has staged, shortened to a length
message_editor.py  git's editor with a proposed message in it
"""
