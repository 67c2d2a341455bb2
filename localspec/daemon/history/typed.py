"""Remove lines from chat_history, in which `localspec chat` keeps what people typed for the next chat.

prompt_toolkit defines the format: each entry is a comment with its time, then its lines, each after
a "+". Text that is removed from the stored conversations must not remain in this file, so the daemon
removes it there as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from localspec.paths import read_file
from localspec.registry.store.files import write_whole


def forget_all(file: Path) -> None:
    """Delete the file.

    Raises:
        OSError: the file cannot be deleted.
    """
    _resolve_links(file).unlink(missing_ok=True)


def forget(file: Path, contents: Sequence[str]) -> None:
    """Remove every entry that is part of one of `contents`, the messages of a conversation.

    An entry may be only part of a message, because a chat can put files before the typed text. A short line
    that was also typed elsewhere is lost with it, which matters to the arrow keys alone.

    Raises:
        OSError: the file cannot be read or written.
        StoreError: the file cannot be replaced.
    """
    file = _resolve_links(file)
    try:
        data = read_file(file)
    except FileNotFoundError:
        return
    remaining: list[bytes] = []
    for is_entry, lines in groupby(data.splitlines(keepends=True), lambda line: line[:1] == b"+"):
        block = list(lines)
        if is_entry and any(_is_within(candidate, contents) for candidate in _candidates(block)):
            while remaining and remaining[-1][:1] in (b"#", b"\n"):  # its comment with the time
                remaining.pop()
        else:
            remaining += block
    if len(content := b"".join(remaining)) < len(data):
        write_whole(file, content)


def _resolve_links(file: Path) -> Path:
    """Return where the file really is, since people may keep it elsewhere behind a symbolic link."""
    return Path(os.path.realpath(file))  # resolve() raises where links lead in a circle


def _is_within(text: str, contents: Sequence[str]) -> bool:
    return bool(text) and any(text in content for content in contents)


def _candidates(lines: Sequence[bytes]) -> Iterator[str]:
    """Yield the texts that an entry may have sent: all of it, and what follows a command, without quotes."""
    text = b"".join(line[1:] for line in lines).decode("utf-8", "replace").strip()
    argument = text.partition(" ")[2].strip() if text.startswith("/") else ""
    for candidate in (text, argument):
        yield candidate.removeprefix('"""').removesuffix('"""').strip()
