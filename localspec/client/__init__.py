"""The thin client of the daemon: standard library only, because `ask` waits for every import."""
