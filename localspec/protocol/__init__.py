"""What crosses a process boundary: HTTP bodies and daemon ↔ worker frames. Imports nothing of ours.

frames.py         daemon ↔ engine worker: what is asked of a generation, what comes of it, how it is framed
settings.py       how far each setting may go, for the configuration, models.toml and frames alike
sampling.py       the sampling parameters: types, limits and other names, for requests and frames alike
requests.py       what clients ask: OpenAI's requests and llama-server's
answers.py        what they get: completions, errors, status
pairs.py          pairs and pulls; the registry answers in these forms too
disk.py           models on this disk: which there are, and which could draft for which
conversations.py  what is kept of conversations
statistics.py     kept answers added up
reading.py        a JSON body into its struct, or one sentence that refuses it; what that may cost
clients/          what clients of other protocols send and get
calls.py          tool calls: how families write them, what may be called, and as text
"""
