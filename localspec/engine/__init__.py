"""The engine: one loaded pair and the step loop that decodes with it, in a process of its own.

Instead of a pair it can be one model that embeds or reranks texts, with its own step loop.

worker        the process: frames in, one engine, frames out
encoder       the step loop of a model that embeds or reranks texts
engine        the step loop; a round is schedule → draft → decode → verify → commit → emit
scheduler     which request has a slot, and which of its tokens the next pass reads
interruption  what ends a pass early: a request that is withdrawn, or a new one
endings       how a request ends: with its answer, or with an error that is its alone
sequence      one request: its tokens, its slot, its status, the text it has shown
statistics    counts and times of a request
output        from the bytes of tokens to the text that is shown: stop strings, an editor's lines
priority      threads that give way to the passes of running answers
environment   what must be set before llama.cpp is loaded
rpc_entrance  which connections an RPC worker on the loopback interface accepts

A package imports only those before it in this order: llama; sampling, output, cache; speculation; statistics
and sequence; pair; prompt; embedding; and last the scheduler, the endings, the engine, the encoder and the
worker. The interruption imports `llama` alone.
"""
