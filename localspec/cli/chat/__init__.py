"""`localspec chat`. It may import the rest of the command line, and only its command imports it.

chat.py    the terminal: lines, keys, completion, Ctrl-C
typed.py   the meaning of a typed line
slash.py   the commands that begin with a slash
talk.py    the conversation with the daemon
"""
