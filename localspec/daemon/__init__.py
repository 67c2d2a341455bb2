"""The daemon: one per user, HTTP on a Unix socket in front of a supervised engine worker.

Nothing here imports llama_cpp or numpy. A module imports only those below it in this list:

__main__, lifecycle: from the start to a clean end; routes: the table of endpoints; watch: edited files
handlers: one small module per group of endpoints, which parse a request and send the response
state: the objects that handlers share
history: conversations that clients asked to keep
completion: convert requests to frames for the engine, and the engine's frames to answers
pairs: resolve names of pairs to files, and describe pairs
upstream: pairs that other servers answer for
worker: the engine processes, what they hold, which requests run, and how they end
http: HTTP itself; threads: blocking work; logs: the log file
"""
