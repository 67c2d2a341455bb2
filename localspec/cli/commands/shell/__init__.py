"""`cmd`, `commit` and `explain`: what people ask for at a shell's prompt, each by a template of its name.

cmd.py      one shell command for what is described
commit.py   a commit message for what is staged
explain.py  the last failed command, or an error message
"""
