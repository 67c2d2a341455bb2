"""The KV caches: what each sequence has read, which request goes on from what, and what outlives a slot.

slot          one sequence of llama.cpp's: its text, how much of it each model has read (n_past), and how
              what they remember is cut
slots         who gets which slot, commit and rollback: alone writes n_past
hidden        a target's hidden states that its MTP heads have not read yet
borders       where a prompt is worth going back to: where its messages begin
shift         text found again at another place, moved in the cache for those who asked for that
prefixes      texts that lost their slot, copied into memory, and when a copy pays
sessions      conversations' states on disk, for after a restart: which, when, how much
session_file  one of them, and that nothing damaged is read from it

May import `llama`, and nothing else of the engine.
"""
