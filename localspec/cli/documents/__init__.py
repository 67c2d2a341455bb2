"""What a question can be about beside plain text files. Each is imported when a file of its kind is named.

folders.py    the text files in a folder
notebooks.py  Jupyter notebooks
pdf.py        PDF documents
"""
