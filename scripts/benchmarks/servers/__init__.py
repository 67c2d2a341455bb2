"""Servers of the benchmark's own, and what is asked of them.

process       `with` starts one, waits for it and ends it
daemon        a localspec daemon in a home folder of its own, and its clients
llama_server  llama-server on the same files
"""
