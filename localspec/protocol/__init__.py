"""Everything that crosses a process boundary: HTTP bodies, and frames between daemon and worker.

Modules here import nothing else of the package except one another.

frames.py         frames between the daemon and its engine worker, and how they are encoded
settings.py       the limits of each setting, for the configuration, models.toml and frames alike
sampling.py       the sampling parameters: types, limits and other names
aliases.py        fields of vLLM's and SGLang's requests that are served under other names
requests.py       requests of clients: OpenAI's and llama-server's
fields.py         what becomes of request fields that no struct declares
answers.py        what clients get: completions, errors, status
pairs.py          pairs and pulls, also as the registry returns them
disk.py           the models on this disk, and which could draft for which
conversations.py  saved conversations
statistics.py     statistics of saved answers
reading.py        decode a JSON body into its struct, or refuse it with one sentence
clients/          requests and responses of other protocols than OpenAI's and llama-server's
calls.py          tool calls: how model families write them, which are allowed, and calls as text
visibility.py     which characters of an answer its reader sees
"""
