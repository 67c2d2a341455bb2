"""The forms in which a report is shown.

text.py   tables on a terminal, also while the bench runs, and a comparison of two reports
page.py   an HTML page
plots.py  the plots on that page
"""
