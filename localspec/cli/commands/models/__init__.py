"""The commands about pairs, models and files, each in the file of its name.

list, catalogue, show  what is here, and what could be
pull, pulls            fetch a pair; the pulls that run
verify, rm, gc         check, remove, delete what nobody needs
add, import_, drafts   pairs of models that are on this disk
"""
