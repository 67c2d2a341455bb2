"""The engine, on a GPU that can be lost: `python lost_gpu.py FILE --fd N`.

While FILE exists, decoding fails as its text says, `code N` or `abort`, and removes the file: the GPU
works again for the next engine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp

from localspec.engine.__main__ import main

LOST = Path(sys.argv.pop(1))
decode = llama_cpp.llama_decode


def decode_unless_lost(*arguments: Any) -> int:
    if not LOST.exists():
        result: int = decode(*arguments)
        return result
    fault = LOST.read_text().split()
    LOST.unlink()
    if fault[0] == "abort":  # as ggml does it
        sys.stderr.write("CUDA error: the launch failed\n")
        sys.stderr.flush()
        os.abort()
    return int(fault[1])


llama_cpp.llama_decode = decode_unless_lost
main()
