"""The pairs that are here, and their files."""
