"""The commands for a shell's prompt. Each of them uses the template of its name.

cmd.py      one shell command for a description
commit.py   a commit message for the staged changes
explain.py  the last failed command, or an error message
"""
