"""What `cmd`, `commit` and `explain` consist of; nothing here imports click.

shells.py    which shell a command was typed in, and the processes between
failures.py  the hook by which a shell records its last failed command, and reading that record
asking.py    a template is asked, about as much of a long text as fits
answers.py   what a model wrote → one command, or a commit message
proposal.py  a command is shown, and explained, edited, run or dropped, by one key
staged.py    what git has staged, cut to a length; the hook that git runs
"""
