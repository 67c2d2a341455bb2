"""From the bytes of tokens to the text that is shown.

No UTF-8 character and no stop string is ever cut, and a completion for an editor ends by llama-server's two
rules about lines.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localspec.chat.visibility import HIDDEN, VISIBLE, VisibilityParser
from localspec.protocol.frames import TokenLogprob


class Chunk(NamedTuple):
    """Text that may be shown, and the (start, end) spans of it that came from the draft.

    `ends` has one number per character of `text`: the offset in bytes, within the answer, at which it ends.
    """

    text: str
    drafted: list[tuple[int, int]]
    ends: list[int]

    def cut(self, count: int) -> Chunk:
        """Return the first `count` characters."""
        spans = [(start, min(end, count)) for start, end in self.drafted if start < count]
        return Chunk(self.text[:count], spans, self.ends[:count])


EMPTY_CHUNK = Chunk("", [], [])


class Utf8Decoder:
    """Decodes UTF-8 that arrives in pieces, and reports the byte offset at which each character ends.

    An unfinished character waits for its remaining bytes. Invalid bytes become U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.n_bytes = 0  # bytes decoded so far, including those of an unfinished character

    def push(self, piece: bytes) -> tuple[str, list[int]]:
        """Return the characters that `piece` completes, and the byte offset at which each ends."""
        text, ends = "", list[int]()
        for value in piece:
            chars = self._decoder.decode(bytes([value]))
            self.n_bytes += 1
            if chars:
                end = self.n_bytes - len(self._decoder.getstate()[0])
                # Two characters at once: the second is this one byte, which ends a broken character.
                ends += [end] if len(chars) == 1 else [end - 1, end]
                text += chars
        return text, ends

    def flush(self) -> tuple[str, list[int]]:
        """Return U+FFFD for an unfinished character at the end of the answer."""
        text = self._decoder.decode(b"", True)
        return text, [self.n_bytes] * len(text)


class TextStream:
    """Collects the pieces of tokens; `push` returns the text that can be shown.

    The bytes of an unfinished character wait for the rest of it. Text that could begin a stop string waits
    until it is known not to. `stopped` is the stop string that was met, if any. Stop strings are searched
    in visible text only (see `VisibilityParser`), and none continues across a hidden region.
    """

    def __init__(self, stops: Sequence[str] = (), regions: VisibilityParser | None = None) -> None:
        """Without `regions` all text is visible."""
        self._stops = tuple(stop for stop in stops if stop)
        self._regions = regions if self._stops else None
        self._decoder = Utf8Decoder()
        # The text that waits. For each of its characters: "d" if drafted or "t" if the target's own, its
        # end in bytes, and, as far as that is known, whether it is visible.
        self._text = self._marks = self._kinds = ""
        self._ends: list[int] = []
        self.stopped: str | None = None

    def push(self, piece: bytes, drafted: bool = False) -> Chunk:
        if self.stopped is not None:
            return EMPTY_CHUNK
        text, ends = self._decoder.push(piece)
        self._append(text, ends, "d" if drafted else "t")
        self._kinds += self._regions.feed(text) if self._regions else VISIBLE * len(text)
        return self._take_chunk(self._count_showable())

    def flush(self) -> Chunk:
        """Return the text that still waits at the end; an unfinished character becomes U+FFFD."""
        if self.stopped is not None:
            return EMPTY_CHUNK
        text, ends = self._decoder.flush()
        self._append(text, ends, "t")
        self._kinds += self._regions.finish(text) if self._regions else VISIBLE * len(text)
        self._count_showable()  # the last character may complete a stop string
        return self._take_chunk(len(self._text))

    def _append(self, text: str, ends: list[int], mark: str) -> None:
        self._text += text
        self._marks += mark * len(text)
        self._ends += ends

    def _count_showable(self) -> int:
        """Return how many characters can be shown, after cutting the text at the first stop string."""
        known = len(self._kinds)
        if not self._stops:
            return known
        first_stop: tuple[int, int, str] | None = None
        for start, end in _runs(self._kinds, VISIBLE):
            for stop in self._stops:
                at = self._text.find(stop, start, end)
                if at >= 0 and (first_stop is None or (at, len(stop)) < first_stop[:2]):
                    first_stop = (at, len(stop), stop)
            if first_stop is not None:
                self.stopped = first_stop[2]
                self._text = self._text[: first_stop[0]]
                return first_stop[0]
        visible_start = self._kinds.rfind(HIDDEN) + 1
        return known - self._longest_stop_prefix(self._text[visible_start:known])

    def _longest_stop_prefix(self, text: str) -> int:
        """Return the length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _take_chunk(self, count: int) -> Chunk:
        text, self._text = self._text[:count], self._text[count:]
        marks, self._marks = self._marks[:count], self._marks[count:]
        ends, self._ends = self._ends[:count], self._ends[count:]
        self._kinds = self._kinds[count:]
        return Chunk(text, list(_runs(marks, "d")), ends)


def _runs(marks: str, mark: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each run of `mark`."""
    start = marks.find(mark)
    while start >= 0:
        end = start
        while end < len(marks) and marks[end] == mark:
            end += 1
        yield start, end
        start = marks.find(mark, end)


