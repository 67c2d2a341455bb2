"""Parse a model's raw output, while it arrives, into reasoning, text and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from localspec.chat.families import reader_for
from localspec.chat.families.gpt_oss import HARMONY
from localspec.chat.families.hermes import HERMES
from localspec.chat.notations.call_readers import (
    Arguments,
    Call,
    CallPiece,
    CallReader,
    JsonCalls,
    ReadResult,
)
from localspec.chat.visibility import (
    HEAD_OPENINGS,
    MESSAGE_START,
    SECTION_TOKENS,
    VisibilityParser,
    dropped_markers,
    parse_called_name,
)
from localspec.protocol.calls import NO_TOOLS, CallFormat, call_markers
from localspec.protocol.dialect import REASONING_MARKERS

# ------------------------------------------------------------------------ channels
# Rewrite the answers of gpt-oss and Muse Glimmer, which are messages, in the notation of other models.
#
# A message's head says its channel, or whom it is for. Reasoning goes between <think> and </think>, gpt-oss's
# calls between <tool_call> and </tool_call>. Calls of Muse Glimmer have a notation of their own in the text.


OPENING = "<|channel|>"
# Control tokens of such vocabularies. The token that ends a call also ends the answer, so it is not here.
CHANNEL_TOKENS = [OPENING, "<|message|>", "<|start|>", "<|end|>", "<|eom|>", "<|constrain|>"]
_MESSAGE = "<|message|>"
_MESSAGE_END = re.compile(r"<\|(?:end|start|eom|eot|call|return)\|>")
_MESSAGE_ENDS = ("<|end|>", "<|start|>", "<|eom|>", "<|eot|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION_NAME = re.compile(r"\bto=functions\.([\w.-]+)", re.ASCII)
_TO_ITSELF = re.compile(r"\bto=self\b")
_OPENINGS = {"thoughts": "<think>", "text": "", "call": "<tool_call>\n"}
_CLOSINGS = {"thoughts": "</think>", "text": "", "call": "}\n</tool_call>"}


class ChannelRewriter:
    """Rewrites one answer while it arrives; an answer that does not begin with a head stays as it is."""

    def __init__(self) -> None:
        self._openings: tuple[str, ...] = (OPENING,)
        self._held = ""
        self._body = ""  # what was read of a call
        self._dropped: tuple[str, ...] = ()  # markers that are left out of the answer
        self._marker = ""  # the beginning of one of them, which is the end of the prompt
        self._names: Collection[str] = ()
        self._state: Literal[
            "start", "plain", "recipient", "sections", "head", "thoughts", "text", "call"
        ] = "start"

    def begin(self, tail: str, names: Collection[str] = ()) -> None:
        """Start behind `tail`, the end of the prompt. names: the tools that the answer may begin with."""
        if tail.endswith(MESSAGE_START):  # the whole head is left to the model
            self._openings = HEAD_OPENINGS
        self._dropped, self._marker = dropped_markers(tail)
        self._names = names
        if self._dropped:
            self._state = "recipient" if self._marker else "sections"

    def push(self, text: str) -> str:
        """Consume more text, and return what is certain of the rewritten answer."""
        self._held += text
        return self._read(final=False)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> str:
        output, can_continue = "", True
        while can_continue:
            match self._state:
                case "start":
                    can_continue = self._start(final)
                case "plain":
                    output, self._held, can_continue = output + self._held, "", False
                case "recipient":
                    can_continue = self._read_recipient(final)
                case "sections":
                    output, can_continue = self._read_sections(final), False
                case "head":
                    text, can_continue = self._head()
                    output += text
                case _:
                    text, can_continue = self._read_body(final)
                    output += text
        return output

    def _start(self, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(self._openings):
            self._state = "head"
        elif final or not any(opening.startswith(text) for opening in self._openings):
            self._state = "plain"
        return self._state != "start"

    def _head(self) -> tuple[str, bool]:
        """Read the head of a message, which names its recipient; return output and whether it is complete."""
        head, separator, remaining = self._held.partition(_MESSAGE)
        if not separator:
            return "", False
        self._held = remaining
        channel = _CHANNEL.search(head)
        if function := _FUNCTION_NAME.search(head):
            self._state, self._body = "call", ""
            return f'{_OPENINGS["call"]}{{"name": "{function[1]}", "arguments": ', True
        is_thought = _TO_ITSELF.search(head) or (channel and channel[1] == "analysis")
        self._state = "thoughts" if is_thought else "text"
        return _OPENINGS[self._state], True

    def _read_recipient(self, final: bool) -> bool:
        """Put back the marker that the prompt ends with, if the answer begins with the rest of one."""
        starts = [marker.removeprefix(self._marker) for marker in self._dropped]
        starts += [f"{name}\n" for name in self._names]
        if not final and any(start.startswith(self._held) for start in starts):
            return False
        if self._held.startswith(tuple(starts)):
            self._held = self._marker + self._held
        self._state = "sections"
        return True

    def _read_sections(self, final: bool) -> str:
        """Return what is certain of the answer, without the markers around its text."""
        for marker in self._dropped:
            self._held = self._held.replace(marker, "")
        held = max(_partial_length(self._held, marker) for marker in self._dropped)
        end = len(self._held) - (0 if final else held)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _read_body(self, final: bool) -> tuple[str, bool]:
        position = self._find_end()
        end = position if position >= 0 else len(self._held)
        if position < 0 and not final:
            end -= max(_partial_length(self._held, marker) for marker in _MESSAGE_ENDS)
        text, self._held = self._held[:end], self._held[end:]
        self._body += text if self._state == "call" else ""
        if position < 0:
            return text, False  # what was cut off stays open
        text += _CLOSINGS[self._state]
        self._state = "head"
        return text, True

    def _find_end(self) -> int:
        """Return where the message ends, -1 if it goes on; a string in a call may contain the marker."""
        for end in _MESSAGE_END.finditer(self._held):
            before = self._body + self._held[: end.start()]
            if self._state != "call" or re.sub(r"\\.", "", before).count('"') % 2 == 0:
                return end.start()
        return -1


def _partial_length(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may begin the marker."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


# ------------------------------------------------------------------------ blocks
# Read calls that a model writes as plain JSON though its template has another notation.
#
# They come in a fenced block or as the whole answer. Qwen2.5-Coder does this by habit. Only what can be
# nothing else is a call: objects with the name of an offered tool and an object of arguments, and no other
# text in the block. The text is held back until this is certain or impossible.


FENCE = "```"
_INFO_STRINGS = ("json", "tool_call", "tool_calls", "")  # words that may follow the fence
_INFO_PATTERN = re.compile(r"[ \t]*(\w*)\s*", re.ASCII)
_MAX_HELD_CHARS = 1 << 17  # a longer text is not a call
_ALLOWED_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class JsonBlock(CallReader):
    """Reads what follows a fence, up to the next fence; with `fenced` False, an answer to its end."""

    def __init__(self, names: Collection[str], *, fenced: bool) -> None:
        super().__init__()
        self._names = names
        self._fenced = fenced
        self._at = 0  # how much of `raw` is read
        self._json: JsonCalls | None = None
        self._pieces: list[CallPiece] = []
        self._complete = False  # a call is complete, and nothing else has arrived since

    def feed(self, text: str) -> ReadResult:
        self.raw += text
        can_continue = True
        while can_continue and not (self.is_finished or self.is_broken):
            if self._json is not None:
                can_continue = self._read_json(self._json)
            elif self._complete:
                can_continue = self._read_after_object()
            else:
                can_continue = self._read_head()
        if len(self.raw) > _MAX_HELD_CHARS:
            self.is_broken = self.is_broken or not self.is_finished
        if not self.is_finished or self.is_broken:
            return [], ""
        remaining, self.raw = self.raw[self._at :], self.raw[: self._at]
        return self._pieces, remaining

    def end(self) -> list[CallPiece]:
        self.is_broken = not self._complete
        return [] if self.is_broken else self._pieces

    def _read_head(self) -> bool:
        """Read the text before the JSON; return whether it is complete."""
        if self._fenced:
            match = _INFO_PATTERN.match(self.raw)
            assert match is not None  # the expression also matches an empty text
            word, self._at = match[1].lower(), match.end()
            if self._at == len(self.raw):
                self.is_broken = not any(info.startswith(word) for info in _INFO_STRINGS)
                return False
            self.is_broken = word not in _INFO_STRINGS
        self._begin()
        return True

    def _begin(self) -> None:
        if self.raw[self._at] in "{[":
            self._json = JsonCalls(self._names.__contains__, names=self._names, keys=_ALLOWED_KEYS)
        else:
            self.is_broken = True

    def _read_json(self, reader: JsonCalls) -> bool:
        pieces, remaining = reader.feed(self.raw[self._at :])
        self._pieces += pieces
        self._at = len(self.raw) - len(remaining)
        self.is_broken = reader.is_broken
        if reader.is_finished and not reader.is_broken:
            self._json, self._complete = None, True
            has_calls = bool(self._pieces) and _are_objects(self._pieces)
            self.is_broken = not has_calls or not reader.all_have_arguments
        return reader.is_finished

    def _read_after_object(self) -> bool:
        """Read what follows an object: the fence, another object, or something else."""
        while self._at < len(self.raw) and self.raw[self._at] in " \t\r\n,;":
            self._at += 1
        following = self.raw[self._at : self._at + len(FENCE)]
        if not following or (self._fenced and following != FENCE and FENCE.startswith(following)):
            return False
        if self._fenced and following == FENCE:
            self._at += len(FENCE)
            self.is_finished = True
        else:
            self._complete = False
            self._begin()
        return True


def _are_objects(pieces: list[CallPiece]) -> bool:
    """Return whether the arguments of every call are a JSON object."""
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, Arguments):
            texts[-1] += piece.text
        else:
            texts.append("")
    try:
        return all(isinstance(json.loads(text, strict=False), dict) for text in texts)
    except (ValueError, RecursionError):
        return False


# ------------------------------------------------------------------------ parser


_FENCE = re.compile(r"(?:\A|\n)[ \t]*```")
_PARTIAL_FENCE = re.compile(r"(?:\A|\n)[ \t]*`{1,2}\Z")
_CALL_SEPARATORS = "; \n\t"  # characters between two calls of a format without markers
# These are control tokens in some vocabularies. The engine has to output their text, because it shows where
# reasoning begins and ends.
REASONING_TOKENS = [
    mark.removesuffix("thought\n") for pair in REASONING_MARKERS for mark in pair
] + [*CHANNEL_TOKENS, *SECTION_TOKENS]


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
        self._form = HERMES if form == HARMONY else form  # as `ChannelRewriter` writes it
        self._tools = tools or {}
        self._markers = call_markers(self._form, self._tools)
        self._parallel = parallel
        self._reasoning = reasoning
        self._thoughts: Sequence[tuple[str, str]] = REASONING_MARKERS
        self._held = ""  # text that may begin a marker
        self._state: Literal["start", "thinking", "content", "call"] = "start"
        self._closing = ""  # the closing marker of the reasoning or call that is being read
        self._opening = ""  # the opening marker of the call that is being read
        self._reader: CallReader | None = None
        self._channels = ChannelRewriter() if reasoning else None
        self._blank = False  # blanks are dropped until other text arrives

    def begin(self, tail: str, thoughts: Sequence[tuple[str, str]] = ()) -> None:
        """Start with `tail`, the end of the prompt, in which the template may already open the reasoning.

        `thoughts` are this model's own pairs of markers, if known.
        """
        self._thoughts = [*thoughts, *REASONING_MARKERS]
        if not self._reasoning:
            return
        if self._channels is not None:
            self._channels.begin(tail, self._tools if self._form.recipient else ())
        for opening, closing in reversed(self._thoughts):
            if tail.rstrip().endswith(opening.rstrip()):
                self._state, self._closing, self._blank = "thinking", closing, True

    def regions(self, tail: str) -> VisibilityParser:
        """Return what classifies the text of this answer, which has just begun; `tail` is as in `begin`."""
        thoughts = self._thoughts if self._reasoning else ()
        return VisibilityParser(thoughts, tail, self._form, self._tools)

    @property
    def thinking(self) -> bool:
        """Whether the latest text is reasoning."""
        return self._state == "thinking"

    def feed(self, text: str) -> list[Piece]:
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
            if self._reader.is_broken and not self._call_is_certain(self._reader):
                self._emit(pieces, "content", self._opening + self._reader.raw)
        return _merge_pieces(pieces)

    def _call_is_certain(self, reader: CallReader) -> bool:
        """Return whether text that was cut off while a call was read cannot be anything else."""
        if isinstance(reader, JsonBlock):
            return False
        if (
            self.calls and not self._opening
        ):  # behind a call, of a format that needs no marker there
            return parse_called_name(reader.raw) != ""
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
        openings = self._markers
        positions = [
            (position, marker) for marker in openings if (position := self._held.find(marker)) >= 0
        ]
        if positions:
            position, marker = min(positions, key=lambda entry: (entry[0], -len(entry[1])))
            self._emit(pieces, "content", self._held[:position].rstrip())
            marker = self._form.opens[0] if self._form.recipient else marker
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
        markers = [*self._markers]
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
            position for marker in self._markers if (position := self._held.find(marker)) >= 0
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
        # The reader of literals consumes the closing marker itself.
        has_literals = self._form.kind in ("hermes", "named", "found")
        closing = "" if has_literals else self._form.close
        self._state, self._opening, self._closing = "call", marker, closing

    def _read_call(self, pieces: list[Piece]) -> None:
        if self._reader is None:
            self._close_call()
            return
        reader = self._reader
        call_pieces, self._held = reader.feed(self._held)
        pieces += self._accepted(call_pieces)
        self._line_begins = True
        if reader.is_broken:
            self._in_code = isinstance(reader, JsonBlock) and self._opening.endswith(FENCE)
            self._emit(pieces, "content", self._opening)
            # The text may contain another marker, so it is read again.
            self._held = reader.raw + self._held
            self._state, self._reader = "content", None
        elif reader.is_finished:
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
    pieces = [*parser.feed(text), *parser.finish()]
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
