"""`localspec export`: a pair as the command or the file by which another engine serves it.

pair.py      what is known of the pair, from the daemon's answers; how deep to draft
engines.py   vLLM, SGLang, TensorRT-LLM, llama-server: their arguments, and what they cannot do with it
compose.py   any of them as a compose file
script.py    a shell script
connect.py   the `localspec add` line that connects to it
"""
