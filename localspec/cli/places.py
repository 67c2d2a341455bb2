"""Files named on the command line: they are named from here, and the daemon lives elsewhere."""

# ruff: noqa: PTH100, PTH110, PTH111, PTH113 - pathlib would cost `ask -m` its import
from __future__ import annotations

import os


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def pair(name: str) -> str:
    """A pair's name as it is, and one of Ollama's; a file, and two with a comma, from the root on."""
    return ",".join(absolute(each) if is_path(each) else each for each in name.split(","))


def is_path(name: str) -> bool:
    """Whether it means a file here. A pair's name has no slash, and one of Ollama's leads nowhere."""
    if name.lower().endswith(".gguf") or name.startswith(("/", "~", "./", "../")):
        return True
    return "/" in name and os.path.isfile(name)


def file(name: str) -> str:
    """Where only a file can be meant: its path, else a name of Ollama's with its tag."""
    if is_path(name) or os.path.exists(name) or "," in name:
        return absolute(name)
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
