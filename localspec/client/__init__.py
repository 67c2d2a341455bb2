"""The thin client of the daemon. It uses the standard library only, because `ask` waits for every import.

transport.py      the daemon's socket: its path, HTTP over it, and the events of a response
api.py            one method per endpoint that `ask` needs
pairs.py          pairs and pulls
conversations.py  kept conversations and statistics
tasks.py          requests as asyncio tasks, which can be cancelled
autostart.py      starting a daemon, and replacing one of another version

This package imports `errors` and `paths`, and nothing of the daemon.
"""
