"""Translate Anthropic's Messages into the one chat request, and its answer back.

request: translates requests, and names the fields that have no effect
answer: formats the events of an answer, streamed or whole
threads: translates stored conversations, which a request continues by an answer's id
"""
