"""How a report looks.

text.py   tables, the table while it runs, two reports beside each other
page.py   the same as one HTML page
plots.py  what is drawn on it
"""
