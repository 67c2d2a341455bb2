"""`localspec chat`: it imports the rest of the command line, and nothing but its command imports it.

chat.py   the terminal: lines, keys, completion, what happens at Ctrl-C
slash.py  what can be typed instead of a question
talk.py   the conversation with the daemon
"""
