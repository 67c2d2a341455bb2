"""Models that other programs keep on this disk, and how they could be paired.

programs.py   the folders in which other programs keep models
ollama.py     the models of Ollama, which names files by their hashes
discovery.py  find every model on this disk
matches.py    which models could draft for which, and the pairs worth adding
gain.py       the speed-up of a draft, from measurements
drafts.py     rank all models as drafts for one target
"""
