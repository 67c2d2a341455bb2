"""A pair from the hub into the store.

wanted.py   what a person asked for, kept until it is here
state.py    what a pull shows of itself
plan.py     which files, and all that their headers can tell
pull.py     a plan carried out: fetch, verify, show
decide.py   which file of a repository, and what drafts for it
running.py  the pulls under way: started once, watched by many
"""
