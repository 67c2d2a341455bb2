"""Pairs as the daemon's handlers use them. Everything here blocks, so call it in a thread.

registry.py  the store, catalogue and pulls of one user, and the lookup of pairs by name
names.py     resolve any name of a pair to its files
pulls.py     start a pull for a request
upstreams.py pairs that another server answers for
local.py     a pair made of the person's own files
verify.py    hash every file of a pair
views.py     pairs, lists of pairs and drafts as the API shows them
disk.py      the models on this disk as the API shows them
measure.py   measure in the engine what a draft is worth
"""
