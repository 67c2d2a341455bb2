"""Store the conversations that clients asked to keep.

This package imports `completion`, `http` and `logs` of the daemon.

store: writes, reads and removes conversations, in one thread that owns the file
database: opens the SQLite file, migrates it and cleans it of removed text
responses: stored responses of OpenAI's Responses API, each a turn of a conversation
statistics: sums over stored answers
matches: finds the line of a conversation that contains a text
turn: one question and its answer: what is sent of an earlier conversation, what is stored afterwards
typed: the lines that people typed in chats
"""
