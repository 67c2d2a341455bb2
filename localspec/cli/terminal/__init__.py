"""How things look on a terminal and in a pipe, and not what they are.

render.py    the answer on stdout, all else on stderr; nothing harmful reaches a terminal
layout.py    text in lines that fit, and in columns
clipboard.py what is copied
formatter.py how help is laid out
extract.py   code blocks out of answers
figures.py   figures of an answer and of the daemon, in lines
pairs.py     pairs, files, drafts and pulls, as tables
history.py   conversations
hints.py     what would do better here
progress.py  how far something is
spinner.py   what is waited for
markdown/    Markdown drawn while it is being written
"""
