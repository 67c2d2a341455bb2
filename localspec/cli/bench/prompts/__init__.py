"""The prompts of a bench.

workloads.py   prompts of workloads.toml, of a file, or of the history
installed.py   well-known prompts of installed packages
"""
