"""The engine workers: their processes, the pairs that they hold, and their ends.

supervisor: the course of a request through its pair's queue into the worker
purposes: which requests a model can serve
residents: the pairs in memory, one load at a time
room: which pairs are in memory together, and which is evicted for a new one
loaded: one pair, from its load to the end of its worker, and its idle time
states: unloaded, loading or ready
queue/: the queue before a worker, and the forecast of waiting times
placement: how a pair is loaded so that it fits in memory
process: one engine process, the frames to and from it, and the requests that run in it
death: the meaning of a worker's end
safe_mode: whether llama.cpp's fast kernels are off, remembered between runs
metrics: counts of the requests

This package uses frames and no HTTP. Of the daemon's other modules it imports only `logs`.
"""
