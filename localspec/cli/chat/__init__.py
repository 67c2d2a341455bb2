"""`localspec chat`: it imports the rest of the command line, and nothing but its command imports it.

chat.py    the terminal: lines, keys, completion, what happens at Ctrl-C
typed.py   what a typed line means
slash.py   the commands
talk.py    the conversation with the daemon
"""
