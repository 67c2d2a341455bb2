"""The commands about the daemon itself."""
