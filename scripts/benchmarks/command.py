"""What the benchmarks' command lines share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def say(text: str) -> None:
    """Progress, on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def positive(text: str) -> int:
    """Return a number of at least 1, as a type of argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark that builds pairs."""
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of texts and order")
    add("--threads", type=int, default=0, help="0: one per core")
    add("--work", type=Path, help="where the pairs are kept (the cache folder)")
    add("--json", type=Path, metavar="FILE", help="write everything there, raw runs included")
    add("--llama-server", type=_program, metavar="PATH", help="compare with this llama-server")


def _program(text: str) -> Path:
    if not os.access(text, os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} is not a program")
    return Path(text)
