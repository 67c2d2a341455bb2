"""From a name to files, and what is told of them."""
