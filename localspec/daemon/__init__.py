"""The daemon: one per user, HTTP on a Unix socket in front of a supervised engine worker.

`lock` decides who runs, `lifecycle` starts and drains, `listener` owns the socket, `routes` is the
table of endpoints, `translate` and `answers` map HTTP to frames and back, `supervisor` carries
requests to the `loaded_pair`, which keeps a `worker` alive, `admission` is the queue, `in_flight`
what has left it. Nothing here imports llama_cpp or numpy.
"""
