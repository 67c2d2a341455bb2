"""Files named on the command line: they are named from here, and the daemon lives elsewhere."""

# ruff: noqa: PTH100, PTH111 - pathlib would cost `ask -m` its import
from __future__ import annotations

import os


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def pair(name: str) -> str:
    """A pair's name as it is; "target.gguf" and "target.gguf,draft.gguf" from the root on."""
    if not name.endswith(".gguf"):
        return name
    return ",".join(map(absolute, name.split(",")))
