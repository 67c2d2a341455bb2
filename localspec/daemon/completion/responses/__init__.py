"""OpenAI's Responses API: a translation into the one chat request, and back. Imports `completion`.

request: a request into a chat's
items: items of the input into messages, and messages into items
tools: tools and choices of several kinds into functions, and a call back into its kind
output: the items of an answer as they come, each with its events
shape: the response around them, streamed or whole
kept: kept responses, their items and what ids of items mean
running: responses under way, which may be cancelled by their ids
"""
