"""Questions about lines, and the part of the answer that replaces them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import localspec
from localspec.cli.terminal.markdown.fences import blocks

# The plug-in for Vim uses the same text.
_EDIT_PROMPT = Path(localspec.__file__).parent / "editors" / "prompts" / "edit"
_WORDS = re.compile(r"[0-9A-Za-z_]+|[^0-9A-Za-z_\s]")
_INSTRUCTION = re.compile(r"localspec:\s*(?P<text>.*?)\s*(?:\*/|-->|\*\))?\s*$")


def fenced(text: str, language: str = "") -> str:
    """Put a text between fences that are longer than any fence in it."""
    fence = "```"
    while re.search(rf"^\s*{fence}", text, re.MULTILINE):
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def about(name: str, first: int, last: int, block: str) -> str:
    """Return a question about lines, which are counted from 1 here."""
    return f"{name or 'Text'}, lines {first} to {last}:\n{block}\n\nExplain this."


def edit(name: str, block: str, instruction: str, *, whole: bool) -> str:
    """Return the question for the new version of a fenced text. `whole`: it is the whole file.

    It is worded for small models, which otherwise write only what they change: the number of lines
    comes before the change, and the change comes last.
    """
    file_name = f" {name}" if name else ""
    subject, part = ("the file", "file") if whole else ("a part of the file", "part")
    request = instruction if instruction.endswith((".", "!", "?")) else f"{instruction}."
    line_count = block.count("\n") - 1
    line_phrase = "the one line" if line_count == 1 else f"all {line_count} lines"
    template = _EDIT_PROMPT.read_text(encoding="utf-8").rstrip("\n")
    return template % (subject + file_name, block, line_phrase, part, request)


def code(answer: str, old: str) -> str:
    """Return an answer's code block.

    Without a block it is the whole answer if that is similar to the old text, and else nothing,
    because prose must not replace code.
    """
    answer = answer.replace("\r", "")
    if code_blocks := blocks(answer):
        return code_blocks[0]
    return answer.strip("\n") if _are_similar(answer, old) else ""


def _are_similar(text: str, other_text: str) -> bool:
    """Return whether the two texts share most of their words and signs."""
    words, other_words = Counter(_WORDS.findall(text)), Counter(_WORDS.findall(other_text))
    common = (words & other_words).total()
    return common > 0 and 10 * common >= 3 * (words.total() + other_words.total())


def instruction(line: str) -> str:
    """Return the instruction in a comment such as `# localspec: add types`; empty for other lines."""
    match = _INSTRUCTION.search(line)
    return match["text"] if match else ""
