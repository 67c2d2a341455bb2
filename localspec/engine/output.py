"""From tokens' bytes to the text that is shown: no UTF-8 character and no stop string is ever cut, and
a completion for an editor ends by llama-server's two rules about lines.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localspec.protocol.frames import TokenLogprob
from localspec.protocol.visibility import HIDDEN, VISIBLE, Regions


class Chunk(NamedTuple):
    """Text that may be shown, and the (start, end) spans of it that came from the draft.

    `ends` has one number per character of `text`: how many bytes of the answer end with it.
    """

    text: str
    drafted: list[tuple[int, int]]
    ends: list[int]

    def cut(self, count: int) -> Chunk:
        """Return the first `count` characters."""
        spans = [(start, min(end, count)) for start, end in self.drafted if start < count]
        return Chunk(self.text[:count], spans, self.ends[:count])


NOTHING = Chunk("", [], [])


class Decoder:
    """Decodes UTF-8 that arrives in pieces, and tells the bytes at which each character ends.

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
                last = self.n_bytes - len(self._decoder.getstate()[0])
                # Two characters at once: the second is this one byte, which ends a broken character.
                ends += [last] if len(chars) == 1 else [last - 1, last]
                text += chars
        return text, ends

    def flush(self) -> tuple[str, list[int]]:
        """Return U+FFFD for an unfinished character at the end of the answer."""
        text = self._decoder.decode(b"", True)
        return text, [self.n_bytes] * len(text)


class TextStream:
    """Collects pieces of tokens; `push` returns what can be shown so far.

    Bytes of an unfinished character wait for the rest of it; text that could be the beginning of a
    stop string waits until it is known not to be. `stopped` holds the stop string that was met.
    Stop strings are looked for in visible text only; see `Regions`. A stop string does not continue
    across a hidden region.
    """

    def __init__(self, stops: Sequence[str] = (), regions: Regions | None = None) -> None:
        """Without `regions` all text is visible."""
        self._stops = tuple(stop for stop in stops if stop)
        self._regions = regions if self._stops else None
        self._decoder = Decoder()
        # The text that waits, and of each character: "d" drafted or "t" the target's own, its end in
        # bytes, and as far as it is known whether it is visible.
        self._text = self._marks = self._kinds = ""
        self._ends: list[int] = []
        self.stopped: str | None = None

    def push(self, piece: bytes, drafted: bool = False) -> Chunk:
        if self.stopped is not None:
            return NOTHING
        text, ends = self._decoder.push(piece)
        self._add(text, ends, "d" if drafted else "t")
        self._kinds += self._regions.feed(text) if self._regions else VISIBLE * len(text)
        return self._take(self._ready())

    def flush(self) -> Chunk:
        """What is left at the end; half a character becomes U+FFFD."""
        if self.stopped is not None:
            return NOTHING
        text, ends = self._decoder.flush()
        self._add(text, ends, "t")
        self._kinds += self._regions.finish(text) if self._regions else VISIBLE * len(text)
        self._ready()  # the last character may complete a stop string
        return self._take(len(self._text))

    def _add(self, text: str, ends: list[int], mark: str) -> None:
        self._text += text
        self._marks += mark * len(text)
        self._ends += ends

    def _ready(self) -> int:
        """How many characters can be shown; cuts the text at the first stop string."""
        known = len(self._kinds)
        if not self._stops:
            return known
        first: tuple[int, int, str] | None = None
        for start, end in _runs(self._kinds, VISIBLE):
            for stop in self._stops:
                at = self._text.find(stop, start, end)
                if at >= 0 and (first is None or (at, len(stop)) < first[:2]):
                    first = (at, len(stop), stop)
            if first is not None:
                self.stopped = first[2]
                self._text = self._text[: first[0]]
                return first[0]
        last = self._kinds.rfind(HIDDEN) + 1
        return known - self._held(self._text[last:known])

    def _held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _take(self, count: int) -> Chunk:
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
    """Decides of which tokens log-probabilities are reported, and with which text.

    The rule: a token is reported if its bytes begin inside the text that is shown. So all tokens of a
    character that was cut, and became U+FFFD, belong to that character, and a token that begins in the
    text and ends in a stop string is reported, but none that begins in or behind the stop string. A
    token without bytes, such as a silent control token, begins where the next token's bytes do.
    Tokens without any shown text behind their beginning are reported by id only, those that end an
    answer among them. With `all_tokens` those at the end of an answer that nothing has cut are
    reported, too: an evaluation that scores its prompt counts on an entry for each token.

    The rule looks at bytes alone, so that the entries are the same however many tokens a pass accepted.
    """

    def __init__(self, *, all_tokens: bool = False) -> None:
        self._all = all_tokens
        self._waiting: deque[_Scored] = deque()
        self._chars: deque[int] = (
            deque()
        )  # the end in bytes of each shown character from `_n_chars` on
        self._n_chars = (
            0  # shown characters that end at or before the last reported token's beginning
        )
        self._shown = 0  # bytes whose text is shown

    def add(self, begin: int, entry: TokenLogprob) -> None:
        """Add a token whose first byte is the answer's byte `begin`."""
        self._waiting.append(_Scored(begin, entry))

    def show(self, ends: Sequence[int]) -> None:
        """More text is shown, whose characters end at these bytes."""
        if ends:
            self._chars.extend(ends)
            self._shown = ends[-1]

    def take(self, *, complete: bool = False) -> list[TokenLogprob]:
        """Return the tokens that begin in the text shown so far and were not returned before.

        complete: the answer is over, and nothing of its text was cut off.
        """
        found = []
        rest = self._all and complete
        while self._waiting and (rest or self._waiting[0].begin < self._shown):
            scored = self._waiting.popleft()
            while self._chars and self._chars[0] <= scored.begin:
                self._chars.popleft()
                self._n_chars += 1
            scored.entry.offset = self._n_chars
            found.append(scored.entry)
        if not self._waiting:  # the tokens to come begin behind all that is shown
            self._n_chars += len(self._chars)
            self._chars.clear()
        return found


class LineRules:
    """Ends an answer at a line that is indented too little, or at a newline after its time is over.

    indent: each line after the first must begin with so many blanks (an empty line has none).
    max_ms: once this time is over, the next newline is the end; the line that is being written is
    always finished, because half a line is of no use.
    """

    def __init__(self, indent: int | None, max_ms: int | None) -> None:
        self._indent = indent or 0
        self._max_ms = max_ms or 0
        self._blanks: int | None = None  # blanks so far at the beginning of a line; None: inside it

    @property
    def active(self) -> bool:
        return self._indent > 0 or self._max_ms > 0

    def cut(self, text: str, spent_ms: float) -> int | None:
        """Where in `text`, the newest piece, the answer ends; None: it goes on."""
        late = self._max_ms > 0 and spent_ms > self._max_ms
        for at, char in enumerate(text):
            if self._blanks is not None and char not in " \t":
                if self._blanks < self._indent:
                    return at
                self._blanks = None
            if char == "\n":
                if late:
                    return at + 1
                self._blanks = 0
            elif self._blanks is not None:
                self._blanks += 1
        return None
