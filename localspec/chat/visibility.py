"""Classify the characters of an answer as visible text or as hidden thoughts, calls and markers.

Stop strings match visible text only. The daemon takes an answer apart for its clients
(`parser`). This module follows the same text only as far as that distinction
requires, while it is generated and however it is split into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from localspec.protocol.calls import CALL_ID_PLACEHOLDER, CallFormat, call_markers

VISIBLE, HIDDEN = "v", "h"

# gpt-oss and Muse Glimmer write messages: a head up to _MESSAGE says whom the following text is for.
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_CHANNEL_ENDS = ("<|end|>", "<|start|>", "<|eom|>")
_HIDDEN_CHANNEL = re.compile(r"<\|channel\|>\s*analysis\b|\bto=(?!user\b|assistant\b)")
# A prompt may end with the first, and leave the whole head to the model, which then begins with one of these.
MESSAGE_START = "<|start|>assistant"
HEAD_OPENINGS = (_CHANNEL, "to=", _MESSAGE)
# Kimi K3 writes sections, and its prompts end with the opening of its thoughts or its text. Functionary 3.2
# says whom a text is for, and its prompts end with the marker of that. Other markers of texts are left out.
SECTION_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
_SECTIONS = "<|open|>think<|sep|>", "<|open|>response<|sep|>"
_SECTION_MARKERS = _SECTIONS[1], "<|close|>response<|sep|>", "<|close|>message<|sep|>"
_RECIPIENT = ">>>"


def dropped_markers(tail: str) -> tuple[tuple[str, ...], str]:
    """Return the markers to leave out of an answer, and which part of one the end of the prompt has."""
    if tail.endswith(_SECTIONS):
        return _SECTION_MARKERS, ""
    return ((f"{_RECIPIENT}all\n",), _RECIPIENT) if tail.endswith(_RECIPIENT) else ((), "")


_BETWEEN_CALLS = "; \n\t"  # characters that may stand between two calls of a format without markers

_FENCE = "```"
_FENCE_HEAD = re.compile(r"```[ \t]*(\w*)\s*", re.ASCII)
# A fenced block may be a call if one of these words follows its fence.
_CALL_LANGUAGES = ("json", "tool_call", "tool_calls", "")
_TAGGED_PARAMETER = ("<parameter=", "</parameter>")
# The beginnings of a call without a marker, ignoring blanks: its name, which only its type may precede.
_CALL_BEGINNINGS = ('{"name":"', '{"type":"function","name":"')
_NAME = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)
_STRING_END = re.compile(r'["\\]')


class VisibilityParser:
    """A state machine that classifies each character of one answer as visible or hidden.

    A character is classified as soon as that is certain. Text that may be the beginning of a marker
    waits, and so do blanks that a marker may hide. Characters are classified in their order.

    Each state is a method: it classifies what it can of `_pending` and returns whether the next
    state should go on at once.
    """

    def __init__(
        self,
        thoughts: Sequence[tuple[str, str]] = (),
        tail: str = "",
        form: CallFormat | None = None,
        tools: Collection[str] = (),
        *,
        plain_calls: bool = False,
    ) -> None:
        """Start at the beginning of an answer.

        thoughts: pairs of markers around thoughts; empty if thoughts are part of the text.

        tail: the last characters of the prompt, which may have opened thoughts.

        form, tools: how calls are written, and the names of the tools.

        plain_calls: JSON that names a tool is a call, in a fenced block or as a whole answer.
        """
        self._plain_calls = plain_calls
        self._in_text_block = False  # inside a fenced block that is no call
        self._thoughts = thoughts
        self._form = form or CallFormat("json")
        self._markers = call_markers(self._form, tools)
        self._tools = tools
        self._pending = ""  # text that is not classified yet
        self._decided = ""  # kinds of the characters classified since the last result
        self._state: Callable[[bool], bool] = self._start
        self._thoughts_end = ""  # marker that closes the thoughts
        self._hides_blanks = False  # blanks are hidden until other text comes
        self._call = _CallEnd(self._form)  # the call that is being read
        self._has_calls = False
        end = tail.rstrip()
        self._dropped, self._pending = dropped_markers(end) if thoughts else ((), "")
        self._prompted = len(self._pending)  # characters of the prompt that are read again
        self._head_openings = HEAD_OPENINGS if end.endswith(MESSAGE_START) else (_CHANNEL,)
        for opening, closing in thoughts:
            if end.endswith(opening.rstrip()):
                self._think(closing)
                break

    def feed(self, text: str) -> str:
        """Add text and return the kinds of the characters now certain, one letter for each."""
        return self._run(text, final=False)

    def finish(self, text: str = "") -> str:
        """Add the last text and return the kinds of all remaining characters."""
        return self._run(text, final=True)

    def _run(self, text: str, *, final: bool) -> str:
        self._pending += text
        self._decided = ""
        while self._state(final):
            pass
        kinds, self._decided = self._decided, ""
        from_prompt = min(self._prompted, len(kinds))
        self._prompted -= from_prompt
        return kinds[from_prompt:]

    def _take(self, count: int, kind: str) -> None:
        self._pending, self._decided = self._pending[count:], self._decided + kind * count

    # ------------------------------------------------------------------------ the beginning, thoughts

    def _start(self, final: bool) -> bool:
        """Check whether the answer, or what follows its thoughts, begins with a marker."""
        text = self._pending.lstrip()
        lead = len(self._pending) - len(text)
        for opening, closing in self._thoughts:
            if text.startswith(opening):
                self._take(lead + len(opening), HIDDEN)
                self._think(closing)
                return True
        openings = [opening for opening, _ in self._thoughts]
        if openings:
            openings += self._head_openings
            if text.startswith(self._head_openings):
                self._take(lead, HIDDEN)
                self._state = self._channel_head
                return True
        if not final and (not text or any(opening.startswith(text) for opening in openings)):
            return False
        if self._form.bare and text.startswith("{"):
            return self._bare_call(lead, final)
        if self._plain_calls and text.startswith("{"):
            return self._plain_call(lead, lead, final, self._hidden_to_the_end)
        self._state = self._content
        return True

    def _think(self, closing: str) -> None:
        self._thoughts, self._thoughts_end = (), closing
        self._hides_blanks = True
        self._state = self._thinking

    def _thinking(self, final: bool) -> bool:
        if self._hide_up_to([self._thoughts_end], final):
            self._take(len(self._thoughts_end), HIDDEN)
            self._state = self._start
            return True
        return False

    def _hide_up_to(self, marks: Sequence[str], final: bool) -> bool:
        """Hide the text before the first of `marks`. Return False if none has come yet."""
        positions = [at for mark in marks if (at := self._pending.find(mark)) >= 0]
        self._take(
            min(positions) if positions else _count_certain(self._pending, marks, final), HIDDEN
        )
        return bool(positions)

    # ------------------------------------------------------------------------ channels

    def _channel_head(self, final: bool) -> bool:
        at = self._pending.find(_MESSAGE)
        if at < 0:
            if final:
                self._take(len(self._pending), HIDDEN)
            return False
        hidden = _HIDDEN_CHANNEL.search(self._pending[:at])
        self._take(at + len(_MESSAGE), HIDDEN)
        self._hides_blanks = True
        self._state = self._channel_hidden if hidden else self._channel_text
        return True

    def _channel_hidden(self, final: bool) -> bool:
        if self._hide_up_to(_CHANNEL_ENDS, final):
            self._state = self._channel_head
            return True
        return False

    def _channel_text(self, final: bool) -> bool:
        positions = [at for mark in _CHANNEL_ENDS if (at := self._pending.find(mark)) >= 0]
        end = min(positions) if positions else _count_certain(self._pending, _CHANNEL_ENDS, final)
        self._show(end)
        if positions:
            self._state = self._channel_head
        return bool(positions)

    # ------------------------------------------------------------------------ text

    def _show(self, count: int) -> None:
        """Show `count` characters, except blanks that follow thoughts or a call."""
        if self._hides_blanks:
            text = self._pending[:count]
            blanks = len(text) - len(text.lstrip())
            self._take(blanks, HIDDEN)
            count -= blanks
            self._hides_blanks = not count
        self._take(count, VISIBLE)

    def _content(self, final: bool) -> bool:
        openings = self._markers
        if self._drop_marker():
            return True
        openings_found = [
            (start, -len(mark)) for mark in openings if (start := self._pending.find(mark)) >= 0
        ]
        fence = self._pending.find(_FENCE) if self._plain_calls else -1
        if fence >= 0 and (not openings_found or fence < min(openings_found)[0]):
            self._show(len(self._pending[:fence].rstrip()))
            self._state = self._fenced
            return True
        if self._plain_calls:
            openings = (*openings, _FENCE)
        if openings_found:
            start, size = min(openings_found)
            visible_count = len(self._pending[:start].rstrip())
            self._show(visible_count)
            self._take(start - visible_count - size, HIDDEN)
            self._begin_call()
            return True
        # After a call, the beginning of a marker is not text even at the end of the answer.
        marks = (*openings, *self._dropped)
        end = _count_certain(self._pending, marks, final and not self._has_calls)
        # Blanks before a call are not shown, nor are those at the end of an answer that has calls.
        if (openings and not final) or (self._has_calls and not self._pending.strip()):
            end = len(self._pending[:end].rstrip())
        self._show(end)
        if final:
            self._take(len(self._pending), HIDDEN)
        return False

    def _drop_marker(self) -> bool:
        """Hide the next marker of a section, if the text before it has no other marker."""
        markers = [(at, mark) for mark in self._dropped if (at := self._pending.find(mark)) >= 0]
        openings = (at for mark in self._markers if (at := self._pending.find(mark)) >= 0)
        if not markers or min(markers)[0] > min(openings, default=len(self._pending)):
            return False
        at, mark = min(markers)
        self._show(at)
        self._take(len(mark), HIDDEN)
        return True

    # ------------------------------------------------------------------------ plain calls

    def _fenced(self, final: bool) -> bool:
        """Decide whether the block at a fence may be a call or is text."""
        fence = _FENCE_HEAD.search(self._pending)
        assert fence is not None
        end = fence.end()
        if not self._in_text_block and fence[1].lower() in _CALL_LANGUAGES:
            if end == len(self._pending) and not final:
                return False
            if self._pending.startswith("{", end):
                return self._plain_call(fence.start() + len(_FENCE), end, final, self._fenced_call)
        elif not self._in_text_block and end == len(self._pending) and not final:
            return False  # the language after the fence may not be complete yet
        return self._show_fence(fence.start() + len(_FENCE))

    def _show_fence(self, count: int) -> bool:
        self._in_text_block = not self._in_text_block
        self._show(count)
        self._state = self._content
        return True

    def _plain_call(self, head: int, at: int, final: bool, call: Callable[[bool], bool]) -> bool:
        """Read JSON at `at` as a call if it names a tool, and otherwise as text.

        head: number of characters to pass at once if it is text.
        """
        name = parse_called_name(self._pending[at:])
        if name is None and not final:
            return False
        if name in self._tools:
            self._take(at, HIDDEN)
            self._has_calls, self._state = True, call
            return True
        if call == self._fenced_call:
            return self._show_fence(head)
        self._take(head, HIDDEN)
        self._state = self._content
        return True

    def _fenced_call(self, final: bool) -> bool:
        if self._hide_up_to([_FENCE], final):
            self._take(len(_FENCE), HIDDEN)
            self._hides_blanks = True
            self._state = self._content
            return True
        return False

    def _hidden_to_the_end(self, final: bool) -> bool:
        self._take(len(self._pending), HIDDEN)
        return False

    # ------------------------------------------------------------------------ calls

    def _bare_call(self, lead: int, final: bool) -> bool:
        """Read an answer that begins with JSON as a call if it names a tool."""
        name = parse_called_name(self._pending[lead:])
        if name is None and not final:
            return False
        self._take(lead, HIDDEN)
        self._state = self._content
        if name in self._tools:
            self._begin_call()
        return True

    def _begin_call(self) -> None:
        self._call, self._has_calls = _CallEnd(self._form), True
        self._state = self._in_call

    def _in_call(self, final: bool) -> bool:
        count, ended = self._call.feed(self._pending)
        self._take(len(self._pending) if final and not ended else count, HIDDEN)
        if ended:
            self._hides_blanks = True
            self._state = self._between if self._form.bare else self._content
        return ended

    def _between(self, final: bool) -> bool:
        """Expect another call, or text, after a call of a format without markers."""
        text = self._pending.lstrip(_BETWEEN_CALLS)
        if final and text.startswith("{") and parse_called_name(text) is None:
            return self._hidden_to_the_end(final)  # a second call that was cut off
        if text.startswith("{"):
            return self._bare_call(len(self._pending) - len(text), final)
        if text or final:
            self._state = self._content
        return bool(text) or final


class _CallEnd:
    """A parser that finds the end of a call: its closing marker or, without one, the end of its JSON.

    Nothing inside a string or a value of the arguments ends the call.
    """

    def __init__(self, form: CallFormat) -> None:
        words = form.close.split(CALL_ID_PLACEHOLDER)[-1].split()
        self._close = words[-1] if words else ""
        # A format discovered from a template may continue with another call in any form.
        self._closes_with_json = not self._close and form.kind != "found"
        parameter = form.parameter or _TAGGED_PARAMETER
        values = {form.quote: form.quote, parameter[0].strip(): parameter[-1].strip()}
        self._value_ends = {begin: end for begin, end in values.items() if begin and end}
        self._inner_markers = [mark for mark in (form.middle, form.identity) if mark]
        self._has_json_strings = form.kind != "python"
        # Nothing is quoted in elements, so that brackets and quotes are text.
        self._has_elements = bool(form.elements and self._close)
        self._quote = form.quote
        self._depth = 0  # open brackets of the JSON
        self._value_end = ""  # marker that ends the string or the value that is being read

    def feed(self, text: str) -> tuple[int, bool]:
        """Return how much of `text` belongs to the call, and whether the call ends there.

        The remaining characters have to be passed again, with more text behind them.
        """
        at = 0
        while at < len(text):
            if self._value_end:
                count, ended = self._read_value(text, at), False
            else:
                count, ended = self._read_outside(text, at)
            at += count
            if ended or not count:
                return at, ended
        return at, False

    def _read_value(self, text: str, at: int) -> int:
        """Return how many characters to skip inside a string or a value; 0: more text is needed."""
        if self._value_end == '"':
            match = _STRING_END.search(text, at)
            if match is None:
                return len(text) - at
            if match[0] == "\\":
                return (
                    match.start() + 2 - at if match.start() + 2 <= len(text) else match.start() - at
                )
            self._value_end = ""
            return match.end() - at
        end = text.find(self._value_end, at)
        if end < 0:
            return _count_certain(text[at:], [self._value_end], final=False)
        end += len(self._value_end)
        self._value_end = ""
        return end - at

    def _read_outside(self, text: str, at: int) -> tuple[int, bool]:
        """Return the length of the next token outside values, and whether it ends the call."""
        if self._close and text.startswith(self._close, at):
            return len(self._close), True
        if self._has_elements:
            end = text.find(self._close, at)
            certain = _count_certain(text[at:], [self._close], final=False)
            return certain if end < 0 else end - at, False
        marks = (
            [self._close, *self._inner_markers, *self._value_ends]
            if not self._depth
            else [self._close]
        )
        if self._depth and self._quote:
            marks.append(self._quote)
        for mark in marks:
            if mark and text.startswith(mark, at):
                self._value_end = self._value_ends.get(mark, "")
                return len(mark), False
            if mark and mark.startswith(text[at:]):
                return 0, False
        return 1, self._read_json_char(text[at])

    def _read_json_char(self, char: str) -> bool:
        """Read one character and return whether the JSON ends with it."""
        if char == '"' and self._depth and self._has_json_strings:
            self._value_end = char
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            return not self._depth and self._closes_with_json
        return False


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


def _count_certain(text: str, marks: Sequence[str], final: bool) -> int:
    """Return how many characters of `text` precede a possible beginning of a marker."""
    if final:
        return len(text)
    sizes = (
        size
        for mark in marks
        for size in range(min(len(mark) - 1, len(text)), 0, -1)
        if text.endswith(mark[:size])
    )
    return len(text) - max(sizes, default=0)
