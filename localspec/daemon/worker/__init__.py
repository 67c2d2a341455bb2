"""The engine worker: its process, what it holds, who may use it, how it ends.

supervisor: a request on its way through the queue into the worker, and the idle time
purposes: what a model may be asked for
admission: the queue
forecast: how long it takes, by what requests took before
loaded: the pair in memory: unloaded, loading or ready
placement: how a pair is loaded so that it fits
process: one engine process, the frames to and from it, the requests that run in it
death: what the end of a worker means
safe_mode: whether llama.cpp's fast kernels are off, remembered between runs
metrics: what is counted of the requests

It knows frames and no HTTP: of the daemon it imports `logs` alone.
"""
