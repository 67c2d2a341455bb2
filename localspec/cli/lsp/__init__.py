"""`localspec lsp`: a language server on stdin and stdout, for editors that speak the protocol by themselves.

documents.py    the editor's texts, line by line, and places in them in its own units
context.py      what a completion is asked with: the text around the cursor, and where somebody was before
suggestions.py  what of a completion is shown, and as what the editor gets it
questions.py    what is asked about lines, and what of the answer takes their place
desk.py         all of that for one editor, without its protocol
server.py       the protocol, by pygls: the only file that imports it when it is loaded

The rules of context.py and suggestions.py are the plug-in's for Vim, which has no Python; tests hold both to
the same.
"""
