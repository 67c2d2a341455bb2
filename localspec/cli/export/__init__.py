"""`localspec export`: a pair as the command or the file with which another engine serves it.

pair.py      the pair, from the daemon's answers, and the depth of its drafts
engines.py   arguments of vLLM, SGLang, TensorRT-LLM and llama-server, and their limitations
compose.py   any of them as a compose file
script.py    any of them as a shell script
connect.py   the `localspec add` line that connects to it
"""
