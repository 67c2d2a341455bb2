"""The daemon: one per user, HTTP on a Unix socket in front of a supervised engine worker.

Nothing here imports llama_cpp or numpy. A room imports only those below it:

__main__, lifecycle: from start to a clean end; routes: the table of endpoints; watch: edited files
handlers: one small module per group of endpoints: parse, call, answer
state: what handlers share
history: conversations that clients asked to keep
completion: from a request to frames for the engine, and from its frames to an answer
pairs: from a name to files, and what is told of them
upstream: pairs that other servers answer for
worker: the engine's process, what it holds, who may use it, how it ends
http: HTTP itself; threads: work that blocks; logs: the log file
"""
