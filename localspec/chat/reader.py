"""Read an answer while it is made, as pieces: text, reasoning, and tool calls with their arguments.

An answer is read once, where its text comes from: in the engine, and in the daemon for the answers of
other servers. `markers` finds thoughts and messages, `families` has the readers of calls, and this module
decides what is a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

from localspec.chat.families import inner_format, reader_for
from localspec.chat.families.gpt_oss import HARMONY
from localspec.chat.families.hermes import HERMES
from localspec.chat.markers import (
    AnswerMarkers,
    Kind,
    Place,
    certain_length,
    is_unmistakable,
)
from localspec.chat.notations.call_readers import CallPiece, CallReader, JsonCalls, new_call
from localspec.chat.notations.json_block import FENCE, JsonBlock
from localspec.chat.notations.literal_calls import (
    MISMATCH,
    LiteralCalls,
    closing_parts,
    match_literal,
)
from localspec.protocol.calls import LITERAL_KINDS, NO_TOOLS, CallFormat, call_markers
from localspec.protocol.dialect import REASONING_MARKERS, ThoughtMarkers
from localspec.protocol.frames import ChatPrompt, Generate
from localspec.protocol.pieces import Arguments, Call, Piece, Text, merge_pieces

_LINE_FENCE = re.compile(r"(?:\A|\n)[ \t]*```")
_PARTIAL_FENCE = re.compile(r"(?:\A|\n)[ \t]*`{1,2}\Z")
_CALL_SEPARATORS = "; \n\t"  # characters between two calls of a format without markers
# The beginnings of a call without a marker, ignoring blanks: its name, which only its type may precede.
_CALL_BEGINNINGS = ('{"name":"', '{"type":"function","name":"')
_CALLED_NAME = re.compile(r"\s*([\w.-]*)\s*", re.ASCII)
_NAME = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)

TextKind = Literal["content", "reasoning"]
_State = Literal["first", "text", "call", "behind call"]


class AnswerReader:
    """Reads one answer.

    Text that may begin a marker or a call waits until that is decided, and so do blanks before a call,
    which are left out if it comes.
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
        tail: str = "",
        thoughts: Sequence[ThoughtMarkers] = (),
    ) -> None:
        """Begin behind `tail`, the end of the prompt, which may have opened the reasoning.

        form, tools: how calls are written, and the schemas of the tools by name. reasoning: thoughts are
        read; without it they stay in the text. parallel: calls after the first one count. required: the
        answer is constrained to be calls. constrained: what follows a marker is constrained to be a call.
        plain_calls: the tools whose calls may come as plain JSON. thoughts: this model's own markers,
        beside those of all models.
        """
        self.calls = 0
        self._form = HERMES if form == HARMONY else form  # in an answer without channels
        self._tools = tools or {}
        self._parallel, self._required = parallel, required
        self._constrained, self._plain_calls = constrained, plain_calls
        self._openings = call_markers(self._form, self._tools)
        # At the end of an answer that must be calls, the beginning of thoughts is not text either.
        # The line end behind a marker may be missing.
        pairs = [(o.rstrip(), close) for o, close in (*thoughts, *REASONING_MARKERS) if reasoning]
        self._awaited = [*self._openings, *(opening for opening, _ in pairs if required)]
        self._holds_blanks = bool(self._openings or plain_calls)
        own, names = pairs[: len(thoughts)], self._tools if form.recipient else ()
        self._markers = AnswerMarkers(pairs, tail, names, own=own, channels=reasoning)
        self._place, self._begun = self._markers.start, self._markers.begun
        # What is not classified yet, and classified text that is not decided yet: each with its place.
        self._held, self._at = "", 0
        self._text, self._text_at = "", 0
        self._blanks: list[Text] = []  # blanks that only count if more of their kind follows
        self._inner_form = inner_format(self._form) if self._tools else None
        self._inner = self._inner_form.lead.strip() if self._inner_form else ""
        is_literal = self._form.kind in ("hermes", *LITERAL_KINDS)
        self._closing = "" if is_literal else self._form.close  # their reader reads it itself
        self._skips_blanks = self.thinking
        self._state: _State = "text" if self.thinking else "first"
        self._opening, self._opening_at = "", 0  # the marker of the call that is being read
        self._reader: CallReader | None = None
        self._in_code = False  # inside a fenced block that is not a call
        self._line_begins = True  # the text so far is empty or ends with a line
        self._pieces: list[Piece] = []

    @property
    def thinking(self) -> bool:
        """Whether the latest text is reasoning."""
        return self._place.region == "thoughts"

    @property
    def decided(self) -> int:
        """How many characters of the answer are certainly text, reasoning or neither."""
        if self._blanks:
            return self._blanks[0].at
        if self._reader is not None and self._opening_at >= 0:
            return self._opening_at
        if self._text:
            return self._text_at
        return self._at - (self._reader.undecided if self._reader is not None else 0)

    def feed(self, text: str) -> list[Piece]:
        """Read more text, and return the pieces that are certain."""
        return self._read(text, final=False)

    def finish(self, text: str = "") -> list[Piece]:
        """Read the last text, and return the pieces that are left at the end of the answer."""
        return self._read(text, final=True)

    def _read(self, text: str, *, final: bool) -> list[Piece]:
        self._held, self._pieces = self._held + text, []
        if self._begun and (final or self._held):
            rests = self._markers.recipients
            if not final and any(rest.startswith(self._held) for rest in rests):
                return []
            if self._held.startswith(rests):  # the rest of the marker with which the prompt ends
                self._held, self._at = self._begun + self._held, -len(self._begun)
            self._begun = ""
        while self._held:
            in_call = self._reader is not None
            if self._reader is not None and self._place.in_message:
                in_call = self._reader.in_value
            kind, count, place = self._markers.take(
                self._place, self._held, final=final, in_call=in_call
            )
            if not count:
                break
            piece, self._held, self._at = self._held[:count], self._held[count:], self._at + count
            if kind in ("text", "thoughts", "call"):
                self._place = place
                self._take(kind, piece)
            else:
                self._pass_marker(kind, place)
                self._place = place
        if final:
            self._end()
        return merge_pieces(self._pieces)

    def _take(self, kind: Kind, text: str) -> None:
        if kind == "call":
            self._read_message(self._place.name, text)
            return
        if self._place.in_message and not self._place.name:  # calls are messages of their own
            self._emit("reasoning" if self.thinking else "content", text, self._at - len(text))
            return
        if not self._text:
            self._text_at = self._at - len(text)
        self._text += text
        self._read_text(final=False)

    def _pass_marker(self, kind: Kind, following: Place) -> None:
        """Settle what precedes a marker; following: the place behind it."""
        if self._place.region == "call":
            if kind == "end":
                self._end_message(self._place.name)
        elif self._reader is None:
            self._show(len(self._text))
        elif kind == "end" or self.thinking:
            self._end_call()
        if self.thinking:
            self._blanks.clear()
        if kind == "end" or following.region != "text":
            self._skips_blanks = True
            self._state = "text" if following.region == "thoughts" else "first"

    def _read_message(self, name: str, text: str) -> None:
        """Read more of a message to a function. It is a call if it has JSON and there are tools."""
        if self._state == "first":
            self._text += text
            start = self._text.lstrip()[:1]
            if not start:
                return
            text, self._text = self._text, ""
            self._state = "call" if start in '{"' and self._tools else "text"
            self._reader = JsonCalls(call=new_call(name)) if self._state == "call" else None
            self._opening_at = -1
        if self._reader is not None:
            self._accept(self._reader.feed(text)[0])
        else:
            self._emit("content", text, self._at - len(text))

    def _end_message(self, name: str, *, is_cut: bool = False) -> None:
        if self._reader is not None:
            self._accept([] if self._reader.is_finished else self._reader.end())
        elif self._state == "first" and self._tools:
            self._accept([new_call(name), *([] if is_cut else [Arguments("{}")])])
        self._reader, self._text = None, ""

    def _read_text(self, *, final: bool) -> None:
        can_continue = True
        while can_continue:
            match self._state:
                case "first":
                    can_continue = self._read_first(final)
                case "text":
                    can_continue = self._find_call(final)
                case "call":
                    can_continue = self._read_call()
                case _:
                    can_continue = self._read_behind_call(final)

    def _read_first(self, final: bool) -> bool:
        """Decide whether the answer, or what follows its thoughts, is a call without a marker."""
        text = self._text.lstrip()
        if not text and not final:
            return False
        self._state = "text"
        blanks = self._text.removesuffix(text)
        if text.startswith("{") and self._form.bare:
            self._cut(len(blanks))
            self._begin_call("", self._bare_reader())
        elif text.startswith("{") and self._plain_calls:
            self._begin_call(blanks, JsonBlock(self._plain_calls, close=self._form.close))
        return True

    def _bare_reader(self) -> CallReader:
        return reader_for(self._form, self._tools, self._tools)

    def _find_call(self, final: bool) -> bool:
        """Show the text before the next call or block; return whether one begins."""
        text, in_thoughts = self._text, self.thinking
        found = [(at, -len(mark), mark) for mark in self._openings if (at := text.find(mark)) >= 0]
        inner_at, is_inner = self._find_inner(text)
        if is_inner:
            found.append((inner_at, -len(self._inner), self._inner))
        certain = certain_length(text, (*self._awaited, self._inner))
        certain = min(certain, inner_at) if inner_at >= 0 else certain
        fence = None if in_thoughts or not self._plain_calls else self._find_fence(text)
        # A marker that has begun before a fence may contain it.
        if fence is not None and fence.start() <= (min(found)[0] if found else certain):
            return self._begin_block(fence)
        if found:
            at, _, mark = min(found)
            self._show(at)
            is_inner = is_inner and mark == self._inner
            opening = self._form.opens[0] if self._form.recipient and not is_inner else mark
            reader = reader_for(self._form, self._tools, None)
            if is_inner and self._inner_form is not None:
                reader = LiteralCalls(self._inner_form, self._tools, is_opened=True)
            self._begin_call(opening, reader)
            return True
        # Even at the end, an incomplete marker is not text if only a call could follow, as right behind one.
        is_behind_call = self.calls > 0 and self._skips_blanks and not text[:certain].strip()
        if not final or ((self._required or is_behind_call) and not in_thoughts):
            ends = [certain]
            if self._plain_calls and not final and (fence := _PARTIAL_FENCE.search(text)):
                ends.append(fence.start())
            self._show(min(ends))
        else:
            self._show(len(text))
        if final:
            self._text = ""
        return False

    def _begins_line(self, before: str) -> bool:
        """Return whether what follows `before`, which is not shown yet, begins a line."""
        return not before.rpartition("\n")[2].strip() and ("\n" in before or self._line_begins)

    def _find_inner(self, text: str) -> tuple[int, bool]:
        """Return where a call without its first marker begins, or may begin, and whether that is certain.

        It is a call if it begins a line or has a marker that no text has by chance, names a tool, and goes on
        as a call does.
        """
        if not self._inner:
            return -1, False
        for match in re.finditer(re.escape(self._inner), text):
            if is_unmistakable(self._inner) or self._begins_line(text[: match.start()]):
                is_call = self._names_tool(text[match.end() :])
                if is_call is not False:
                    return match.start(), bool(is_call)
        return -1, False

    def _names_tool(self, text: str) -> bool | None:
        """Return whether `text` goes on as a call of a tool behind its lead; None if more must come."""
        match = _CALLED_NAME.match(text)
        assert match is not None  # the expression also matches an empty text
        if match.end() == len(text):
            return None if any(name.startswith(match[1]) for name in self._tools) else False
        if match[1] not in self._tools:
            return False
        form = self._inner_form
        assert form is not None
        end = match_literal(form.middle.strip(), text, match.end())
        rest = text[end:].lstrip() if end >= 0 else ""
        if end < 0 or not rest:
            return False if end == MISMATCH else None
        followers = [*form.parameter[:1], closing_parts(form)[0], "{"]
        if any(rest.startswith(follower.strip()) for follower in followers):
            return True
        return None if any(follower.strip().startswith(rest) for follower in followers) else False

    def _find_fence(self, text: str) -> re.Match[str] | None:
        """Return the next fence that begins a line."""
        fence = _LINE_FENCE.search(text)
        if fence is not None and not (
            fence[0].startswith("\n") or self._line_begins or fence.start()
        ):
            return _LINE_FENCE.search(text, 1)
        return fence

    def _begin_block(self, fence: re.Match[str]) -> bool:
        """Read a fence. It begins a block that may be a call, or ends one that is not."""
        if self._in_code:
            self._in_code = False
            self._show(fence.end())
        else:
            self._show(fence.start())
            self._begin_call(fence[0], JsonBlock(self._plain_calls, fenced=True))
        return True

    def _begin_call(self, opening: str, reader: CallReader) -> None:
        self._opening, self._opening_at = opening, self._text_at
        self._cut(len(opening))
        self._state, self._reader = "call", reader

    def _read_call(self) -> bool:
        assert self._reader is not None
        reader, text = self._reader, self._text
        pieces, self._text = reader.feed(text)
        self._text_at += len(text) - len(self._text)
        name = next((piece.name for piece in pieces if isinstance(piece, Call)), "")
        if reader.is_broken or (name and self.thinking and name not in self._tools):
            self._in_code = isinstance(reader, JsonBlock) and self._opening.endswith(FENCE)
            # The text may contain another marker, so it is read again.
            text, self._text_at = self._opening + reader.raw, self._opening_at
            self._text = text + self._text
            self._show(len(self._opening))
            self._state, self._reader = "text", None
            return True
        self._accept(pieces)
        if reader.is_finished:
            self._state, self._reader = "behind call", None
            self._skips_blanks = self._line_begins = True
        return reader.is_finished

    def _end_call(self) -> None:
        """End a call that the text, or its message, breaks off."""
        assert self._reader is not None
        reader, self._reader, self._state = self._reader, None, "text"
        self._accept(reader.end())
        if reader.is_broken and not self._is_certain(reader):
            kind: TextKind = "reasoning" if self.thinking else "content"
            self._emit(kind, self._opening + reader.raw, self._opening_at)

    def _is_certain(self, reader: CallReader) -> bool:
        """Return whether text that was cut off while a call was read cannot be anything else."""
        if isinstance(reader, JsonBlock) or self.thinking:
            return False
        if self.calls and not self._opening:
            # Behind a call, of a format that needs no marker there.
            return parse_called_name(reader.raw) != ""
        return self._required or bool(self.calls) or (self._constrained and bool(self._opening))

    def _read_behind_call(self, final: bool) -> bool:
        """Read what follows a call: its closing marker, or the next call of a format without markers."""
        text, close = self._text.lstrip(), self._closing
        if close and text.startswith(close):
            self._cut(len(self._text) - len(text) + len(close))
            self._state = "text"
        elif close.startswith(text) and (close or not text):
            return False  # the marker may still be completed
        elif self._form.bare and text.lstrip(_CALL_SEPARATORS).startswith("{"):
            self._cut(len(self._text) - len(text.lstrip(_CALL_SEPARATORS)))
            self._begin_call("", self._bare_reader())
        elif not self._form.bare or text.strip(_CALL_SEPARATORS):
            self._state = "text"
        return self._state != "behind call"

    def _accept(self, pieces: Sequence[CallPiece]) -> None:
        """Count the calls, and drop all but the first if the client allows only one."""
        for piece in pieces:
            if isinstance(piece, Call):
                self.calls += 1
                self._opening_at = -1  # nothing of it can become text any more
                self._blanks.clear()
                if self.thinking:  # a call ends thoughts that were not closed
                    self._place = self._markers.leave_thoughts(self._place)
            piece.index = self.calls - 1
            if self._parallel or self.calls == 1:
                self._pieces.append(piece)

    def _cut(self, count: int) -> str:
        """Take `count` characters from the text."""
        text, self._text = self._text[:count], self._text[count:]
        self._text_at += count
        return text

    def _show(self, count: int) -> None:
        kind: TextKind = "reasoning" if self.thinking else "content"
        self._emit(kind, self._cut(count), self._text_at - count)

    def _emit(self, kind: TextKind, text: str, at: int) -> None:
        """Add text; blanks at its end wait for more, where a marker or a call could follow."""
        if not text:
            return
        self._line_begins = self._begins_line(text)
        if self._skips_blanks:
            at, text = at + len(text) - len(text.lstrip()), text.lstrip()
        shown = text.rstrip() if kind == "reasoning" or self._holds_blanks else text
        if shown:
            self._skips_blanks = False
            self._pieces += [*self._blanks, Text(kind, shown, at)]
            self._blanks.clear()
        if len(shown) < len(text):
            self._blanks.append(Text(kind, text[len(shown) :], at + len(shown)))

    def _end(self) -> None:
        """Decide what waits at the end of the answer."""
        if self._place.region == "call":
            self._end_message(self._place.name, is_cut=True)
        elif self._text or self._state == "first":
            self._read_text(final=True)
        if self._reader is not None:
            self._end_call()
        is_text = not (self._required or self.calls)
        self._pieces += [blank for blank in self._blanks if is_text or blank.kind == "reasoning"]
        self._blanks.clear()


