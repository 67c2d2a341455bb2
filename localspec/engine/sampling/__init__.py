"""Sampling: turn a row of logits into the next token, with llama.cpp's order of steps and meaning.

settings      a request's sampling settings, over those of the model's file, over llama.cpp's defaults
sampler       the sampler of one request: penalties, distribution, draw; log-probabilities
penalties     repeat, frequency and presence penalties, and DRY
distribution  top-k, typical, top-p, min-p and temperature; draws that do not depend on candidate order
infill        llama.cpp's infill sampler, which decides where a fill-in-the-middle completion ends
grammars/     constraints on the text of an answer: structured output, tool calls, forced tokens
guide         the interface of everything that masks tokens beside the logits
deferred      a guide that runs in its own thread, so that a slow one delays no other request
thoughts      a guide that limits how many tokens the model may spend on thinking
minimum       a guide that forbids the end of an answer before a minimum length

This package may import `llama`, and nothing else of the engine.
"""
