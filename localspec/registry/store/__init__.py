"""The pairs that are here, and their files.

files.py    files written whole, locked, hashed
records.py  one JSON record for each pair
store.py    content-addressed files and the records
local.py    pairs of the person's own files, used where they lie
details.py  all there is to show about a pair
"""
