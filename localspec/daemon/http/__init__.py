"""HTTP itself. Nothing here knows what is served: of the daemon it imports `threads` alone.

connection: one client's, read strictly and in bounded time; only our own user's on a Unix socket
tcp: the listener that is off by default, and who may speak there
sockets: the Unix socket, whether somebody answers on it, and what a service manager hands over
lock: which daemon may run
requests: who asks, a request's body read, a value as an answer, work that ends when its client leaves
sse: server-sent events
errors: errors as answers, in OpenAI's shape
"""
