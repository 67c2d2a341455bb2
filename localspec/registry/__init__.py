"""Pairs of models: find, check, pull, keep. Nothing here talks to llama.cpp or to the daemon.

catalogue.py   models.toml and the user's overlay: which pairs there are
gguf.py        the header of a GGUF file, from disk or over HTTP ranges
model.py       what a header says about the model, and the values that would end llama.cpp
               (vocabulary.py: the same for its tokens; architectures.py: what can roll back)
tokenizer.py   do two files speak the same tokens? pairing.py: may they be a pair?
fit.py         memory a pair needs, and the context and layers that fit
hub.py         the Hugging Face hub: metadata, ranges, errors in our words (retry.py: patience)
network.py     what an environment says about the network, and an HTTP client made of it
causes.py      why the hub could not be asked, in one sentence
remote.py      the start of a file on the hub, for its header
transfer.py    one file's bytes, resumable after a kill (journal.py)
pull.py        a pair: check by headers, fetch, verify, show (pulls.py: several at once)
store.py       content-addressed files and one record per pair (records.py, files.py)
own.py         the user's own files, used where they lie
details.py     all there is to show about a pair
drafts.py      every model on this disk (found.py), ranked as drafts for a target
"""
