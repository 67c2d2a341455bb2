"""Documents other than plain text files that a question can be about.

Each module is imported when a file of its kind is named.

folders.py    the text files in a folder
notebooks.py  Jupyter notebooks
pdf.py        PDF documents
"""
