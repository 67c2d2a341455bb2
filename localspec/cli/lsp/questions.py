"""What is asked about lines, and what of the answer takes their place."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import localspec
from localspec.cli.terminal.markdown.fences import blocks

# The plug-in for Vim asks with the same words.
_EDIT = Path(localspec.__file__).parent / "editors" / "prompts" / "edit"
_WORDS = re.compile(r"[0-9A-Za-z_]+|[^0-9A-Za-z_\s]")
_INSTRUCTION = re.compile(r"localspec:\s*(?P<text>.*?)\s*(?:\*/|-->|\*\))?\s*$")


def fenced(text: str, language: str = "") -> str:
    """Between fences that are longer than any in it."""
    fence = "```"
    while re.search(rf"^\s*{fence}", text, re.MULTILINE):
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def about(name: str, first: int, last: int, block: str) -> str:
    """A question about lines, which count from 1 here."""
    return f"{name or 'Text'}, lines {first} to {last}:\n{block}\n\nExplain this."


def edit(name: str, block: str, instruction: str, *, whole: bool) -> str:
    """A question for a fenced text as it is to be; `whole`: it is all of the file.

    Worded for small models, too, which else write only what they change: the number of lines comes before
    the change, and the change last.
    """
    named = f" {name}" if name else ""
    text, this = ("the file", "file") if whole else ("a part of the file", "part")
    wanted = instruction if instruction.endswith((".", "!", "?")) else f"{instruction}."
    number = block.count("\n") - 1
    lines = "the one line" if number == 1 else f"all {number} lines"
    form = _EDIT.read_text(encoding="utf-8").rstrip("\n")
    return form % (text + named, block, lines, this, wanted)


def code(answer: str, old: str) -> str:
    """An answer's code block. Without a block it is all of it where that is much like the old text, and else
    nothing: prose is no text to put in its place."""
    answer = answer.replace("\r", "")
    if found := blocks(answer):
        return found[0]
    return answer.strip("\n") if _alike(answer, old) else ""


def _alike(one: str, other: str) -> bool:
    """Whether most words and signs of either text are in the other."""
    words, others = Counter(_WORDS.findall(one)), Counter(_WORDS.findall(other))
    common = (words & others).total()
    return common > 0 and 10 * common >= 3 * (words.total() + others.total())


def instruction(line: str) -> str:
    """What a comment such as `# localspec: add types` asks for; nothing of any other line."""
    found = _INSTRUCTION.search(line)
    return found["text"] if found else ""
