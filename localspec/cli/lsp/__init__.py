"""`localspec lsp`: a language server on stdin and stdout, for editors that support the protocol.

documents.py    the editor's texts, line by line, and positions in the editor's own units
context.py      the context of a completion: the text around the cursor, and visited places
suggestions.py  the part of a completion that is shown, and its form for the editor
questions.py    questions about lines, and the part of the answer that replaces them
desk.py         all of that for one editor, independent of the protocol
server.py       the protocol, by pygls; the only file that imports it

The rules of context.py and suggestions.py are the same as in the plug-in for Vim, which has no
Python. Tests compare the two.
"""
