"""The commands about pairs, models and files, in files of the same names.

list, use, catalogue, show  installed pairs, and pairs that can be pulled
pull, pulls                 download a pair; running pulls
verify, rm, gc              check files, remove pairs, delete unused files
add, import_, drafts        pairs made from models on this disk
"""
