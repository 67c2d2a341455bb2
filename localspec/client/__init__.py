"""The thin client of the daemon: standard library only, because `ask` waits for every import.

transport.py      the daemon's socket: where it is, HTTP over it, and an answer's events
api.py            a method per endpoint of those that `ask` needs
pairs.py          pairs and pulls
conversations.py  what was asked and answered
tasks.py          requests as asyncio tasks, which can be cancelled
autostart.py      starting a daemon, and replacing one of another version

It imports `errors` and `paths`, and nothing of the daemon.
"""
