"""The registry for the daemon's handlers: what goes over the socket about pairs. Blocks; for threads.

registry.py  store, catalogue and pulls of one user, and the pairs by their names
names.py     from any name of a pair to its files
pulls.py     from a request to a running pull
upstreams.py pairs that another server answers for
local.py     a pair of the person's own files
verify.py    hashing every file of a pair
views.py     a pair, the list of them and drafts, as they are shown
disk.py      the models on this disk, as they are shown
measure.py   what a draft is worth, measured in the engine
"""
