"""Pairs that another server answers for: to the rest of the daemon one more thing that takes a `Generate`
and gives back its events.

upstreams: the servers by their pairs; whose turn it is when one does not answer
server: one of them: what is known of it, and a request on its way through it
connection: HTTP to it: TLS, the key, redirects, time-outs
events: its stream, line by line, every one of them checked
request: a `Generate` as a body of OpenAI's shape, or why it cannot be one
counting: what its own counters say of one answer
reply: what it sends, as the events that an engine gives
dialects/: one file for each kind of server: what fields it knows, how it tells of its speculation

Nothing here contacts a server but for a request for its pair.
"""
