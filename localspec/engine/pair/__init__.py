"""The loaded pair: its models and contexts, what passes cost, how it is placed."""
