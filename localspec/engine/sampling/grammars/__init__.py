"""The language of an answer, through llguidance: structured output, tool calls, forced tokens.

compile  compiled grammars of requests, and the cache of those that are asked again and again
sources  which grammars hold where in a request's answer, written as llguidance reads them
gbnf     llama.cpp's notation for grammars, parsed
lexemes  which parts of such a grammar are read as one
lark     such a grammar as llguidance reads it
child    the process in which each of them is compiled once, with limits on its time and memory
process  the worker's side of it
matcher  what a grammar says of an answer, token by token
gates    grammars that hold from a marker on, wherever in an answer that is
calls    the grammar of tool calls, for every notation
values   arguments in notations that are no JSON
schemas  JSON Schemas closed as llama-server closes them
"""
