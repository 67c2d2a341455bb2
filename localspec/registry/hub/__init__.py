"""The Hugging Face hub: names, headers and bytes from it.

network.py     the network settings of one environment, and an HTTP client for them
causes.py      why a request to the hub failed, in one sentence
hub.py         what a name on the hub means, and ranges of its bytes
repository.py  parse references to repositories, and list the models of a repository
retry.py       retries with growing pauses and an end
cache.py       what the Hugging Face cache on this disk has
remote.py      the start of a remote file, for its header
journal.py     which bytes of an unfinished download are written
transfer.py    the download of one file, resumable after a kill
"""
