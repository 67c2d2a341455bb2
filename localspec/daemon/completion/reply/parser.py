"""A model's raw answer into what a client reads: reasoning, text, tool calls. Works on a stream."""

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
_BEGUN_FENCE = re.compile(r"(?:\A|\n)[ \t]*`{1,2}\Z")
_BETWEEN = "; \n\t"  # what may stand between two calls of a format without markers
# Control tokens in some vocabularies: their text is needed to see where thinking begins and ends.
SHOWN = [mark.removesuffix("thought\n") for pair in THOUGHTS for mark in pair] + channels.SHOWN


@dataclass(slots=True)
class Text:
    """More of the answer's text, or of the thoughts before it."""

    kind: Literal["content", "reasoning"]
    text: str


Piece = Text | Call | Arguments


class AnswerParser:
    """One answer. `reasoning` False: thoughts stay in the text.

    `required`: the answer is held to be calls. `constrained`: what follows a marker is held to be a call.
    `plain_calls`: the tools whose calls may come as plain JSON.
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
        self._in_code = False  # within a fenced block that is no call
        self._line_begins = True  # the text so far ends with a line, or none has come
        self._form = form
        self._tools = tools or {}
        self._parallel = parallel
        self._reasoning = reasoning
        self._thoughts: Sequence[tuple[str, str]] = THOUGHTS
        self._held = ""  # text that may be the beginning of a marker
        self._state: Literal["start", "thinking", "content", "call"] = "start"
        self._closing = ""  # of the thoughts, or of the call that is being read
        self._opening = ""  # the marker of the call that is being read
        self._reader: Reader | None = None
        self._channels = channels.Channels() if reasoning else None
        self._blank = False  # blanks are dropped until other text comes

    def begin(self, tail: str, thoughts: Sequence[tuple[str, str]] = ()) -> None:
        """`tail` is the end of the prompt; a template may have opened the thoughts already. `thoughts`:
        what this model opens and closes them with, where that is known.
        """
        self._thoughts = [*thoughts, *THOUGHTS]
        if not self._reasoning:
            return
        for opening, closing in reversed(self._thoughts):
            if tail.rstrip().endswith(opening.rstrip()):
                self._state, self._closing, self._blank = "thinking", closing, True

    def regions(self, tail: str) -> Regions:
        """Return what classifies the text of this answer, which has just begun; `tail` as in `begin`."""
        thoughts = self._thoughts if self._reasoning else ()
        return Regions(thoughts, tail, self._form, self._tools)

    @property
    def thinking(self) -> bool:
        """Whether what came last was thought."""
        return self._state == "thinking"

    def push(self, text: str) -> list[Piece]:
        self._held += self._channels.push(text) if self._channels else text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        """What was held back, once the answer is over."""
        if self._channels:
            self._held += self._channels.finish()
        pieces = self._run(final=True)
        if self._state == "call" and self._reader is not None:
            pieces += self._kept(self._reader.end())
            if self._reader.broken and not self._call_is_certain(self._reader):
                self._emit(pieces, "content", self._opening + self._reader.raw)
        return _merged(pieces)

    def _call_is_certain(self, reader: Reader) -> bool:
        """Return whether what was cut off while it was read can have been nothing but a call."""
        if isinstance(reader, JsonBlock):
            return False
        return self._required or bool(self.calls) or (self._constrained and bool(self._opening))

    def _run(self, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            before = (self._state, len(self._held), len(pieces), self._reader)
            match self._state:
                case "start":
                    self._start(final)
                case "thinking":
                    self._think(pieces, final)
                case "content":
                    self._say(pieces, final)
                case "call":
                    self._call(pieces)
            if before == (self._state, len(self._held), len(pieces), self._reader):
                return _merged(pieces)

    def _start(self, final: bool) -> None:
        """Does the answer begin with thoughts, or with a call that has no marker?"""
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
        at = self._held.find(self._closing)
        if at >= 0:
            self._emit(pieces, "reasoning", self._held[:at].rstrip())
            self._held = self._held[at + len(self._closing) :]
            self._state, self._blank, self._reasoning = "start", True, False
            return
        end = len(self._held) if final else _certain(self._held, [self._closing], blanks=True)
        self._emit(pieces, "reasoning", self._held[:end])
        self._held = self._held[end:]

    def _say(self, pieces: list[Piece], final: bool) -> None:
        if self._plain_calls and self._say_up_to_a_fence(pieces, final):
            return
        openings = self._form.opens
        found = [(at, mark) for mark in openings if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found, key=lambda each: (each[0], -len(each[1])))
            self._emit(pieces, "content", self._held[:at].rstrip())
            self._held = self._held[at + len(mark) :]
            self._begin_call(mark)
            return
        blanks = bool(openings or self._plain_calls)
        if final and not (self._required or self.calls):
            end = len(self._held)
        else:  # in the end too: a marker that has begun is no text where only a call can have been
            end = self._certain_length(blanks=blanks, fences=not final)
        if final and self._held.strip() and not self._held[end:].strip():
            end = len(self._held)  # blanks, but for those after the last call
        self._emit(pieces, "content", self._held[:end])
        self._held = "" if final else self._held[end:]

    def _certain_length(self, *, blanks: bool, fences: bool) -> int:
        """Return how much of the held text belongs to no marker that has begun."""
        marks = [*self._form.opens]
        if self._required:
            marks += [opening for opening, _ in self._thoughts]
        end = _certain(self._held, marks, blanks=blanks)
        begun = _BEGUN_FENCE.search(self._held) if self._plain_calls and fences else None
        return end if begun is None else min(end, len(self._held[: begun.start()].rstrip()))

    def _say_up_to_a_fence(self, pieces: list[Piece], final: bool) -> bool:
        """Read up to the next fence, if it comes before any marker: of a block that may be a call, or the
        end of a block that is none.
        """
        found = _FENCE.search(self._held)
        begins = found is not None and not found.start() and self._held[0] != "\n"
        if begins and not self._line_begins:  # it stands within a line
            found = _FENCE.search(self._held, 1)
        if found is None:
            return False
        marks = [at for mark in self._form.opens if (at := self._held.find(mark)) >= 0]
        if marks and min(marks) < found.start():
            return False
        if self._in_code:
            self._in_code = False
            self._emit(pieces, "content", self._held[: found.end()])
            self._held = self._held[found.end() :]
            return True
        before = self._held[: found.start()].rstrip()
        self._emit(pieces, "content", before)
        opening, self._held = self._held[len(before) : found.end()], self._held[found.end() :]
        self._begin_block(opening, fenced=True)
        return True

    def _begin_block(self, opening: str, *, fenced: bool) -> None:
        self._reader = JsonBlock(self._plain_calls, fenced=fenced)
        self._state, self._opening, self._closing = "call", opening, ""

    def _begin_call(self, mark: str) -> None:
        names: Collection[str] | None = self._tools if self._form.bare and not mark else None
        self._reader = reader_for(self._form, self._tools, names)
        closing = "" if self._form.kind == "found" else self._form.close  # which its reader reads
        self._state, self._opening, self._closing = "call", mark, closing

    def _call(self, pieces: list[Piece]) -> None:
        if self._reader is None:
            self._close_call()
            return
        reader = self._reader
        found, self._held = reader.feed(self._held)
        pieces += self._kept(found)
        self._line_begins = True
        if reader.broken:
            self._in_code = isinstance(reader, JsonBlock) and self._opening.endswith(FENCE)
            self._emit(pieces, "content", self._opening)
            # Another marker may stand in it, whichever pieces it came in.
            self._held = reader.raw + self._held
            self._state, self._reader = "content", None
        elif reader.over:
            self._reader, self._blank = None, True

    def _close_call(self) -> None:
        """After a call: its closing marker, or the next call of a format without markers."""
        text = self._held.lstrip()
        if self._closing and text.startswith(self._closing):
            self._held, self._state = text[len(self._closing) :], "content"
        elif self._closing.startswith(text) and (self._closing or not text):
            return  # more of it may come
        elif self._form.bare and text.lstrip(_BETWEEN).startswith("{"):
            self._held = text.lstrip(_BETWEEN)
            self._begin_call("")
        elif not self._form.bare or text.strip(_BETWEEN):
            self._state = "content"

    def _kept(self, found: Sequence[CallPiece]) -> list[Piece]:
        """Counted; of several calls only the first, where the client wants no more."""
        kept: list[Piece] = []
        for piece in found:
            self.calls += isinstance(piece, Call)
            piece.index = self.calls - 1
            if self._parallel or self.calls == 1:
                kept.append(piece)
        return kept

    def _emit(self, pieces: list[Piece], kind: Literal["content", "reasoning"], text: str) -> None:
        if self._blank:
            text = text.lstrip()
        if text:
            self._blank = False
            self._line_begins = kind == "reasoning" or text.endswith("\n")
            pieces.append(Text(kind, text))


def split_thoughts(text: str) -> tuple[str, str]:
    """The thoughts at the beginning of a whole answer, and the rest of it."""
    parser = AnswerParser()
    pieces = [*parser.push(text), *parser.finish()]
    parts = {"reasoning": "", "content": ""}
    for piece in pieces:
        if isinstance(piece, Text):
            parts[piece.kind] += piece.text
    return parts["reasoning"], parts["content"]


def _certain(text: str, marks: Sequence[str], *, blanks: bool) -> int:
    """How many characters of `text` come before what may begin a marker (and the blanks there)."""
    sizes = (
        size
        for mark in marks
        for size in range(min(len(mark) - 1, len(text)), 0, -1)
        if text.endswith(mark[:size])
    )
    end = len(text) - max(sizes, default=0)
    return len(text[:end].rstrip()) if blanks else end


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, Text) and isinstance(last, Text) and piece.kind == last.kind:
            last.text += piece.text
        elif isinstance(piece, Arguments) and isinstance(last, Arguments):
            # two calls' arguments never touch: a call stands between them
            last.text += piece.text
        else:
            merged.append(piece)
    return merged
