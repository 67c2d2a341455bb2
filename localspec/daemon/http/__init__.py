"""HTTP itself, without knowledge of what is served. Of the daemon it imports `threads` only.

connection: one client's connection, read strictly and in bounded time; only our own user on a Unix socket
tcp: the listener that is off by default, and who may use it
sockets: the Unix socket, whether a daemon answers on it, and sockets passed by a service manager
lock: which daemon may run
requests: request bodies, JSON responses, and work that ends when its client leaves
sse: server-sent events
errors: errors as responses, in the shape of the protocol that the client speaks
"""
