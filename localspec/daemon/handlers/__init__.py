"""One small module per group of endpoints; `routes.py` joins them in one table.

protocols: those that other clients speak
"""
