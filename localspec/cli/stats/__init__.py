"""What `localspec stats` shows of kept answers, which the daemon has added up.

figures.py  what is said of a group of answers: in one place, for every form
text.py     tables and small plots, for a terminal or a pipe
page.py     the same as one HTML page
"""
