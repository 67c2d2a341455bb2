"""The output of `localspec stats`: statistics of saved answers, which the daemon has computed.

figures.py  cells and sentences about a group of answers, for every form of output
text.py     tables and small plots, for a terminal or a pipe
page.py     the same as one HTML page
"""
