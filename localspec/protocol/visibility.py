"""Which parts of an answer's text its reader sees as text, and which are thoughts, calls or markers.

Stop strings hold in visible text only. The daemon takes an answer apart for its clients
(daemon/completion/reply); here the same text is followed only as far as that distinction needs, while
it is written and whatever the pieces are in which it comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from localspec.protocol.calls import ID, CallFormat

VISIBLE, HIDDEN = "v", "h"

# gpt-oss's messages in channels: a head that says for whom the text is, up to _MESSAGE, then the text.
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_CHANNEL_ENDS = ("<|end|>", "<|start|>")
_NOT_SHOWN = re.compile(r"<\|channel\|>\s*analysis\b|\bto=functions\.")
_BETWEEN_CALLS = "; \n\t"  # what may stand between two calls of a format without markers

# A block that may be a call has one of these words behind its fence.
_FENCE = "```"
_FENCE_HEAD = re.compile(r"```[ \t]*(\w*)\s*", re.ASCII)
_CALL_INFO = ("json", "tool_call", "tool_calls", "")
_GEMMA_QUOTE = '<|"|>'
_TAGGED_PARAMETER = ("<parameter=", "</parameter>")
# How a call without a marker begins, blanks aside: with its name, after its type at most.
_HEADS = ('{"name":"', '{"type":"function","name":"')
_NAME = re.compile(r'((?:[^"\\]|\\.)*)"', re.DOTALL)
_STRING_END = re.compile(r'["\\]')


class Regions:
    """Follows one answer and classifies each of its characters as visible or hidden.

    A character is classified as soon as that is certain: what may be the beginning of a marker waits,
    and so do blanks that a marker may make invisible. Characters are classified in their order.
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
        """thoughts: markers around them, none where they are part of the text. tail: the last characters
        of the prompt, which may have opened them. form, tools: how calls are written, and of which tools.
        plain_calls: JSON that names a tool is a call, in a fenced block or as a whole answer.
        """
        self._plain_calls = plain_calls
        self._in_code = False  # within a fenced block that is text
        self._thoughts = thoughts
        self._form = form or CallFormat("json")
        self._tools = tools
        self._held = ""  # not classified yet
        self._kinds = ""  # of what was classified in this step
        self._step: Callable[[bool], bool] = self._start
        self._closing = ""  # of the thoughts
        self._hides_blanks = False  # until other text comes
        self._call = _CallEnd(self._form)  # the one that is being read
        self._has_calls = False
        end = tail.rstrip()
        for opening, closing in thoughts:
            if end.endswith(opening.rstrip()):
                self._think(closing)
                break

    def feed(self, text: str) -> str:
        """Return the kinds of the characters that are certain after more text, one letter for each."""
        return self._run(text, final=False)

    def finish(self, text: str = "") -> str:
        """Return the kinds of all that was left, at the end of the answer."""
        return self._run(text, final=True)

    def _run(self, text: str, *, final: bool) -> str:
        self._held += text
        self._kinds = ""
        while self._step(final):
            pass
        kinds, self._kinds = self._kinds, ""
        return kinds

    def _take(self, count: int, kind: str) -> None:
        self._held, self._kinds = self._held[count:], self._kinds + kind * count

    # ------------------------------------------------------------------------ the beginning, thoughts

    def _start(self, final: bool) -> bool:
        """Does the answer, or what follows its thoughts, begin with a marker?"""
        text = self._held.lstrip()
        lead = len(self._held) - len(text)
        for opening, closing in self._thoughts:
            if text.startswith(opening):
                self._take(lead + len(opening), HIDDEN)
                self._think(closing)
                return True
        openings = [opening for opening, _ in self._thoughts]
        if openings:
            openings.append(_CHANNEL)
            if text.startswith(_CHANNEL):
                self._take(lead, HIDDEN)
                self._step = self._channel_head
                return True
        if not final and (not text or any(opening.startswith(text) for opening in openings)):
            return False
        if self._form.bare and text.startswith("{"):
            return self._bare(lead, final)
        if self._plain_calls and text.startswith("{"):
            return self._plain(lead, lead, final, self._hidden_to_the_end)
        self._step = self._content
        return True

    def _think(self, closing: str) -> None:
        self._thoughts, self._closing = (), closing
        self._hides_blanks = True
        self._step = self._thinking

    def _thinking(self, final: bool) -> bool:
        if self._hide_until([self._closing], final):
            self._take(len(self._closing), HIDDEN)
            self._step = self._start
            return True
        return False

    def _hide_until(self, marks: Sequence[str], final: bool) -> bool:
        """Hide the text before the first of `marks`. False: none has come."""
        found = [at for mark in marks if (at := self._held.find(mark)) >= 0]
        self._take(min(found) if found else _certain(self._held, marks, final), HIDDEN)
        return bool(found)

    # ------------------------------------------------------------------------ channels

    def _channel_head(self, final: bool) -> bool:
        at = self._held.find(_MESSAGE)
        if at < 0:
            if final:
                self._take(len(self._held), HIDDEN)
            return False
        hidden = _NOT_SHOWN.search(self._held[:at])
        self._take(at + len(_MESSAGE), HIDDEN)
        self._hides_blanks = True
        self._step = self._channel_hidden if hidden else self._channel_text
        return True

    def _channel_hidden(self, final: bool) -> bool:
        if self._hide_until(_CHANNEL_ENDS, final):
            self._step = self._channel_head
            return True
        return False

    def _channel_text(self, final: bool) -> bool:
        found = [at for mark in _CHANNEL_ENDS if (at := self._held.find(mark)) >= 0]
        end = min(found) if found else _certain(self._held, _CHANNEL_ENDS, final)
        self._show(end)
        if found:
            self._step = self._channel_head
        return bool(found)

    # ------------------------------------------------------------------------ text

    def _show(self, count: int) -> None:
        """Show so many characters; blanks that follow thoughts or a call are dropped."""
        if self._hides_blanks:
            text = self._held[:count]
            blanks = len(text) - len(text.lstrip())
            self._take(blanks, HIDDEN)
            count -= blanks
            self._hides_blanks = not count
        self._take(count, VISIBLE)

    def _content(self, final: bool) -> bool:
        openings = self._form.opens
        found = [(at, -len(mark)) for mark in openings if (at := self._held.find(mark)) >= 0]
        fence = self._held.find(_FENCE) if self._plain_calls else -1
        if fence >= 0 and (not found or fence < min(found)[0]):
            self._show(len(self._held[:fence].rstrip()))
            self._step = self._fenced
            return True
        if self._plain_calls:
            openings = (*openings, _FENCE)
        if found:
            at, size = min(found)
            shown = len(self._held[:at].rstrip())
            self._show(shown)
            self._take(at - shown - size, HIDDEN)
            self._begin_call()
            return True
        # At the end, too, a marker that has begun is no text behind a call.
        end = _certain(self._held, openings, final and not self._has_calls)
        # Blanks before a call are not shown, nor are those at the end of an answer that has calls.
        if (openings and not final) or (self._has_calls and not self._held.strip()):
            end = len(self._held[:end].rstrip())
        self._show(end)
        if final:
            self._take(len(self._held), HIDDEN)
        return False

    # ------------------------------------------------------------------------ plain calls

    def _fenced(self, final: bool) -> bool:
        """At a fence, blanks before it: of a block that may be a call, or of one that is text."""
        found = _FENCE_HEAD.search(self._held)
        assert found is not None
        end = found.end()
        if not self._in_code and found[1].lower() in _CALL_INFO:
            if end == len(self._held) and not final:
                return False
            if self._held.startswith("{", end):
                return self._plain(found.start() + len(_FENCE), end, final, self._fenced_call)
        elif not self._in_code and end == len(self._held) and not final:
            return False  # the word may go on
        return self._fence_is_text(found.start() + len(_FENCE))

    def _fence_is_text(self, count: int) -> bool:
        self._in_code = not self._in_code
        self._show(count)
        self._step = self._content
        return True

    def _plain(self, head: int, at: int, final: bool, call: Callable[[bool], bool]) -> bool:
        """JSON at `at` is a call if it names a tool, and text otherwise, of which `head` is shown at once."""
        name = _called_name(self._held[at:])
        if name is None and not final:
            return False
        if name in self._tools:
            self._take(at, HIDDEN)
            self._has_calls, self._step = True, call
            return True
        if call == self._fenced_call:
            return self._fence_is_text(head)
        self._take(head, HIDDEN)
        self._step = self._content
        return True

    def _fenced_call(self, final: bool) -> bool:
        if self._hide_until([_FENCE], final):
            self._take(len(_FENCE), HIDDEN)
            self._hides_blanks = True
            self._step = self._content
            return True
        return False

    def _hidden_to_the_end(self, final: bool) -> bool:
        self._take(len(self._held), HIDDEN)
        return False

    # ------------------------------------------------------------------------ calls

    def _bare(self, lead: int, final: bool) -> bool:
        """An answer that begins with JSON is a call if it names a tool."""
        name = _called_name(self._held[lead:])
        if name is None and not final:
            return False
        self._take(lead, HIDDEN)
        self._step = self._content
        if name in self._tools:
            self._begin_call()
        return True

    def _begin_call(self) -> None:
        self._call, self._has_calls = _CallEnd(self._form), True
        self._step = self._in_call

    def _in_call(self, final: bool) -> bool:
        count, over = self._call.feed(self._held)
        self._take(len(self._held) if final and not over else count, HIDDEN)
        if over:
            self._hides_blanks = True
            self._step = self._between if self._form.bare else self._content
        return over

    def _between(self, final: bool) -> bool:
        """After a call of a format without markers: another one, or text."""
        text = self._held.lstrip(_BETWEEN_CALLS)
        if text.startswith("{"):
            return self._bare(len(self._held) - len(text), final)
        if text or final:
            self._step = self._content
        return bool(text) or final


