"""Grammars that constrain answers, through llguidance: structured output, tool calls, forced tokens.

compile   compile the grammars of requests, with a cache for those that come again
sources   decide which grammars apply where in an answer, and write them in llguidance's Lark
gbnf      parse GBNF, llama.cpp's grammar notation
lexemes   divide a GBNF grammar into lexemes, which the lexer reads as units
lark      write a GBNF grammar in llguidance's Lark
child     the process that compiles each grammar once, with limits on its time and memory
process   the worker's side of that process
matcher   a guide that applies one grammar to a whole answer
gates     a guide that applies grammars from a marker on, anywhere in an answer
numbers   a guide that bounds the length of numbers in JSON
calls     the grammar of tool calls, in every notation
values    the grammar of arguments in notations that are not JSON
schemas   close the objects of JSON Schemas as llama-server does
enforced  reduce JSON Schemas to what llguidance can enforce
disjoint  decide whether the parts of a `oneOf` exclude each other
formats   expressions for the string formats of JSON Schema
patterns  translate the regular expressions of JSON Schema
pointers  resolve the references of JSON Schema
"""
