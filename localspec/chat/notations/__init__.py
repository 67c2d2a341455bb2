"""How tool calls are written, read and constrained, whichever family of models writes them."""
