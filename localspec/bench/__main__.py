"""`python -m localspec.bench cli|start|engine|api …`: each part is a module with `main(arguments) -> int`."""

from __future__ import annotations

import importlib
import sys

PARTS = {
    "cli": "what the command line adds to the engine's own time",
    "start": "the daemon until it answers, and what it holds with nothing loaded",
    "gpu": "whether everything holds on this machine's GPU (scripts/gpu_check)",
    "engine": "tokens per second, plain and speculative",
    "api": "time to first token, cancellation, several clients",
}


def main(arguments: list[str]) -> int:
    """Run one part; 2 when there is none of that name."""
    if not arguments or arguments[0] not in PARTS:
        lines = [f"  {name:7} {what}\n" for name, what in PARTS.items()]
        sys.stderr.write(f"Usage: scripts/bench PART [OPTIONS]\n\n{''.join(lines)}")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        part = importlib.import_module(f"localspec.bench.{arguments[0]}")
    except ModuleNotFoundError as error:
        if error.name != f"localspec.bench.{arguments[0]}":
            raise
        sys.stderr.write(f"localspec: the benchmark '{arguments[0]}' is not written yet.\n")
        return 1
    code: int = part.main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
