"""The presentation of everything, on a terminal and in a pipe.

render.py    prints answers to stdout and everything else to stderr; nothing harmful reaches a terminal
layout.py    wraps text into lines that fit, and into columns
clipboard.py copies text into the clipboard
formatter.py lays out click's help
extract.py   extracts code blocks from answers
figures.py   figures of an answer and of the daemon, as lines
pairs.py     pairs, files, drafts and pulls, as tables
history.py   conversations
hints.py     one-line hints, for example on a better pair
progress.py  a progress bar
spinner.py   shows what the command is waiting for
markdown/    draws Markdown while it is being generated
"""
