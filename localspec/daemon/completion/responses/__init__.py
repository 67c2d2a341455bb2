"""Translate OpenAI's Responses API into the one chat request, and back.

This package imports `completion`.

request: translates a request into a chat
items: translates items of the input into messages
tools: translates tools and choices of several kinds into functions, and calls back
output: builds the items of an answer as they arrive, with their events
shape: builds the response around them, streamed or whole
kept: reads stored responses, their items and the ids of items
running: lists responses under way, which can be cancelled
"""
