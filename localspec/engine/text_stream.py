"""From the bytes of tokens to the pieces of an answer that are shown.

No UTF-8 character and no stop string is ever cut, and a completion for an editor ends by llama-server's
two rules about lines.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from localspec.chat.markers import certain_length
from localspec.chat.reader import AnswerReader, PlainReader
from localspec.chat.token_report import find_content
from localspec.protocol.pieces import Piece, Text, content_of, merge_pieces


class Chunk(NamedTuple):
    """Pieces that may be shown, and the characters of the answer that are decided with them.

    chars: of each character, where it ends in bytes, and whether it is content that is shown. begin: the
    number of characters before them.
    """

    pieces: list[Piece]
    chars: list[tuple[int, bool]]
    begin: int = 0

    def cut(self, index: int, count: int) -> Chunk:
        """Return the chunk up to `count` characters of the text that is the piece `index`."""
        text = self.pieces[index]
        assert isinstance(text, Text)
        spans = [(start, min(end, count)) for start, end in text.drafted if start < count]
        last = Text(text.kind, text.text[:count], text.at, spans)
        pieces = [*self.pieces[:index], *([last] if count else [])]
        return Chunk(pieces, self.chars[: text.at + count - self.begin], self.begin)


EMPTY_CHUNK = Chunk([], [])


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
                # Of several at once, each is of one byte: the last one ends a broken character, and of an
                # encoded surrogate both bytes are broken.
                ends += range(end - len(chars) + 1, end + 1)
                text += chars
        return text, ends

    def flush(self) -> tuple[str, list[int]]:
        """Return U+FFFD for an unfinished character at the end of the answer."""
        text = self._decoder.decode(b"", True)
        return text, [self.n_bytes] * len(text)


class TextStream:
    """Turns the bytes of tokens into the pieces that can be shown.

    The bytes of an unfinished character wait for the rest of it, and a `reader` decides what the text is.
    Content that could begin a stop string waits until it is known not to. `stopped` is the stop string
    that was met, if any. Stop strings are searched in the content alone, and none continues across
    anything else.
    """

    def __init__(
        self,
        stops: Sequence[str] = (),
        reader: AnswerReader | PlainReader | None = None,
        *,
        reveals_draft: bool = False,
    ) -> None:
        """Without a reader all text is content. reveals_draft: content has the spans that were drafted."""
        self._stops = tuple(stop for stop in stops if stop)
        self._reader = reader or PlainReader()
        self._reveals_draft = reveals_draft
        self._decoder = Utf8Decoder()
        # Of each character that is not decided: its end in bytes, and whether it was drafted.
        self._ends: list[int] = []
        self._drafted: list[bool] = []
        self._begin = 0  # characters before them
        self._held: Text | None = None  # content whose end may begin a stop string
        self._stopped_at = 0  # characters before the stop string
        self.stopped: str | None = None

    @property
    def may_hide(self) -> bool:
        """Whether the answer may have other text than content."""
        return isinstance(self._reader, AnswerReader)

    def push(self, piece: bytes, drafted: bool = False) -> Chunk:
        """Add the bytes of a token; drafted: it came from a draft."""
        if self.stopped is not None:
            return EMPTY_CHUNK
        text, ends = self._decoder.push(piece)
        self._ends += ends
        self._drafted += [drafted] * len(ends)
        return self._decide(self._reader.feed(text), final=False)

    def flush(self) -> Chunk:
        """Return the text that still waits at the end; an unfinished character becomes U+FFFD."""
        if self.stopped is not None:
            return EMPTY_CHUNK
        text, ends = self._decoder.flush()
        self._ends += ends
        self._drafted += [False] * len(ends)
        return self._decide(self._reader.finish(text), final=True)

    def _decide(self, pieces: list[Piece], *, final: bool) -> Chunk:
        """Return the chunk of what can be shown after the reader has returned `pieces`."""
        shown: list[Piece] = list(self._up_to_stop(pieces)) if self._stops else pieces
        if final and self._held is not None and self.stopped is None:
            shown.append(self._held)
        end = self._begin + len(self._ends) if final else self._reader.decided
        if self.stopped is not None:
            end = self._stopped_at
        elif self._held is not None and not final:
            end = min(end, self._held.at)
        count = max(end - self._begin, 0)
        content = find_content(shown, self._begin, self._begin + count)
        for piece in shown if self._reveals_draft else ():
            if text := content_of(piece):
                start = text.at - self._begin
                text.drafted = list(_runs(self._drafted[start : start + len(text.text)]))
        chunk = Chunk(shown, list(zip(self._ends[:count], content, strict=True)), self._begin)
        del self._ends[:count], self._drafted[:count]
        self._begin += count
        return chunk

    def _up_to_stop(self, pieces: list[Piece]) -> Iterator[Piece]:
        """Yield the pieces before a stop string, without what may begin one."""
        held, self._held = self._held, None
        pieces = merge_pieces(pieces if held is None else [held, *pieces])
        for index, piece in enumerate(pieces):
            text = content_of(piece)
            if text is None:
                yield piece
                continue
            finds = ((text.text.find(stop), len(stop), stop) for stop in self._stops)
            if found := [find for find in finds if find[0] >= 0]:
                count, _, self.stopped = min(found)
                self._stopped_at = text.at + count
            elif index < len(pieces) - 1:  # something else follows, which no stop string spans
                count = len(text.text)
            else:
                count = certain_length(text.text, self._stops)
            if count:
                yield Text("content", text.text[:count], text.at)
            if found:
                return
            if count < len(text.text):
                self._held = Text("content", text.text[count:], text.at + count)


def _runs(marks: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) of each run of True."""
    start = 0
    for mark, run in groupby(marks):
        end = start + len(list(run))
        if mark:
            yield start, end
        start = end


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
