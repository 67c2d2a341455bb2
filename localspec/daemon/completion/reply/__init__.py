"""What a model wrote, taken apart. Imports nothing else of the daemon.

parser: thoughts, text and calls of an answer as it comes
calls: what a call and a reader of calls is; those in JSON
notations: those that are no plain JSON, and which reader goes with a format
blocks: calls as plain JSON of models whose template has another notation
channels: gpt-oss's messages, as thoughts, text and calls of others
found: one that was found from a template, by its literals
seen: how a template of no known family has calls written, from what it makes of some
tools: which of them a template goes with, and what a request's tools come to
"""
