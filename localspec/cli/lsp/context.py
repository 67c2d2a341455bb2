"""The context of a completion: the text around the cursor, and pieces of visited places.

It is byte for byte the same as in localspec/editors/autoload/localspec/context.vim, where the
reasons are explained.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from localspec.cli.lsp.documents import Document, Place

PREFIX_BYTES, SUFFIX_BYTES = 32768, 8192  # sent from before and after the cursor
BLOCK_LINES = 64

_PIECE_LINES = 48
_MAX_PIECE_BYTES = 4096
_MIN_FILLED_LINES = 4  # lines of a piece that are not blank
_MAX_PIECES = 12


def around(document: Document, place: Place) -> dict[str, Any]:
    """Return the fields of a request for a completion at a position."""
    line = document.content(place.line)
    line_after = line[place.column :] + _line_end(document, place.line)
    return {
        "input_prefix": _text_above(document, place.line),
        "prompt": _cut_beginning(line[: place.column], PREFIX_BYTES),
        "input_suffix": _cut_end(line_after + _text_below(document, place.line), SUFFIX_BYTES),
    }


def name(uri: str) -> str:
    """Return a file's name without its folders."""
    return unquote(urlsplit(uri).path).rpartition("/")[2]


def _line_end(document: Document, line: int) -> str:
    return "\n" if line < len(document.lines) - 1 else ""


def _join_lines(document: Document, first: int, end: int) -> str:
    """Return the lines from `first` up to but not including `end`."""
    numbers = range(first, min(end, len(document.lines)))
    return "".join(document.content(number) + _line_end(document, number) for number in numbers)


def _text_above(document: Document, line: int) -> str:
    """Return whole blocks of lines above a line, of at least PREFIX_BYTES bytes if there are as many.

    Whole blocks keep the beginning of the text unchanged while the cursor moves.
    """
    first = (line + 1) // BLOCK_LINES * BLOCK_LINES
    size = len(_encode(_join_lines(document, first, line)))
    while first > 0 and (first >= line or size < PREFIX_BYTES):
        first -= BLOCK_LINES
        size += len(_encode(_join_lines(document, first, min(first + BLOCK_LINES, line))))
    return _cut_beginning(_join_lines(document, first, line), 2 * PREFIX_BYTES)


def _text_below(document: Document, line: int) -> str:
    return _cut_end(_join_lines(document, line + 1, line + 1 + BLOCK_LINES), SUFFIX_BYTES)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _cut_beginning(text: str, max_bytes: int) -> str:
    """Return the end of a text, cut at a multiple of half of `most` bytes.

    So its beginning stays the same for a while as the text grows.
    """
    data = _encode(text)
    half = max_bytes // 2
    cut = max(-(-(len(data) - max_bytes) // half) * half, 0)
    return data[cut:].decode("utf-8", "ignore")


def _cut_end(text: str, max_bytes: int) -> str:
    return _encode(text)[:max_bytes].decode("utf-8", "ignore")


class Piece(NamedTuple):
    """Some lines around a place that was visited."""

    uri: str
    first: int
    text: str


class Visited:
    """The places that were visited. New ones are sent from the next quiet moment on.

    They precede the prompt, so that a change of them requires prefilling it again.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []  # pieces that are sent, oldest first
        self._next: list[Piece] = []  # pieces that wait for the next quiet moment
        self._last_lines: dict[str, int] = {}  # the line that was left last, by document

    def extra(self) -> list[dict[str, str]]:
        """Return the pieces as `input_extra` of a request."""
        return [{"filename": name(piece.uri), "text": piece.text} for piece in self._pieces]

    def left(self, document: Document, line: int) -> None:
        """Note a place that the cursor has left."""
        self._last_lines[document.uri] = line
        first = max(0, line - _PIECE_LINES // 2)
        text = _cut_end(_join_lines(document, first, first + _PIECE_LINES), _MAX_PIECE_BYTES)
        if sum(bool(row.strip()) for row in text.split("\n")) >= _MIN_FILLED_LINES:
            piece = Piece(document.uri, first, text)
            self._next = [*_without_overlapping(self._next, piece), piece]

    def rests(self, document: Document, line: int) -> None:
        """Note the place where the cursor rests if it is far from the last one in its document."""
        if abs(line - self._last_lines.get(document.uri, -BLOCK_LINES)) >= BLOCK_LINES:
            self.left(document, line)

    def take(self) -> bool:
        """Send the waiting pieces from now on. Return whether there were any."""
        if not self._next:
            return False
        for piece in self._next:
            self._pieces = _without_overlapping(self._pieces, piece)
        self._pieces = [*self._pieces, *self._next][-_MAX_PIECES:]
        self._next = []
        return True


def _without_overlapping(pieces: list[Piece], piece: Piece) -> list[Piece]:
    """Return the pieces that do not show much of what `piece` shows."""
    return [
        other
        for other in pieces
        if other.text != piece.text
        and (other.uri != piece.uri or abs(other.first - piece.first) >= _PIECE_LINES * 3 // 4)
    ]
