"""What is asked: the kinds of work that come with the package, a file of one's own, or the history."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from localspec.cli import inputs
from localspec.errors import UsageError

_SHIPPED = Path(__file__).with_name("workloads.toml")
# Characters of a token at the least, of texts in a language that the vocabulary may not know.
_PER_TOKEN = 2


@dataclass(frozen=True)
class Prompt:
    """`ask` a chat, after `text`, or fill in between `prefix` and `suffix`. `schema`: of the answer."""

    ask: str = ""
    text: str = ""
    prefix: str = ""
    suffix: str = ""
    schema: str = ""

    @property
    def is_place(self) -> bool:
        """Whether it is a place in a file, and no chat."""
        return bool(self.prefix)

    def question(self, room: int) -> str:
        """What is said in a chat; of `text` as many paragraphs as `room` tokens hold, and the first."""
        first, *rest = self.text.strip().split("\n\n")
        while rest and len("\n\n".join([first, *rest])) + len(self.ask) > room * _PER_TOKEN:
            rest.pop()
        return "\n\n".join(filter(None, [first, *rest, self.ask.strip()]))


@dataclass(frozen=True)
class Work:
    """One kind of work. tokens: of an answer at most, where it sets a limit of its own."""

    name: str
    about: Literal["code", "text"]
    prompts: Sequence[Prompt]
    tokens: int | None = None
    quick: bool = False


def shipped(*, quick: bool = False) -> list[Work]:
    """Those of the package; with `quick` one prompt of the few that differ most."""
    found = tomllib.loads(_SHIPPED.read_text(encoding="utf-8"))["workload"]
    works = [_work(each) for each in found]
    if not quick:
        return works
    return [replace(each, prompts=each.prompts[:1]) for each in works if each.quick]


def _work(found: dict[str, Any]) -> Work:
    prompts = [Prompt(**each) for each in found["prompt"]]
    name, about = found["name"], found["about"]
    return Work(name, about, prompts, found.get("tokens"), found.get("quick", False))


def from_file(name: str) -> list[Work]:
    """A prompt per line, as JSON ({"prompt": …} or {"prefix": …, "suffix": …}, with "workload" if it is to be
    apart) or as text; or, of a file without JSON, per paragraph.

    Raises:
        UsageError: it cannot be read, a line is wrong, or it has no prompt.
    """
    text = inputs.stdin() if name == "-" else inputs.read_text(name)
    lines = [(at, line) for at, line in enumerate(text.splitlines(), 1) if line.strip()]
    if lines and lines[0][1].lstrip().startswith("{"):
        grouped: dict[str, list[Prompt]] = {}
        for at, line in lines:
            group, prompt = _line(name, at, line)
            grouped.setdefault(group, []).append(prompt)
        return [Work(group, _about(prompts), prompts) for group, prompts in grouped.items()]
    prompts = [Prompt(ask=part.strip()) for part in text.split("\n\n") if part.strip()]
    if not prompts:
        raise UsageError(f"{name} has no prompts.")
    return [Work("own prompts", _about(prompts), prompts)]


def _line(name: str, at: int, line: str) -> tuple[str, Prompt]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}, line {at}: not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UsageError(f"{name}, line {at}: must be a JSON object.")
    known = {"prompt": "ask", "prefix": "prefix", "suffix": "suffix"}
    given = {known[key]: value for key, value in found.items() if key in known}
    if not all(isinstance(value, str) for value in (*given.values(), found.get("workload", ""))):
        raise UsageError(f"{name}, line {at}: every value must be a text.")
    if not given.get("ask") and not given.get("prefix"):
        raise UsageError(f'{name}, line {at}: needs "prompt", or "prefix" and "suffix".')
    return found.get("workload") or "own prompts", Prompt(**given)


def from_history(count: int) -> list[Work]:
    """The first questions of so many conversations, the newest first.

    Raises:
        UsageError: there are none.
    """
    from localspec.client.conversations import ConversationsClient

    client = ConversationsClient()
    prompts = []
    for each in client.conversations(count):
        messages = client.conversation(each["id"])["messages"]
        asked = next((said["content"] for said in messages if said["role"] == "user"), "")
        if isinstance(asked, str) and asked.strip():
            prompts.append(Prompt(ask=asked))
    if not prompts:
        raise UsageError("The history has no questions; `localspec ask` saves them.")
    return [Work("history", _about(prompts), prompts)]


def _about(prompts: Sequence[Prompt]) -> Literal["code", "text"]:
    """Code where most have some."""
    code = sum(each.is_place or "```" in each.ask for each in prompts)
    return "code" if 2 * code > len(prompts) else "text"
