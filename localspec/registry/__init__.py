"""Pairs of models: find, check, pull, keep. Nothing here talks to llama.cpp or to the daemon.

catalogue.py   models.toml and the user's overlay: which pairs there are
upstreams.py   those of them that another server answers for, written down and removed
header/        what a model's file says of it, before llama.cpp sees it
store/         the pairs that are here, and their files
hub/           the Hugging Face hub: names, headers and bytes from it
disk/          models that other programs keep on this disk, and what they could be to each other
pulls/         a pair from the hub into the store

Each of these imports only those above it.
"""
