"""Embedding models and rerankers.

model.py   load a model and run its passes
inputs.py  turn a request into rows of tokens
"""
