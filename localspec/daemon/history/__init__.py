"""Conversations that clients asked to keep. Imports `completion`, `http` and `logs` of the daemon.

store: what is kept, read and removed, in one thread that owns the file; takes and gives plain values
database: that file, SQLite: opened, brought up to date, cleaned of what was removed
responses: kept responses of OpenAI's Responses API, each a turn of a conversation
statistics: kept answers added up
matches: where in them a text is
turn: what is sent of a conversation that goes on, and what is kept of its answer
typed: the lines that were typed in chats
"""
