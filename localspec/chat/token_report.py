"""Decide which tokens of an answer are reported, and which of them are content."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from localspec.chat.reader import AnswerReader, PlainReader
from localspec.protocol.frames import TokenLogprob
from localspec.protocol.pieces import Piece, content_of


class _Scored(NamedTuple):
    """A token of the answer: where its text begins and ends, and its log-probability."""

    begin: int
    end: int
    entry: TokenLogprob


class TokenReport:
    """Decides for which tokens log-probabilities are reported, and with which text.

    Places in the answer are counted in bytes, or in characters where another server does not say more. A
    token is reported once it is certain where its text belongs, if that begins inside the text that is
    shown. It follows that:

    - All tokens of a character that was cut, and became U+FFFD, belong to that character.
    - A token that begins in the text and ends in a stop string is reported. One that begins inside or
      behind the stop string is not.
    - A token without text, such as a silent control token, begins where the text of the next token does.
    - Tokens behind all of the shown text are reported if the answer's limit ended it, else by id only.

    It is content if any of its text is. The rules look at the text alone, so the entries do not depend on
    how many tokens each pass accepted.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Scored] = deque()
        # Of each character from `_n_chars` on: where it ends, and whether it is content.
        self._chars: deque[tuple[int, bool]] = deque()
        # The number of characters that end at or before the beginning of the last reported token.
        self._n_chars = 0
        self._shown = 0  # the place up to which the text is shown

    def add(self, begin: int, end: int, entry: TokenLogprob) -> None:
        """Add a token whose text has these bounds in the answer."""
        self._waiting.append(_Scored(begin, end, entry))

    def show(self, chars: Iterable[tuple[int, bool]]) -> None:
        """Add characters that are decided: where each ends, and whether it is content."""
        self._chars.extend(chars)
        if self._chars:
            self._shown = self._chars[-1][0]

    def take(self, *, final: bool = False, everything: bool = False) -> list[TokenLogprob]:
        """Return the tokens that begin in the text shown so far and were not returned before.

        final: no more text will be shown. everything: return those behind the text as well.
        """
        reported = []
        while self._waiting:
            begin, end, entry = self._waiting[0]
            if begin >= self._shown and not everything:
                break
            while self._chars and self._chars[0][0] <= begin:
                self._chars.popleft()
                self._n_chars += 1
            entry.is_content = is_certain = False
            for char_end, is_content in self._chars:
                entry.is_content = entry.is_content or is_content
                is_certain = entry.is_content or char_end >= end
                if is_certain:
                    break
            if not (is_certain or final):
                break
            entry.offset = self._n_chars
            reported.append(entry)
            self._waiting.popleft()
        if not self._waiting:  # the next tokens begin behind all that is shown
            self._n_chars += len(self._chars)
            self._chars.clear()
        return reported


def find_content(pieces: Iterable[Piece], begin: int, end: int) -> list[bool]:
    """Return which of the characters from `begin` to `end` of an answer are content of these pieces."""
    content = [False] * max(end - begin, 0)
    for piece in pieces:
        if text := content_of(piece):
            start, stop = max(text.at - begin, 0), text.at - begin + len(text.text)
            content[start:stop] = [True] * (stop - start)
    return content


class ScoredText:
    """Reads an answer whose text comes with its tokens, as another server sends it."""

    def __init__(self, reader: AnswerReader | PlainReader) -> None:
        self.reader = reader
        self._report = TokenReport()
        self._n_chars = 0  # characters of the tokens so far
        self._decided = 0

    def feed(
        self, text: str, tokens: Sequence[TokenLogprob] = (), *, final: bool = False
    ) -> tuple[list[Piece], list[TokenLogprob]]:
        """Read more text with its tokens. Return the pieces and the tokens that are certain."""
        for token in tokens:
            begin, self._n_chars = self._n_chars, self._n_chars + len(decode_piece(token.piece))
            self._report.add(begin, self._n_chars, token)
        pieces = self.reader.finish(text) if final else self.reader.feed(text)
        begin, self._decided = self._decided, max(self.reader.decided, self._decided)
        content = find_content(pieces, begin, self._decided)
        self._report.show(enumerate(content, start=begin + 1))
        return pieces, self._report.take(final=final, everything=final)


def decode_piece(piece: bytes) -> str:
    """Return a token's bytes as text; incomplete characters become U+FFFD."""
    return piece.decode("utf-8", "replace")