class _CallEnd:
    """Finds where a call ends: at its closing marker, or without one at the end of its JSON.

    What stands in a string or in a value of its arguments ends nothing.
    """

    def __init__(self, form: CallFormat) -> None:
        words = form.close.split(ID)[-1].split()
        self._close = words[-1] if words else ""
        # A notation that was found from a template may go on with another call in any way.
        self._ends_with_json = not self._close and form.kind != "found"
        parameter = form.parameter or _TAGGED_PARAMETER
        values = {_GEMMA_QUOTE: _GEMMA_QUOTE, parameter[0].strip(): parameter[-1].strip()}
        self._values = {begin: end for begin, end in values.items() if begin and end}
        self._names = [mark for mark in (form.middle, form.identity) if mark]
        self._depth = 0  # of the JSON
        self._until = ""  # what ends the string or the value that is being read

    def feed(self, text: str) -> tuple[int, bool]:
        """Read on. Returns how many characters of `text` are certainly the call's, and whether it ends
        with the last of them; the others are to come again, with more behind them.
        """
        at = 0
        while at < len(text):
            if self._until:
                count, over = self._within(text, at), False
            else:
                count, over = self._next(text, at)
            at += count
            if over or not count:
                return at, over
        return at, False

    def _within(self, text: str, at: int) -> int:
        """Read on in a string or a value; 0: more is needed."""
        if self._until == '"':
            found = _STRING_END.search(text, at)
            if found is None:
                return len(text) - at
            if found[0] == "\\":
                return (
                    found.start() + 2 - at if found.start() + 2 <= len(text) else found.start() - at
                )
            self._until = ""
            return found.end() - at
        end = text.find(self._until, at)
        if end < 0:
            return _certain(text[at:], [self._until], final=False)
        end += len(self._until)
        self._until = ""
        return end - at

    def _next(self, text: str, at: int) -> tuple[int, bool]:
        """Read what comes next outside of strings and values, and whether the call ends with it."""
        if self._close and text.startswith(self._close, at):
            return len(self._close), True
        marks = [self._close, *self._names, *self._values] if not self._depth else [self._close]
        if self._depth and _GEMMA_QUOTE in self._values:
            marks.append(_GEMMA_QUOTE)
        for mark in marks:
            if mark and text.startswith(mark, at):
                self._until = self._values.get(mark, "")
                return len(mark), False
            if mark and mark.startswith(text[at:]):
                return 0, False
        return 1, self._in_json(text[at])

    def _in_json(self, char: str) -> bool:
        """Read one character; does the JSON end with it?"""
        if char == '"' and self._depth:
            self._until = char
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            return not self._depth and self._ends_with_json
        return False


def _called_name(text: str) -> str | None:
    """Return the name in a call that begins with `text`; "" if none does, None if more must come."""
    waits = False
    for head in _HEADS:
        at = 0
        for place, char in enumerate(text):
            if at == len(head):
                name = _NAME.match(text, place)
                return name[1] if name else None
            if char == head[at]:
                at += 1
            elif not char.isspace():
                break
        else:
            waits = True
    return None if waits else ""


def _certain(text: str, marks: Sequence[str], final: bool) -> int:
    """Return how many characters of `text` come before what may begin a marker."""
    if final:
        return len(text)
    sizes = (
        size
        for mark in marks
        for size in range(min(len(mark) - 1, len(text)), 0, -1)
        if text.endswith(mark[:size])
    )
    return len(text) - max(sizes, default=0)
