"""From a request to frames for the engine, and from its frames to the answer a client reads."""
