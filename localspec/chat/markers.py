"""Follow the markers around an answer's thoughts, and the heads of messages in channels.

`AnswerMarkers.take` is the one place that knows where thoughts begin and end. A `Place` is all that it
remembers: it is small and never changes, so that what follows drafted tokens can keep several and go back
to any of them. The reader of an answer follows text. The limit of thoughts and the gates of grammars
follow the bytes of tokens, as text with one character for each byte (see `as_bytes`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from localspec.protocol.dialect import REASONING_MARKERS, ThoughtMarkers

# gpt-oss and Muse Glimmer write messages: a head up to _MESSAGE says whom the following text is for. A
# prompt may end with MESSAGE_START and leave the whole head to the model, which then begins with one of
# HEAD_OPENINGS.
CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
MESSAGE_START = f"{_START}assistant"
HEAD_OPENINGS = (CHANNEL, "to=", _MESSAGE)
# A head may also begin within a message that nothing has ended.
_MESSAGE_ENDS = (
    "<|end|>",
    _START,
    "<|eom|>",
    "<|eot|>",
    "<|call|>",
    "<|return|>",
    CHANNEL,
    _MESSAGE,
)
_HEAD_RESTART = re.compile("|".join(map(re.escape, _MESSAGE_ENDS[:6])))
# In the JSON of a call only what is outside of strings ends the message.
_CALL_PARTS = re.compile(r'\\.|["{}[\]]|' + "|".join(map(re.escape, _MESSAGE_ENDS)), re.DOTALL)
_BEHIND_JSON = -1  # as a `depth`
_CHANNEL_NAME = re.compile(r"\s*(\w+)")
_FUNCTION_NAME = re.compile(r"\bto=functions\.([\w.-]+)", re.ASCII)
_ADDRESSEE = re.compile(r"\bto=([\w.-]+)", re.ASCII)
# Kimi K3 writes sections, and its prompts end with the opening of its thoughts or its text. Functionary
# 3.2 says whom a text is for, and its prompts end with the marker of that. Other markers of texts are
# left out.
SECTION_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
_SECTIONS = "<|open|>think<|sep|>", "<|open|>response<|sep|>"
_SECTION_MARKERS = _SECTIONS[1], "<|close|>response<|sep|>", "<|close|>message<|sep|>"
_RECIPIENT = ">>>"
# What a marker begins with that no text has by chance.
_UNMISTAKABLE = re.compile(r"<[|｜]|\]<\]")
# These are control tokens in some vocabularies. The engine has to output their text, because it shows
# where reasoning begins and ends. The token that ends a call also ends the answer, so it is not here.
REASONING_TOKENS = [
    *(mark.removesuffix("thought\n") for pair in REASONING_MARKERS for mark in pair),
    *(CHANNEL, _MESSAGE, _START, "<|end|>", "<|eom|>", "<|constrain|>", *SECTION_TOKENS),
]

# What characters of an answer are: "" for markers, and "end" for what ends or begins a message.
Kind = Literal["", "thoughts", "text", "call", "end"]
Region = Literal["start", "thoughts", "behind", "text", "head", "call"]


class Place(NamedTuple):
    """A place in an answer.

    region: "start" is before all text, and "behind" is behind thoughts, where only blanks were so far.
    close: the marker that ends the thoughts. in_message: whether the end of a message ends the region
    instead. name: the function that a message is for. depth: how deep the place is in the call's JSON; 0 is
    before it. in_string: whether it is inside a string of that.
    """

    region: Region = "start"
    close: str = ""
    in_message: bool = False
    name: str = ""
    depth: int = 0
    in_string: bool = False


Taken = tuple[Kind, int, Place]  # what the next characters are, how many, and the place behind them


class AnswerMarkers:
    """The markers of one answer, which begins at the place `start`.

    begun: the part of a marker with which the prompt ends, and which one of `recipients` completes.
    """

    def __init__(
        self,
        thoughts: Iterable[ThoughtMarkers],
        tail: str = "",
        names: Collection[str] = (),
        *,
        own: Iterable[ThoughtMarkers] = (),
        channels: bool = True,
    ) -> None:
        """Begin behind `tail`, the end of the prompt.

        thoughts: pairs of markers around thoughts. names: the functions that a text may be for. own: which
        pairs are this model's own. channels: whether the answer may consist of messages or of sections.
        """
        self._thoughts, end = [*thoughts], tail.rstrip()
        self._heads: tuple[str, ...] = ()
        self._dropped: tuple[str, ...] = ()
        self._text_opening: tuple[str, ...] = ()  # of a text that ends thoughts
        self.begun = ""
        self.recipients: tuple[str, ...] = ()
        if channels:
            self._heads = HEAD_OPENINGS if end.endswith(MESSAGE_START) else (CHANNEL,)
            if end.endswith(_SECTIONS):
                self._dropped, self._text_opening = _SECTION_MARKERS, _SECTION_MARKERS[:1]
            elif end.endswith(_RECIPIENT):
                self._dropped, self.begun = (f"{_RECIPIENT}all\n",), _RECIPIENT
                self.recipients = ("all\n", *(f"{name}\n" for name in names))
        self._first = (*(marker for pair in self._thoughts for marker in pair), *self._heads)
        # The closing markers, by the opening ones, of thoughts that may also come behind text.
        self._later = {opening: close for opening, close in own if is_unmistakable(opening)}
        self.start = Place()
        for opening, close in reversed(self._thoughts):
            if end.endswith(opening.rstrip()):
                self.start = Place("thoughts", close)

    def take(self, place: Place, text: str, *, final: bool = False, in_call: bool = False) -> Taken:
        """Return what the first characters of `text` are, which is not empty.

        Of 0 characters that is not certain before more text has come. final: no more will come. in_call: they
        are read as a call, whose arguments may contain markers; in a message, as a value in tags.
        """
        if place.region in ("start", "behind"):
            return self._begin(place, text, final)
        if place.region == "head":
            return self._read_head(place, text, final)
        if place.region == "call":
            return self._read_call(place, text, final)
        kind: Kind = "thoughts" if place.region == "thoughts" else "text"
        marks = _MESSAGE_ENDS if place.in_message else self._dropped
        if place.close:
            marks = (place.close, *self._text_opening)
        elif not (in_call or place.in_message):
            marks = (*marks, *self._later, *self._later.values())
        found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if not found:
            return kind, len(text) if final else certain_length(text, marks), place
        at, mark = min(found)
        if at or (in_call and place.in_message):
            return kind, at or len(mark), place
        if place.close:
            return "", len(mark), Place("behind")
        if place.in_message:
            return self._end_message(place, mark, text, final)
        if mark in self._later:
            return "", len(mark), Place("thoughts", self._later[mark])
        return "", len(mark), place

    def follow(self, place: Place, text: str) -> tuple[Place, str]:
        """Return the place behind what is certain of `text`, and the rest, which may begin a marker."""
        while text:
            _, count, following = self.take(place, text)
            if not count:
                break
            place, text = following, text[count:]
        return place, text

    def leave_thoughts(self, place: Place) -> Place:
        """Return the place of text within thoughts that nothing has closed; their end is no text later."""
        self._dropped += (place.close,) if place.close else ()
        return Place("text", in_message=place.in_message)

    def _begin(self, place: Place, text: str, final: bool) -> Taken:
        """Check whether the answer, or what follows its thoughts, begins with a marker."""
        stripped = text.lstrip()
        for opening, close in self._thoughts:
            if stripped.startswith(opening):
                count = len(text) - len(stripped) + len(opening)
                return "", count, Place("thoughts", close)
            if close and stripped.startswith(close):  # of no thoughts at all
                return "", len(text) - len(stripped) + len(close), Place("behind")
        if place.region == "start" and stripped.startswith(self._heads):
            return self._read_head(Place("head"), text, final)
        if not final and any(marker.startswith(stripped) for marker in self._first):
            return "", 0, place
        return self.take(Place("text"), text, final=final)

    def _end_message(self, place: Place, mark: str, text: str, final: bool) -> Taken:
        """Read the marker at which the text of a message ends: that, or the next head, begins here."""
        if mark == _MESSAGE:  # a stray one
            return "", len(mark), place
        if mark in (CHANNEL, _START):
            return self._read_head(place, text, final)
        return "end", len(mark), Place("head")

    def _read_head(self, place: Place, text: str, final: bool) -> Taken:
        """Read the head of a message, which names its channel or its recipient.

        A model may abandon a head and begin another one, and the last channel counts. A recipient may stand
        before it, unless thoughts follow. The final channel is for the user, whatever its recipient.
        """
        at = text.find(_MESSAGE)
        if at < 0:
            return "end", len(text) if final else 0, place
        head = _HEAD_RESTART.split(text[:at])[-1]
        sender, _, channel = head.rpartition(CHANNEL)
        name = match[1] if CHANNEL in head and (match := _CHANNEL_NAME.match(channel)) else ""
        function = _FUNCTION_NAME.search(channel)
        if name != "analysis" or CHANNEL not in sender:
            function = function or _FUNCTION_NAME.search(sender)
        addressee = match[1] if not name and (match := _ADDRESSEE.search(head)) else "user"
        following = Place("text", "", True, "" if addressee == "user" else addressee)
        if function and name != "final":
            following = Place("call", "", True, function[1])
        elif name == "analysis" or addressee == "self":
            following = Place("thoughts", in_message=True)
        return "end", at + len(_MESSAGE), following

    def _read_call(self, place: Place, text: str, final: bool) -> Taken:
        depth, in_string = place.depth, place.in_string
        if not (depth or in_string) and text.lstrip()[:1] not in ("", "<", '"', "{", "["):
            depth = _BEHIND_JSON  # there is none
        for part in _CALL_PARTS.finditer(text):
            if in_string:
                in_string = part[0] != '"'
            elif part[0].startswith("<"):
                if part.start():
                    return "call", part.start(), place._replace(depth=depth, in_string=False)
                return self._end_message(place, part[0], text, final)
            elif part[0] == '"':
                in_string = depth != _BEHIND_JSON
            elif depth != _BEHIND_JSON:
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part[0], 0)
            if not (depth or in_string):
                depth = _BEHIND_JSON
        count = len(text)
        if not final and in_string:
            count -= (count - len(text.rstrip("\\"))) % 2  # what it escapes has not come yet
        elif not final:
            count = certain_length(text, _MESSAGE_ENDS)
        return "call", count, place._replace(depth=depth, in_string=in_string)


def is_unmistakable(marker: str) -> bool:
    """Return whether no text has a marker by chance."""
    return _UNMISTAKABLE.match(marker) is not None


def certain_length(text: str, marks: Iterable[str]) -> int:
    """Return how many characters of `text` precede a possible beginning of a marker at its end."""
    marks = [mark for mark in marks if mark]
    beginnings = {mark[0] for mark in marks}
    longest = max(map(len, marks), default=1)
    for at in range(max(len(text) - longest + 1, 0), len(text)):
        # Few characters begin a marker, and there may be one for each tool.
        if text[at] in beginnings:
            end = text[at:]
            if any(len(mark) > len(end) and mark.startswith(end) for mark in marks):
                return at
    return len(text)


def as_bytes(text: str) -> str:
    """Return a text with one character for each of its bytes."""
    return text.encode("utf-8", "replace").decode("latin-1")
