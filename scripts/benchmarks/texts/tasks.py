"""What people ask of a model that writes code: twelve tasks to measure on, and others to learn from.

The texts are this repository's own files, so that a task changes when its file does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[3]
Kind = Literal["copy", "refactoring", "JSON", "summary", "free"]

_WHOLE = "Answer with the whole file in one code block and write nothing else."


@dataclass(frozen=True, slots=True)
class Task:
    """One question. file: whose text goes before it, relative to the repository's root; "": none."""

    name: str
    kind: Kind
    file: str
    asked: str

    @property
    def question(self) -> str:
        """All that the user says."""
        if not self.file:
            return self.asked
        text = (ROOT / self.file).read_text(encoding="utf-8")
        return f"This is the file {self.file}:\n\n```\n{text}```\n\n{self.asked}"


def _copy(name: str, file: str, change: str) -> Task:
    question = f"Write this file out again. {change} Leave all the rest as it is. {_WHOLE}"
    return Task(name, "copy", file, question)


def _rename(name: str, file: str, old: str, new: str) -> Task:
    return Task(name, "refactoring", file, f"Rename `{old}` to `{new}` everywhere. {_WHOLE}")


TASKS = (
    _copy("copy 120", "localspec/engine/text_stream.py", "Change the first line to a shorter one."),
    _copy("copy 180", "localspec/engine/sampling/distribution.py", "Remove the comments."),
    _copy("copy 240", "localspec/registry/store/files.py", "Translate the first line to German."),
    _copy("copy 290", "localspec/cli/inputs.py", "Add `import logging` to the imports."),
    _rename("rename a class", "localspec/engine/speculation/cost.py", "CostTable", "TimesByWidth"),
    _rename("rename functions", "localspec/registry/hub/transfer.py", "write", "store_on_disk"),
    Task(
        "list as JSON",
        "JSON",
        "localspec/engine/cache/prefixes.py",
        "List all classes and functions of this file as a JSON array of objects with the fields "
        '"name", "kind", "parameters" and "returns". Write nothing else.',
    ),
    Task(
        "convert to JSON",
        "JSON",
        "pyproject.toml",
        "Convert this file to JSON. Write nothing else.",
    ),
    Task(
        "summary of a page",
        "summary",
        "localspec/docs/architecture.md",
        "Summarise this page in three paragraphs.",
    ),
    Task(
        "summary of a module",
        "summary",
        "localspec/engine/pair/lane.py",
        "Explain in plain words, without code, what this module does and why.",
    ),
    Task(
        "explanation",
        "free",
        "",
        "Explain how a hash table works, what collisions are, and when "
        "a balanced tree is the better choice.",
    ),
    Task("story", "free", "", "Write a short story about a lighthouse keeper who repairs radios."),
)

# Other files and other questions than those that are measured on.
LEARNED_FROM = (
    _copy("learn copy 1", "localspec/engine/cache/slot.py", "Add a comment at the end."),
    _copy("learn copy 2", "localspec/engine/pair/profile.py", "Shorten the docstrings."),
    _copy("learn copy 3", "localspec/daemon/logs.py", "Use double the number of lines kept."),
    _copy("learn copy 4", "localspec/protocol/requests.py", "Add type hints where they miss."),
    _rename("learn rename 1", "localspec/registry/pulls/pull.py", "plan", "intended_pull"),
    _rename("learn rename 2", "localspec/engine/prompt/infill.py", "vocab", "tokenizer_of_target"),
    _rename("learn rename 3", "localspec/engine/sampling/thoughts.py", "Marker", "Tag"),
    Task(
        "learn dataclass",
        "refactoring",
        "localspec/daemon/http/requests.py",
        f"Add a logging line at the beginning of each function. {_WHOLE}",
    ),
    Task(
        "learn types",
        "refactoring",
        "localspec/engine/speculation/drafters/draft_model.py",
        f"Replace the dataclass by a plain class with an `__init__`. {_WHOLE}",
    ),
    Task(
        "learn JSON 1",
        "JSON",
        "localspec/protocol/requests.py",
        "Write a JSON schema for the fields of these classes. Write nothing else.",
    ),
    Task(
        "learn JSON 2",
        "JSON",
        "localspec/registry/header/model.py",
        "List all classes and functions of this file as a JSON array of objects with the fields "
        '"name", "docstring" and "lines". Write nothing else.',
    ),
    Task(
        "learn JSON 3",
        "JSON",
        "",
        "Invent ten customers of a bookshop as a JSON array of objects "
        "with name, address (street, city, postcode), e-mail and a list of bought books.",
    ),
    Task(
        "learn tests",
        "refactoring",
        "localspec/engine/speculation/acceptance.py",
        "Write tests with pytest for this module.",
    ),
    Task("learn summary 1", "summary", "README.md", "Summarise this page in ten bullet points."),
    Task(
        "learn summary 2",
        "summary",
        "localspec/docs/facts.md",
        "Which facts are these, and why do they matter? Answer in your own words.",
    ),
    Task(
        "learn summary 3",
        "summary",
        "localspec/engine/scheduler.py",
        "Describe what each method of this class does, one sentence each.",
    ),
    Task("learn free 1", "free", "", "What should I see in Lisbon in three days?"),
    Task("learn free 2", "free", "", "Compare Python's threading, multiprocessing and asyncio."),
    Task(
        "learn free 3",
        "free",
        "",
        "Write a Python module with a class for a priority queue on a "
        "binary heap, with docstrings and examples.",
    ),
    Task("learn free 4", "free", "", "Write a letter to a landlord about a broken heating."),
)
