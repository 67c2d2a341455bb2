"""A pair from the hub into the store.

wanted.py   what a person asked for, kept until it is here
pull.py     check by headers, fetch, verify, show
decide.py   which file of a repository, and what drafts for it
running.py  the pulls under way: started once, watched by many
"""
