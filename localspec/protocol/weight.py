"""What a JSON text costs to decode, counted while it comes in, before anything is decoded.

A byte of text costs a byte or a few, a byte of structure up to a hundred: 16 MiB of empty lists are
five million objects, made while nothing else in the process runs. So the structure is counted first,
piece by piece, in a time that hangs on the bytes alone.
"""

from __future__ import annotations

# Strings, lists and objects, each of 50 to 250 bytes: a chat of 10 000 messages has some 60 000.
MOST_PARTS = 1 << 18
# Commas, so numbers for the most part, of 8 to 40 bytes: prompts of a million token ids.
MOST_ITEMS = 5 << 18
_PIECE = 1 << 16  # bytes; a long text taken apart at its quotes would cost what is to be saved
_ESCAPE = 6  # bytes of the longest one, \u0000


class TooHeavy(ValueError):
    """More structure than any request has."""


class Weight:
    """The structure of a text so far; `nul` is whether \\u0000 stands somewhere in it."""

    def __init__(self) -> None:
        self.items = 0
        self.nul = False
        self._quotes = 0
        self._brackets = 0
        self._held = b""  # the beginning of an escape that ends in the next piece

    @property
    def parts(self) -> int:
        """Strings, lists and objects."""
        return self._quotes // 2 + self._brackets

    def feed(self, piece: bytes | bytearray) -> None:
        r"""Count the next piece of the text.

        Raises:
            TooHeavy: it has too much structure. What comes after need not be read.
        """
        data = (self._held + piece).replace(rb"\\", b"")  # what is left begins an escape
        cut = data.rfind(b"\\", max(len(data) - _ESCAPE + 1, 0))
        self._held = b"" if cut < 0 else data[cut:]
        data = data if cut < 0 else data[:cut]
        self.nul = self.nul or rb"\u0000" in data
        parts = data.replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[self._quotes % 2 :: 2])
        self._quotes += len(parts) - 1
        self._brackets += outside.count(b"[") + outside.count(b"{")
        self.items += outside.count(b",")
        if self.parts > MOST_PARTS:
            raise TooHeavy(
                f"The request has more than {MOST_PARTS} strings, lists and objects together."
            )
        if self.items > MOST_ITEMS:
            raise TooHeavy(f"The request has more than {MOST_ITEMS} items.")

    def add(self, text: bytes | bytearray) -> None:
        """Count a whole text more; see feed."""
        self._held = b""
        self._quotes += self._quotes % 2
        for at in range(0, len(text), _PIECE):
            self.feed(text[at : at + _PIECE])
