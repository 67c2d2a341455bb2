"""The engine: one loaded pair and the step loop that decodes with it, in a process of its own.

Or, in its place, one model that turns texts into numbers, and its step loop.

worker       the process: frames in, one engine, frames out
encoder      a pass over texts whose numbers are asked for
engine       a round: schedule → draft → decode → verify → commit → emit
scheduler    who has a slot, and what of each the next pass reads
interruption what ends a pass before its end: who leaves, or comes
endings      how a request ends: with its answer, or an error that is its alone
sequence     one request: its tokens, its slot, its status, the text it has shown
statistics   what is counted and timed of it
output       tokens' bytes → the text that is shown: stop strings, an editor's lines
priority     threads that give way to the passes of running answers
environment  what must be set before llama.cpp is loaded

A room imports only those before it: llama; sampling, output, cache; speculation; then statistics and
sequence; pair; prompt; embedding; and last the scheduler, the endings, the engine, the encoder and the
worker. The interruption imports `llama` alone.
"""
