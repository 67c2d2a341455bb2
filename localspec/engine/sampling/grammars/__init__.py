"""The language of an answer, through llguidance: structured output, tool calls, forced tokens.

compile  JSON Schemas, GBNF and regular expressions compiled; the cache of what is asked again and again
matcher  what a grammar says of an answer, token by token
gates    grammars that hold from a marker on, wherever in an answer that is
plans    which grammars hold where in a request's answer: after thoughts, from a call's marker on
calls    the grammar of tool calls, for every notation
values   arguments in notations that are no JSON
schemas  JSON Schemas closed as llama-server closes them
"""
