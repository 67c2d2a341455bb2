"""Separate a model's output into reasoning, text and calls.

This package imports nothing else of the daemon.

parser: separates the parts of an answer while it arrives
calls: defines calls and readers of calls, and reads those in JSON
notations: reads calls in other notations, and selects the reader for a format
blocks: reads calls in plain JSON, from models whose template has another notation
channels: rewrites gpt-oss's messages as reasoning, text and calls of other models
found: reads calls in a notation that was discovered from a template
seen: discovers how a template of no known family writes calls, from what it renders
tools: selects the format that goes with a template, and prepares a request's tools
"""
