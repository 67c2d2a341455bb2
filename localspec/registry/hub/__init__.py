"""The Hugging Face hub: names, headers and bytes from it."""
