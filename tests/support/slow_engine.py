"""The engine, on a machine so slow that each row of a pass takes SECONDS.

Usage: `python slow_engine.py SECONDS FILE --fd N`. While FILE exists, a pass never ends.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp

from localspec.engine.__main__ import main

SECONDS, HANG = float(sys.argv.pop(1)), Path(sys.argv.pop(1))
decode = llama_cpp.llama_decode


def decode_slowly(context: Any, batch: Any) -> int:
    while HANG.exists():
        time.sleep(0.05)
    time.sleep(SECONDS * batch.n_tokens)
    result: int = decode(context, batch)
    return result


llama_cpp.llama_decode = decode_slowly
main()
