"""A model that turns texts into numbers, and texts made ready for it.

model.py   the model, loaded, and its passes
inputs.py  from a request to rows of tokens
"""
