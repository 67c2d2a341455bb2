"""Prepare requests in threads beside the step loop: turn prompts into tokens.

prepare         turn a request into a TokenizedRequest: tokens, sampler, compiled grammar
preparers       the threads that prepare requests
infill          turn the text around an editor's cursor into tokens
template        render a chat with the model's own template, and detect what the template supports
wordings        rewrite a conversation so that the template loses nothing of it
marks           detect the markers of thoughts from what a template renders
special_tokens  tokenize a rendered prompt so that only the template's special tokens count as special
provenance      track which characters of a prompt the template wrote, while it is rendered
spellings       search for many texts at once
template_child  the process that runs the template, which is killed if it takes too long

This package may import `pair`, `cache`, `sampling`, `speculation.drafters`, `llama` and the sequence.
"""
