"""Markdown on a terminal while it is being written: its marks are drawn, and no text is lost.

Only what cannot be mistaken for text is taken as a mark: headings, list bullets, rules, fences, tables,
`code` and emphasis that stands around words. All else (HTML, links, entities, escapes, the numbers of
lists) appears as the model wrote it, and every line stays a line.

screen.py     pieces of text → the terminal: what is drawn again, and what has scrolled away
page.py       a whole page → rows, for a pager
lines.py      what a source line is, from the lines before it
inline.py     emphasis and code within a line; wrapping; how wide text is
tables.py     rows of a table, aligned where they fit
fences.py     which lines are code
highlight.py  colours of code
"""
