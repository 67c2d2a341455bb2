"""The KV caches: which slot holds what, prefixes to start from, sessions kept on disk."""
