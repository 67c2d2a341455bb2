"""Anthropic's Messages, as a translation of our one chat request and of its answer.

request: their request into ours; what changes nothing is told
answer: our answer's events as theirs, streamed or whole
threads: stored conversations, which a request continues by an answer's id
"""
