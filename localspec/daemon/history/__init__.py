"""Conversations that clients asked to keep. Imports `completion`, `http` and `logs` of the daemon.

store: SQLite, in one thread that owns it; takes and gives plain values
statistics: kept answers added up
matches: where in them a text is
turn: what is sent of a conversation that goes on, and what is kept of its answer
typed: the lines that were typed in chats
"""
