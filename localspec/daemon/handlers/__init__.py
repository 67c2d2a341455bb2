"""One small module per group of endpoints; `routes.py` joins them in one table."""
