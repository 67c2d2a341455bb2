"""From tokens to the text that is shown.

text   bytes in, text out: no character and no stop string is ever cut
lines  llama-server's two rules about where an editor's completion ends

Imports nothing of ours.
"""
