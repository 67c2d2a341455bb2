"""The pairs that are here, and their files.

files.py      files written whole, locked, hashed
records.py    one JSON record for each pair
store.py      content-addressed files and the records
integrity.py  are the files what they were when their hashes were taken?
garbage.py    what no pair needs any more
local.py      pairs of the person's own files, used where they lie
details.py    all there is to show about a pair
"""
