"""The engine workers: their processes, what they hold, who may use them, how they end.

supervisor: a request on its way through its pair's queue into the worker
purposes: what a model may be asked for
residents: the pairs in memory, one load at a time
room: who is in memory together, and who leaves for a newcomer
loaded: one pair, from its load to the end of its worker, and its idle time
states: unloaded, loading or ready
queue/: the queue before it, and how long that takes
placement: how a pair is loaded so that it fits
process: one engine process, the frames to and from it, the requests that run in it
death: what the end of a worker means
safe_mode: whether llama.cpp's fast kernels are off, remembered between runs
metrics: what is counted of the requests

It knows frames and no HTTP: of the other rooms it imports `logs` alone.
"""
