"""The lines that were typed in chats, which `localspec chat` keeps for the next one (chat_history).

The file is prompt_toolkit's: of each entry a comment with its time, and its lines, each after a "+".
What is removed from the history must not stay there, so the daemon takes it out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from localspec.paths import read_file
from localspec.registry.store.files import write_whole


def forget_all(file: Path) -> None:
    """Raises OSError."""
    _behind_links(file).unlink(missing_ok=True)


def forget(file: Path, contents: Sequence[str]) -> None:
    """Take out what is part of one of `contents`, the messages of a conversation.

    Part of, because files may have been put before what was typed; a short line that somebody typed
    elsewhere too is lost with it, and only for the arrow keys.

    Raises:
        OSError, StoreError
    """
    file = _behind_links(file)
    try:
        data = read_file(file)
    except FileNotFoundError:
        return
    kept: list[bytes] = []
    for typed, lines in groupby(data.splitlines(keepends=True), lambda line: line[:1] == b"+"):
        block = list(lines)
        if typed and any(_within(each, contents) for each in _meant(block)):
            while kept and kept[-1][:1] in (b"#", b"\n"):  # when it was typed
                kept.pop()
        else:
            kept += block
    if len(left := b"".join(kept)) < len(data):
        write_whole(file, left)


def _behind_links(file: Path) -> Path:
    """Where a chat's lines really are: somebody may keep them elsewhere."""
    return Path(os.path.realpath(file))  # resolve() raises where links lead in a circle


def _within(text: str, contents: Sequence[str]) -> bool:
    return bool(text) and any(text in content for content in contents)


def _meant(lines: Sequence[bytes]) -> Iterator[str]:
    """What an entry may have said: all of it, and what follows a command, without quotes around it."""
    text = b"".join(line[1:] for line in lines).decode("utf-8", "replace").strip()
    for each in (text, text.partition(" ")[2].strip() if text.startswith("/") else ""):
        yield each.removeprefix('"""').removesuffix('"""').strip()