@dataclass(slots=True)
class _Scored:
    """A token of the answer: where its bytes begin, and its log-probability."""

    begin: int
    entry: TokenLogprob


class TokenReport:
    """Decides for which tokens log-probabilities are reported, and with which text.

    A token is reported if its bytes begin inside the text that is shown. It follows that:

    - All tokens of a character that was cut, and became U+FFFD, belong to that character.
    - A token that begins in the text and ends in a stop string is reported. One that begins inside or
      behind the stop string is not.
    - A token without bytes, such as a silent control token, begins where the bytes of the next token do.
    - Tokens behind all of the shown text are reported if the answer's limit ended it, else by id only.

    The rule looks at bytes alone, so the entries do not depend on how many tokens each pass accepted.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Scored] = deque()
        # The end in bytes of each shown character from character `_n_chars` on.
        self._chars: deque[int] = deque()
        # The number of shown characters that end at or before the beginning of the last reported token.
        self._n_chars = 0
        self._shown = 0  # bytes whose text is shown

    def add(self, begin: int, entry: TokenLogprob) -> None:
        """Add a token whose first byte is the answer's byte `begin`."""
        self._waiting.append(_Scored(begin, entry))

    def show(self, ends: Sequence[int]) -> None:
        """Add shown characters, which end at these byte offsets."""
        if ends:
            self._chars.extend(ends)
            self._shown = ends[-1]

    def take(self, *, everything: bool = False) -> list[TokenLogprob]:
        """Return the tokens that begin in the text shown so far and were not returned before.

        everything: those behind the text as well.
        """
        reported = []
        while self._waiting and (everything or self._waiting[0].begin < self._shown):
            scored = self._waiting.popleft()
            while self._chars and self._chars[0] <= scored.begin:
                self._chars.popleft()
                self._n_chars += 1
            scored.entry.offset = self._n_chars
            reported.append(scored.entry)
        if not self._waiting:  # the next tokens begin behind all that is shown
            self._n_chars += len(self._chars)
            self._chars.clear()
        return reported


class LineRules:
    """Ends an answer at a line that is indented too little, or at a newline after its time is over.

    indent: each line after the first must begin with this many blanks; an empty line has none.
    max_ms: the answer ends at the first newline after this time. The line that is being written is always
    finished, because half a line is of no use.
    """

    def __init__(self, indent: int | None, max_ms: int | None) -> None:
        self._indent = indent or 0
        self._max_ms = max_ms or 0
        self._blanks: int | None = (
            None  # blanks at the beginning of the line so far; None: inside it
        )

    @property
    def active(self) -> bool:
        return self._indent > 0 or self._max_ms > 0

    def cut(self, text: str, spent_ms: float) -> int | None:
        """Return where in `text`, the newest piece, the answer ends; None if it goes on."""
        is_over_time = self._max_ms > 0 and spent_ms > self._max_ms
        for position, char in enumerate(text):
            if self._blanks is not None and char not in " \t":
                if self._blanks < self._indent:
                    return position
                self._blanks = None
            if char == "\n":
                if is_over_time:
                    return position + 1
                self._blanks = 0
            elif self._blanks is not None:
                self._blanks += 1
        return None
