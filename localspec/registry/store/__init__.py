"""The installed pairs and their files.

files.py      write files atomically, lock them, hash them
records.py    one JSON record for each pair
store.py      the content-addressed files and the records
integrity.py  check that files have not changed since they were hashed
garbage.py    delete what no pair needs any more
local.py      pairs of the user's own files, which are used where they lie
details.py    everything that `localspec show` displays about a pair
"""
