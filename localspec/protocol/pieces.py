"""The pieces of an answer: text, reasoning and tool calls, as they are read where the answer is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec


class Text(msgspec.Struct, tag="text", omit_defaults=True):
    """More of the answer's text, or of its reasoning."""

    kind: Literal["content", "reasoning"]
    text: str
    # Number of characters that the model wrote before it; only the engine needs it.
    at: int = 0
    # (start, end) spans of `text` that came from a draft, on request.
    drafted: list[tuple[int, int]] = []


class Call(msgspec.Struct, tag="call", omit_defaults=True):
    """The beginning of a call; `index` is its number in the answer."""

    id: str
    name: str
    index: int = 0


class Arguments(msgspec.Struct, tag="arguments", omit_defaults=True):
    """More JSON of a call's arguments."""

    text: str
    index: int = 0


Piece = Text | Call | Arguments


def content_of(piece: Piece) -> Text | None:
    """Return the piece if it is text of the answer itself, neither reasoning nor a call."""
    return piece if isinstance(piece, Text) and piece.kind == "content" else None


def merge_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with each one joined to the one before it, if it continues that."""
    merged: list[Piece] = []
    for piece in pieces:
        match piece, merged[-1] if merged else None:
            case Text(), Text() as last if piece.kind == last.kind and piece.at == last.at + len(
                last.text
            ):
                shift = len(last.text)
                spans = [(start + shift, end + shift) for start, end in piece.drafted]
                merged[-1] = Text(last.kind, last.text + piece.text, last.at, last.drafted + spans)
            case Arguments(), Arguments() as last:
                # Both belong to the same call, because a Call stands between two calls.
                merged[-1] = Arguments(last.text + piece.text, last.index)
            case _:
                merged.append(piece)
    return merged
