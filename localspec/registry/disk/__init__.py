"""Models that other programs keep on this disk, and what they could be to each other.

programs.py   where other programs keep models; ollama.py: Ollama, which names files by hashes
discovery.py  every model on this disk
matches.py    which of them could draft for which, and the pairs worth making
gain.py       what a draft is worth, from measurements
drafts.py     all of them ranked as drafts for one target
"""
