"""Handle HTTP requests, one small module per group of endpoints; `routes.py` joins them in one table.

protocols: the endpoints of protocols that other clients speak
"""
