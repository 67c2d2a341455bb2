"""The engine: one loaded pair and the step loop that decodes with it, in a process of its own."""
