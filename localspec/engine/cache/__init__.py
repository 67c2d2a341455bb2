"""The KV caches: what each sequence has read, and which request reuses what.

slot          one sequence of llama.cpp: its text, how much of it each model has read (n_past), and how
              their memories are cut
slots         which request gets which slot; commit and rollback; alone writes n_past
hidden        hidden states of the target that its MTP heads have not read yet
borders       places of a prompt worth going back to: where its messages begin
shift         text found again at another place and moved within the cache, for requests that ask for it
prefixes      texts that lost their slot, copied into memory, and when a copy pays
sessions      states of conversations on disk, for after a restart: which, when, how much
session_file  one file of a session, checked so that nothing damaged is read

May import `llama`, and nothing else of the engine.
"""
