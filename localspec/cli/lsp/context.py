"""What a completion is asked with: the text around the cursor, and pieces of where the person was before.

As in localspec/editors/autoload/localspec/context.vim, byte for byte; the reasons stand there.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from localspec.cli.lsp.documents import Document, Place

BEFORE, AFTER = 32768, 8192  # bytes before and after the cursor
BLOCK = 64  # lines

_PIECE = 48  # lines of a piece
_WIDEST = 4096  # bytes of one
_LEAST = 4  # lines with something in them
_MOST = 12  # pieces


def around(document: Document, place: Place) -> dict[str, Any]:
    """The fields of a request for what stands at a place."""
    line = document.content(place.line)
    rest = line[place.column :] + _ended(document, place.line)
    return {
        "input_prefix": _before(document, place.line),
        "prompt": _end(line[: place.column], BEFORE),
        "input_suffix": _beginning(rest + _after(document, place.line), AFTER),
    }


def name(uri: str) -> str:
    """A file's name without its folders."""
    return unquote(urlsplit(uri).path).rpartition("/")[2]


def _ended(document: Document, line: int) -> str:
    return "\n" if line < len(document.lines) - 1 else ""


def _joined(document: Document, first: int, end: int) -> str:
    """Lines from `first` up to and without `end`."""
    numbers = range(first, min(end, len(document.lines)))
    return "".join(document.content(each) + _ended(document, each) for each in numbers)


def _before(document: Document, line: int) -> str:
    """Whole blocks of lines above a line: BEFORE bytes where there are as many, and at most a block more."""
    first = (line + 1) // BLOCK * BLOCK
    taken = len(_bytes(_joined(document, first, line)))
    while first > 0 and (first >= line or taken < BEFORE):
        first -= BLOCK
        taken += len(_bytes(_joined(document, first, min(first + BLOCK, line))))
    return _end(_joined(document, first, line), 2 * BEFORE)


def _after(document: Document, line: int) -> str:
    return _beginning(_joined(document, line + 1, line + 1 + BLOCK), AFTER)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _end(text: str, most: int) -> str:
    """The end of a text, cut at a multiple of half of `most` bytes: it begins alike while it grows."""
    data = _bytes(text)
    half = most // 2
    cut = max(-(-(len(data) - most) // half) * half, 0)
    return data[cut:].decode("utf-8", "ignore")


def _beginning(text: str, most: int) -> str:
    return _bytes(text)[:most].decode("utf-8", "ignore")


class Piece(NamedTuple):
    """Some lines that somebody was at."""

    uri: str
    first: int
    text: str


class Visited:
    """Where somebody was, which is sent along from the next quiet moment on: what changes in front of a
    prompt has it read anew."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []  # those that are sent, oldest first
        self._next: list[Piece] = []  # those that will be
        self._were: dict[str, int] = {}  # the line that was left last, by document

    def extra(self) -> list[dict[str, str]]:
        """As `input_extra` of a request."""
        return [{"filename": name(each.uri), "text": each.text} for each in self._pieces]

    def left(self, document: Document, line: int) -> None:
        """Somebody leaves this place, or has come far from the last one."""
        self._were[document.uri] = line
        first = max(0, line - _PIECE // 2)
        text = _beginning(_joined(document, first, first + _PIECE), _WIDEST)
        if sum(bool(each.strip()) for each in text.split("\n")) >= _LEAST:
            piece = Piece(document.uri, first, text)
            self._next = [*_others(self._next, piece), piece]

    def rests(self, document: Document, line: int) -> None:
        """Somebody stays at this place: is it far from where they were last?"""
        if abs(line - self._were.get(document.uri, -BLOCK)) >= BLOCK:
            self.left(document, line)

    def take(self) -> bool:
        """Take what waits among those that are sent; whether there was any."""
        if not self._next:
            return False
        for piece in self._next:
            self._pieces = _others(self._pieces, piece)
        self._pieces = [*self._pieces, *self._next][-_MOST:]
        self._next = []
        return True


def _others(pieces: list[Piece], piece: Piece) -> list[Piece]:
    """Those that do not show much of what this one shows."""
    return [
        each
        for each in pieces
        if each.text != piece.text
        and (each.uri != piece.uri or abs(each.first - piece.first) >= _PIECE * 3 // 4)
    ]
