"""The commands about pairs, models and files."""
