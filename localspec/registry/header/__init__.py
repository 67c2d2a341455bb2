"""What a model's file says of it, before llama.cpp sees it."""
