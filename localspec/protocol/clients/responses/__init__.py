"""OpenAI's Responses API: requests, responses and the events of a stream.

It imports only what chats share of `protocol`.

requests.py   the request of a client
items.py      a response, its items, and the items that are listed of its input
events.py     the events of a stream
"""
