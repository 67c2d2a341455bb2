"""`scripts/bench PART …`: each part is a module with `main(arguments) -> int`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

PARTS = {
    "cli": "what the command line adds to the engine's own time",
    "start": "the daemon until it answers, and what it holds with nothing loaded",
    "gpu": "whether everything holds on this machine's GPU (scripts/gpu_check)",
    "engine": "tokens per second, plain and speculative",
    "device": "the depth policy on a GPU's recorded costs, without a GPU",
    "ablation": "the depth policy without one of its mechanisms at a time, on recorded costs",
    "tasks": "tokens per second on a real model, of tasks like people's",
    "placement": "a mixture of experts on a GPU that does not hold it, beside llama-server",
    "forecasts": "how right forecasts of a pair's speed are, each from the other pairs",
    "next_edit": "an editor's next edits, of sessions made from this repository's history",
    "api": "several clients, long prompts, cancellation, beside llama-server",
    "agents": "tokens read of coding agents' requests, by kind of model and event",
    "verdicts": "what `localspec bench` says of a bad pair, and of one that is good for code alone",
    "agreement": "whether `localspec bench` measures what the engine does by itself",
    "budget": "several pairs in memory that does not hold them all",
    "waits": "how well the wait for a long prompt is forecast",
    "soak_daemon": "load on a daemon for as long as one likes (scripts/soak)",
}

OWN_ENGINE = {
    "agreement",
    "engine",
    "forecasts",
    "gpu",
    "next_edit",
    "placement",
    "tasks",
}  # they run one in their own process


def main(arguments: list[str]) -> int:
    """Run one part; 2 when there is none of that name."""
    if not arguments or arguments[0] not in PARTS:
        lines = [f"  {name:11} {what}\n" for name, what in PARTS.items()]
        sys.stderr.write(f"Usage: scripts/bench PART [OPTIONS]\n\n{''.join(lines)}")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    code: int = importlib.import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])
    return code


def _as_an_engine() -> None:
    """Have the environment that a daemon gives its engine, part of which is read as a process begins."""
    from localspec.children import engine_environment

    tunables = engine_environment()["GLIBC_TUNABLES"]
    if os.environ.get("GLIBC_TUNABLES") != tunables:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "GLIBC_TUNABLES": tunables})


if __name__ == "__main__":
    # Python puts the folder it was told to run there; a PYTHONPATH would be handed on to every daemon.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    if OWN_ENGINE.intersection(sys.argv[1:2]):
        _as_an_engine()
    sys.exit(main(sys.argv[1:]))
