"""Where in kept conversations a text is, in any case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localspec.protocol.conversations import ConversationEntry, Match

if TYPE_CHECKING:
    import sqlite3

# Of `conversations`: whether the text that ?1 is, folded, was said in one or is in its title.
SAID = (
    "instr(folded(title), ?1) OR EXISTS"
    " (SELECT 1 FROM messages WHERE conversation = id AND instr(folded(content), ?1))"
)
_MESSAGE = (
    "SELECT role, content FROM messages WHERE conversation = ? AND instr(folded(content), ?)"
    " ORDER BY position LIMIT 1"
)
_BEFORE, _LONGEST = 60, 300  # characters of a long line: before what was found, and in all


def first(db: sqlite3.Connection, entry: ConversationEntry, wanted: str) -> Match:
    """The first line of `entry` with `wanted`, which is folded; its title where no message has it."""
    role, text = db.execute(_MESSAGE, (entry.id, wanted)).fetchone() or ("title", entry.title)
    line, start, end = place(text, wanted)
    if len(line) > _LONGEST:
        cut = max(0, start - _BEFORE)
        before = "…" if cut else ""
        after = "…" if cut + _LONGEST < len(line) else ""
        line, shift = before + line[cut : cut + _LONGEST] + after, len(before) - cut
        start, end = start + shift, min(end + shift, len(line))
    return Match(role, line, start, end)


def place(text: str, wanted: str) -> tuple[str, int, int]:
    """The line of `text` where `wanted` (folded) begins, and its characters from and to, to the line's end.

    Folding makes two characters of some, so places in the folded text are counted back.
    """
    folded = text.casefold()
    at = folded.find(wanted)
    line = text.split("\n")[folded.count("\n", 0, at)]
    begins = at - (folded.rfind("\n", 0, at) + 1)
    ends = begins + len(wanted.partition("\n")[0])
    start = end = folded_length = 0
    for character in line:
        if folded_length >= ends:
            break
        folded_length += len(character.casefold())
        end += 1
        if folded_length <= begins:
            start = end
    return line, start, end
