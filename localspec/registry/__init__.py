"""Pairs of models: find, check, download and store them.

Nothing here calls llama.cpp or the daemon.

catalogue.py   models.toml and the user's overlay: which pairs exist
upstreams.py   pairs that another server answers for: check, add and remove their entries
header/        what the header of a model file states, before llama.cpp sees the file
store/         the installed pairs and their files
hub/           the Hugging Face hub: names, headers and bytes from it
disk/          models that other programs keep on this disk, and how they could be paired
pulls/         downloads of a pair from the hub into the store

Each of these imports only those above it.
"""
