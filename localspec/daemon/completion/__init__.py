"""From a request to frames for the engine, and from its frames to the answer a client reads.

Imports `http` and `worker` of the daemon; it does not know where answers are kept.

request: bodies into frames, the one place where field names of the two worlds meet
headers: what agents change before their instructions, put where it costs no reading
answer: what the choices have said, and how they run to their end, streamed or whole
thinking: how long a model may think, as its template and the engine are told
openai, llama_server: the shapes, each an answer's events as a client reads them
takeover: an editor's newer completion ends its older one
anthropic, ollama: their requests and answers, as translations of ours
reply: what a model wrote, taken apart
"""
