"""OpenAI's Responses API on the wire. Imports what chats share of `protocol`.

requests: what a client asks
items: what its answer consists of, and what is listed of its input
events: what comes in a stream
"""
