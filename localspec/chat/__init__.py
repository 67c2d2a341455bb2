"""What a model writes: how its answers and calls are read, and how they are described to it."""
