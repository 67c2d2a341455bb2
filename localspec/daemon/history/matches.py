"""Find the line of a stored conversation that contains a text, ignoring case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localspec.protocol.conversations import ConversationEntry, Match

if TYPE_CHECKING:
    import sqlite3

# A condition on rows of `conversations`: the case-folded text ?1 occurs in the title or in a message.
SAID = (
    "instr(folded(title), ?1) OR EXISTS"
    " (SELECT 1 FROM messages WHERE conversation = id AND instr(folded(content), ?1))"
)
_MESSAGE = (
    "SELECT role, content FROM messages WHERE conversation = ? AND instr(folded(content), ?)"
    " ORDER BY position LIMIT 1"
)
# A longer line is cut: this many characters before the match are shown, and this many in all.
_CONTEXT_CHARS, _MAX_LINE_CHARS = 60, 300


def first(db: sqlite3.Connection, entry: ConversationEntry, needle: str) -> Match:
    """Return the first line of the conversation `entry` that contains `needle`.

    The title is searched only if no message contains it. `needle` is already case-folded.
    """
    role, text = db.execute(_MESSAGE, (entry.id, needle)).fetchone() or ("title", entry.title)
    line, start, end = place(text, needle)
    if len(line) > _MAX_LINE_CHARS:
        offset = max(0, start - _CONTEXT_CHARS)
        prefix = "…" if offset else ""
        suffix = "…" if offset + _MAX_LINE_CHARS < len(line) else ""
        line, shift = (
            prefix + line[offset : offset + _MAX_LINE_CHARS] + suffix,
            len(prefix) - offset,
        )
        start, end = start + shift, min(end + shift, len(line))
    return Match(role, line, start, end)


def place(text: str, needle: str) -> tuple[str, int, int]:
    """Return the line of `text` in which `needle` begins, and the start and end of the match in it.

    `needle` is case-folded. A match that spans several lines ends with its first line. Case folding turns
    some characters into two, so positions in the folded line are counted back to the original one.
    """
    folded = text.casefold()
    position = folded.find(needle)
    line = text.split("\n")[folded.count("\n", 0, position)]
    folded_start = position - (folded.rfind("\n", 0, position) + 1)
    folded_end = folded_start + len(needle.partition("\n")[0])
    start = end = folded_length = 0
    for character in line:
        if folded_length >= folded_end:
            break
        folded_length += len(character.casefold())
        end += 1
        if folded_length <= folded_start:
            start = end
    return line, start, end
