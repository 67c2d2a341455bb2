"""Parse a model's raw output, while it arrives, into reasoning, text and tool calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from localspec.daemon.completion.reply import channels
from localspec.daemon.completion.reply.blocks import FENCE, JsonBlock
from localspec.daemon.completion.reply.calls import Arguments, Call, CallPiece, Reader
from localspec.daemon.completion.reply.notations import reader_for
from localspec.daemon.completion.reply.tools import NO_TOOLS
from localspec.protocol.calls import CallFormat
from localspec.protocol.visibility import Regions

THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_FENCE = re.compile(r"(?:\A|\n)[ \t]*```")
_PARTIAL_FENCE = re.compile(r"(?:\A|\n)[ \t]*`{1,2}\Z")
_CALL_SEPARATORS = "; \n\t"  # characters between two calls of a format without markers
# These are control tokens in some vocabularies. The engine has to output their text, because it shows where
# reasoning begins and ends.
SHOWN = [mark.removesuffix("thought\n") for pair in THOUGHTS for mark in pair] + channels.SHOWN


@dataclass(slots=True)
class Text:
    """More of the answer's text, or of its reasoning."""

    kind: Literal["content", "reasoning"]
    text: str


Piece = Text | Call | Arguments


class AnswerParser:
    """Parses one answer.

    With `reasoning` False, thoughts stay in the text. `required` means that the answer is constrained to be
    calls, and `constrained` that what follows a marker is constrained to be a call. `plain_calls` are the
    tools whose calls may come as plain JSON.
    """

    def __init__(
        self,
        form: CallFormat = NO_TOOLS,
        tools: dict[str, Any] | None = None,
        *,
        reasoning: bool = True,
        parallel: bool = True,
        required: bool = False,
        constrained: bool = False,
        plain_calls: Collection[str] = (),
    ) -> None:
        self.calls = 0
        self._required = required
        self._constrained = constrained
        self._plain_calls = plain_calls
        self._in_code = False  # inside a fenced block that is not a call
        self._line_begins = True  # the text so far is empty or ends with a line
        self._form = form
        self._tools = tools or {}
        self._parallel = parallel
        self._reasoning = reasoning
        self._thoughts: Sequence[tuple[str, str]] = THOUGHTS
        self._held = ""  # text that may begin a marker
        self._state: Literal["start", "thinking", "content", "call"] = "start"
        self._closing = ""  # the closing marker of the reasoning or call that is being read
        self._opening = ""  # the opening marker of the call that is being read
        self._reader: Reader | None = None
        self._channels = channels.Channels() if reasoning else None
        self._blank = False  # blanks are dropped until other text arrives

    def begin(self, tail: str, thoughts: Sequence[tuple[str, str]] = ()) -> None:
        """Start with `tail`, the end of the prompt, in which the template may already open the reasoning.

        `thoughts` are this model's own pairs of markers, if known.
        """
        self._thoughts = [*thoughts, *THOUGHTS]
        if not self._reasoning:
            return
        for opening, closing in reversed(self._thoughts):
            if tail.rstrip().endswith(opening.rstrip()):
                self._state, self._closing, self._blank = "thinking", closing, True

    def regions(self, tail: str) -> Regions:
        """Return what classifies the text of this answer, which has just begun; `tail` is as in `begin`."""
        thoughts = self._thoughts if self._reasoning else ()
        return Regions(thoughts, tail, self._form, self._tools)

    @property
    def thinking(self) -> bool:
        """Whether the latest text is reasoning."""
        return self._state == "thinking"

    def push(self, text: str) -> list[Piece]:
        """Consume more text, and return the pieces that are certain."""
        self._held += self._channels.push(text) if self._channels else text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the answer."""
        if self._channels:
            self._held += self._channels.finish()
        pieces = self._run(final=True)
        if self._state == "call" and self._reader is not None:
            pieces += self._accepted(self._reader.end())
            if self._reader.broken and not self._call_is_certain(self._reader):
                self._emit(pieces, "content", self._opening + self._reader.raw)
        return _merge_pieces(pieces)

    def _call_is_certain(self, reader: Reader) -> bool:
        """Return whether text that was cut off while a call was read cannot be anything else."""
        if isinstance(reader, JsonBlock):
            return False
        return self._required or bool(self.calls) or (self._constrained and bool(self._opening))

    def _run(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            progress = (self._state, len(self._held), len(pieces), self._reader)
            match self._state:
                case "start":
                    self._start(final)
                case "thinking":
                    self._think(pieces, final)
                case "content":
                    self._emit_text(pieces, final)
                case "call":
                    self._read_call(pieces)
            if progress == (self._state, len(self._held), len(pieces), self._reader):
                return _merge_pieces(pieces)

    def _start(self, final: bool) -> None:
        """Decide whether the answer begins with reasoning, or with a call that has no marker."""
        text = self._held.lstrip()
        for opening, closing in self._thoughts if self._reasoning else ():
            if text.startswith(opening):
                self._held = text[len(opening) :]
                self._state, self._closing, self._blank = "thinking", closing, True
                return
            if opening.startswith(text) and not final:
                return
        if not text and not final:
            return
        if self._form.bare and text.startswith("{"):
            self._held = text
            self._begin_call("")
        elif self._plain_calls and text.startswith("{"):
            blanks = self._held.removesuffix(text)
            self._held = text
            self._begin_block(blanks, fenced=False)
        else:
            self._state = "content"

    def _think(self, pieces: list[Piece], final: bool) -> None:
        closing_at = self._held.find(self._closing)
        if closing_at >= 0:
            self._emit(pieces, "reasoning", self._held[:closing_at].rstrip())
            self._held = self._held[closing_at + len(self._closing) :]
            self._state, self._blank, self._reasoning = "start", True, False
            return
        end = (
            len(self._held)
            if final
            else _length_before_markers(self._held, [self._closing], blanks=True)
        )
        self._emit(pieces, "reasoning", self._held[:end])
        self._held = self._held[end:]

    def _emit_text(self, pieces: list[Piece], final: bool) -> None:
        if self._plain_calls and self._emit_up_to_fence(pieces, final):
            return
        openings = self._form.opens
        positions = [
            (position, marker) for marker in openings if (position := self._held.find(marker)) >= 0
        ]
        if positions:
            position, marker = min(positions, key=lambda entry: (entry[0], -len(entry[1])))
            self._emit(pieces, "content", self._held[:position].rstrip())
            self._held = self._held[position + len(marker) :]
            self._begin_call(marker)
            return
        blanks = bool(openings or self._plain_calls)
        if final and not (self._required or self.calls):
            end = len(self._held)
        else:
            # Even at the end, an incomplete marker is not text if only a call could follow.
            end = self._certain_length(blanks=blanks, fences=not final)
        if final and self._held.strip() and not self._held[end:].strip():
            end = len(self._held)  # keep blanks, except those after the last call
        self._emit(pieces, "content", self._held[:end])
        self._held = "" if final else self._held[end:]

    def _certain_length(self, *, blanks: bool, fences: bool) -> int:
        """Return the length of the held text before any incomplete marker."""
        markers = [*self._form.opens]
        if self._required:
            markers += [opening for opening, _ in self._thoughts]
        end = _length_before_markers(self._held, markers, blanks=blanks)
        fence = _PARTIAL_FENCE.search(self._held) if self._plain_calls and fences else None
        return end if fence is None else min(end, len(self._held[: fence.start()].rstrip()))

    def _emit_up_to_fence(self, pieces: list[Piece], final: bool) -> bool:
        """Emit text up to the next fence, if that comes before any marker.

        The fence begins a block that may be a call, or ends a block that is not one. Return whether a fence
        was read.
        """
        fence = _FENCE.search(self._held)
        at_start = fence is not None and not fence.start() and self._held[0] != "\n"
        if at_start and not self._line_begins:  # a fence inside a line does not count
            fence = _FENCE.search(self._held, 1)
        if fence is None:
            return False
        positions = [
            position for marker in self._form.opens if (position := self._held.find(marker)) >= 0
        ]
        if positions and min(positions) < fence.start():
            return False
        if self._in_code:
            self._in_code = False
            self._emit(pieces, "content", self._held[: fence.end()])
            self._held = self._held[fence.end() :]
            return True
        text = self._held[: fence.start()].rstrip()
        self._emit(pieces, "content", text)
        opening, self._held = self._held[len(text) : fence.end()], self._held[fence.end() :]
        self._begin_block(opening, fenced=True)
        return True

    def _begin_block(self, opening: str, *, fenced: bool) -> None:
        self._reader = JsonBlock(self._plain_calls, fenced=fenced)
        self._state, self._opening, self._closing = "call", opening, ""

    def _begin_call(self, marker: str) -> None:
        names: Collection[str] | None = self._tools if self._form.bare and not marker else None
        self._reader = reader_for(self._form, self._tools, names)
        # The reader of a discovered notation consumes the closing marker itself.
        closing = "" if self._form.kind == "found" else self._form.close
        self._state, self._opening, self._closing = "call", marker, closing

    def _read_call(self, pieces: list[Piece]) -> None:
        if self._reader is None:
            self._close_call()
            return
        reader = self._reader
        call_pieces, self._held = reader.feed(self._held)
        pieces += self._accepted(call_pieces)
        self._line_begins = True
        if reader.broken:
            self._in_code = isinstance(reader, JsonBlock) and self._opening.endswith(FENCE)
            self._emit(pieces, "content", self._opening)
            # The text may contain another marker, so it is read again.
            self._held = reader.raw + self._held
            self._state, self._reader = "content", None
        elif reader.over:
            self._reader, self._blank = None, True

    def _close_call(self) -> None:
        """Read what follows a call: its closing marker, or the next call of a format without markers."""
        text = self._held.lstrip()
        if self._closing and text.startswith(self._closing):
            self._held, self._state = text[len(self._closing) :], "content"
        elif self._closing.startswith(text) and (self._closing or not text):
            return  # the marker may still be completed
        elif self._form.bare and text.lstrip(_CALL_SEPARATORS).startswith("{"):
            self._held = text.lstrip(_CALL_SEPARATORS)
            self._begin_call("")
        elif not self._form.bare or text.strip(_CALL_SEPARATORS):
            self._state = "content"

    def _accepted(self, call_pieces: Sequence[CallPiece]) -> list[Piece]:
        """Count the calls, and drop all but the first if the client allows only one."""
        accepted: list[Piece] = []
        for piece in call_pieces:
            self.calls += isinstance(piece, Call)
            piece.index = self.calls - 1
            if self._parallel or self.calls == 1:
                accepted.append(piece)
        return accepted

    def _emit(self, pieces: list[Piece], kind: Literal["content", "reasoning"], text: str) -> None:
        if self._blank:
            text = text.lstrip()
        if text:
            self._blank = False
            self._line_begins = kind == "reasoning" or text.endswith("\n")
            pieces.append(Text(kind, text))


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the reasoning at the beginning of a whole answer, and the remaining text."""
    parser = AnswerParser()
    pieces = [*parser.push(text), *parser.finish()]
    parts = {"reasoning": "", "content": ""}
    for piece in pieces:
        if isinstance(piece, Text):
            parts[piece.kind] += piece.text
    return parts["reasoning"], parts["content"]


def _length_before_markers(text: str, markers: Sequence[str], *, blanks: bool) -> int:
    """Return how many characters of `text` precede a possible marker at its end, and the blanks before it."""
    sizes = (
        size
        for marker in markers
        for size in range(min(len(marker) - 1, len(text)), 0, -1)
        if text.endswith(marker[:size])
    )
    end = len(text) - max(sizes, default=0)
    return len(text[:end].rstrip()) if blanks else end


def _merge_pieces(pieces: list[Piece]) -> list[Piece]:
    """Merge neighbouring pieces of the same kind."""
    merged: list[Piece] = []
    for piece in pieces:
        previous = merged[-1] if merged else None
        if isinstance(piece, Text) and isinstance(previous, Text) and piece.kind == previous.kind:
            previous.text += piece.text
        elif isinstance(piece, Arguments) and isinstance(previous, Arguments):
            # Both belong to the same call, because a Call piece separates two calls.
            previous.text += piece.text
        else:
            merged.append(piece)
    return merged
