"""The engine: one loaded pair and the step loop that decodes with it, in a process of its own.

worker       the process: frames in, one engine, frames out
engine       a round: schedule → draft → decode → verify → commit → emit
scheduler    who has a slot, and what of each the next pass reads
interruption what ends a pass before its end: who leaves, or comes
endings      how a request ends: with its answer, or an error that is its alone
sequence     one request: its tokens, its slot, its status, the text it has shown
statistics   what is counted and timed of it
output       tokens' bytes → the text that is shown: stop strings, an editor's lines
environment  what must be set before llama.cpp is loaded

A room imports only those before it: llama; sampling, output, cache; speculation; then statistics and
sequence; pair; prompt; and last the scheduler, the endings, the engine and the worker. The interruption
imports `llama` alone.
"""
