"""Speculative decoding: what to draft and how deep, and what of it the target keeps."""
