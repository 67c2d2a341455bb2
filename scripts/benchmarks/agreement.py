"""Check that `localspec bench` and these benchmarks measure the same of one pair.

`localspec bench` asks the daemon by its socket, `scripts/bench engine` and `scripts/bench tasks` step an
engine in their own process. Here both are asked the same: the bench's own chats, as many tokens, in the same
order and in turns, each with a pair loaded afresh that has learned nothing. Compared is what both report:
tokens per second from the first token to the last, plain, and with drafts over plain.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.command import positive, say
from benchmarks.load import load_report
from localspec.engine import environment
from localspec.errors import LocalspecError
from localspec.paths import default_paths


def main(arguments: list[str]) -> int:
    """Print both; 1 where they do not agree."""
    environment.prepare()  # as in the worker, and before llama_cpp is imported
    parser = argparse.ArgumentParser("scripts/bench agreement", description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, help="a real model; none: the quick synthetic pair")
    add("--draft", type=Path, help="its draft; none: drafts from the text itself")
    add("--acceptance", default="0.8", help="of the synthetic pair (0.8)")
    add("--tokens", type=positive, default=64, help="of an answer (64)")
    add("--repetitions", type=positive, default=1, help="of each prompt (1)")
    add("--context", type=positive, default=2048, help="tokens (2048)")
    options = parser.parse_args(arguments)
    try:
        say(load_report())
        return _compare(options)
    except (LocalspecError, OSError) as error:
        sys.stderr.write(f"localspec: {error}\n")
        return 1


def _compare(options: argparse.Namespace) -> int:
    from benchmarks.measuring.agreement import compare
    from benchmarks.measuring.workloads import QUICK, build, workload
    from localspec.engine import llama

    files = [path.absolute() for path in (options.target, options.draft) if path]
    if not files:
        built = build(default_paths().cache / "bench", QUICK, workload(options.acceptance), say)
        files = [built.target, built.draft]
    llama.initialise()
    return compare(files, options.tokens, options.repetitions, options.context)
