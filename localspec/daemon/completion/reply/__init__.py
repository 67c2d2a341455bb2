"""What a model wrote, taken apart. Imports nothing else of the daemon.

parser: thoughts, text and calls of an answer as it comes
calls: the notations in which models write calls
tools: which of them a template goes with, and what a request's tools come to
"""
