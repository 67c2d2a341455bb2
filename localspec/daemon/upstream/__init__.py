"""Pairs that another server answers for. They take a `Generate` and yield its events, as an engine does.

upstreams: the servers by pair, and the fallback when one does not answer
server: one server: what is known about it, and the course of a request
connection: HTTP to a server: TLS, the key, redirects, time-outs
headers: a limit for the headers of a server's response
events: the event stream of a server, checked line by line
request: convert a `Generate` to a body in OpenAI's shape, or explain why that is impossible
counting: measure one answer with the server's own counters
reply: convert a server's chunks to the events of an engine
dialects/: one file for each kind of server: the fields it knows, and how it reports its speculation

A server is only contacted for a request for its pair.
"""
