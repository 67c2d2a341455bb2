"""What is asked.

workloads.py   workloads.toml, a file of one's own, the history
installed.py   well-known prompts of packages that are installed
"""