class PlainReader:
    """Reads an answer of which all is text, with the interface of `AnswerReader`."""

    calls, thinking = 0, False

    def __init__(self) -> None:
        self.decided = 0

    def feed(self, text: str) -> list[Piece]:
        self.decided += len(text)
        return [Text("content", text, self.decided - len(text))] if text else []

    def finish(self, text: str = "") -> list[Piece]:
        return self.feed(text)


def reader_of(
    request: Generate, tail: str = "", thoughts: Sequence[ThoughtMarkers] = (), *, reasoning: bool
) -> AnswerReader | PlainReader:
    """Return the reader of the answer to a request.

    tail, thoughts: as of `AnswerReader`. reasoning: whether thoughts are to be read.
    """
    tools = request.tools
    if not reasoning and (tools is None or not isinstance(request.prompt, ChatPrompt)):
        return PlainReader()
    if tools is None:
        return AnswerReader(tail=tail, thoughts=thoughts)
    # With a format of the client's own, the answer may be JSON that only looks like a call.
    is_plain = not tools.required and request.constraint is None
    return AnswerReader(
        tools.format,
        tools.schemas,
        reasoning=reasoning,
        parallel=tools.parallel,
        required=tools.required,
        constrained=not tools.format.guessed,
        plain_calls=tuple(tools.schemas) if is_plain else (),
        tail=tail,
        thoughts=thoughts,
    )


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the reasoning at the beginning of a whole answer, and the remaining text."""
    parts = {"reasoning": "", "content": ""}
    for piece in AnswerReader().finish(text):
        if isinstance(piece, Text):
            parts[piece.kind] += piece.text
    return parts["reasoning"], parts["content"]


def parse_called_name(text: str) -> str | None:
    """Return the name in a call that begins with `text`; "" if none does, None if more must come."""
    may_continue = False
    for head in _CALL_BEGINNINGS:
        at = 0
        for index, char in enumerate(text):
            if at == len(head):
                name = _NAME.match(text, index)
                return name[1] if name else None
            if char == head[at]:
                at += 1
            elif not char.isspace():
                break
        else:
            may_continue = True
    return None if may_continue else ""
