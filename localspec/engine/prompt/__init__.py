"""From a request to the tokens of its prompt, and the grammar of its answer."""
