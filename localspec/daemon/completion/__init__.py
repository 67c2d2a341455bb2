"""Translate requests into frames for the engine, and its frames into the answer that a client reads.

This package imports `http` and `worker` of the daemon. It does not know where answers are stored.

request: turns bodies into frames, the one place where field names of both sides meet
headers: moves the parts of instructions that change with every request, so that the cache still hits
answer: collects the text of every choice, and runs the choices to their end, streamed or not
thinking: limits how long a model may think, in its template and in the engine
openai, llama_server: the shapes, which format the events of an answer for a client
takeover: ends an editor's older completion when a newer one arrives
anthropic, ollama, responses: translations of other protocols into the one chat request and back
reply: separates a model's output into reasoning, text and calls
"""
