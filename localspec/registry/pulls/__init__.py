"""Pulls: downloads of a pair from the hub into the store.

wanted.py   what a user asked to pull, stored until it is complete
state.py    the progress of a pull, as it is shown
plan.py     which files a pair needs, and the checks that headers allow
pull.py     carry out a plan: download, verify, add to the store
decide.py   choose the file of a repository, and what drafts for it
running.py  the pulls in progress: each is started once and may be watched by many
"""
