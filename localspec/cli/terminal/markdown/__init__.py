"""Draw Markdown on a terminal while it is being generated, without losing any text.

Only marks that cannot be mistaken for text are drawn: headings, list bullets, rules, fences, tables,
`code` and emphasis around words. Everything else (HTML, links, entities, escapes, the numbers of lists)
appears as the model wrote it, and every line stays a line.

screen.py     draws pieces of text on the terminal, and redraws rows that have not scrolled away
page.py       lays out a whole page for a pager
lines.py      classifies a source line, depending on the lines before it
inline.py     emphasis and code within a line, wrapping, and the width of text
tables.py     rows of a table, aligned where they fit
fences.py     finds the lines that are code
highlight.py  colours of code
"""
