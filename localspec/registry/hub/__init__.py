"""The Hugging Face hub: names, headers and bytes from it.

network.py     what an environment says about the network, and an HTTP client made of it
causes.py      why the hub could not be asked, in one sentence
hub.py         which bytes a name means, and ranges of them
repository.py  what a person wrote for a repository, and which models its files are
retry.py       trying again, with patience and an end
cache.py       what the Hugging Face cache on this disk has
remote.py      the start of a file, for its header
journal.py     which bytes of an unfinished file are there
transfer.py    one file's bytes, resumable after a kill
"""
