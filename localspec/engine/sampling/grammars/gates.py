"""A grammar that holds from a marker on: of a call that the model opens by itself, or of what follows its
thoughts. Before the marker everything may come.

A gate's grammar begins with its marker. While the text ends with a part of one, a token that completes it
may come only if the grammar lets it, with all that it says beyond the marker; so the text behind a gate is
in its language from the first byte, however tokens are cut, and wherever in a run of drafts that is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from llguidance import LLMatcher

from localspec.engine.sampling.grammars.matcher import Mask, WholeMatcher
from localspec.engine.sampling.grammars.numbers import BoundedNumbers, Numerals
from localspec.engine.sampling.grammars.sources import SpecialTokens

_Inner = WholeMatcher | BoundedNumbers


class Pieces:
    """The bytes of every token, found by how they begin. special: tokens that no text is."""

    def __init__(self, pieces: Sequence[bytes], special: SpecialTokens) -> None:
        self._pieces = pieces
        self.special = special
        self._order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self._sorted = [pieces[token] for token in self._order]
        self._tokens = {piece: token for token, piece in enumerate(pieces) if piece}

    def beginning(self, text: bytes) -> Iterator[int]:
        """Tokens that begin with `text`."""
        for at in range(bisect_left(self._sorted, text), len(self._sorted)):
            if not self._sorted[at].startswith(text):
                return
            yield self._order[at]

    def where(self, wanted: Callable[[bytes], bool]) -> list[int]:
        return [token for token, piece in enumerate(self._pieces) if wanted(piece)]

    def spell(self, text: bytes) -> list[int]:
        """Tokens whose bytes these are; a grammar asks for no others."""
        found: list[int] = []
        while text:
            sizes = range(len(text), 0, -1)
            size = next((each for each in sizes if text[:each] in self._tokens), 0)
            if not size:
                break
            found.append(self._tokens[text[:size]])
            text = text[size:]
        return found


@dataclass(frozen=True)
class Gate:
    """marker: what opens it, as bytes. grammar: fresh, from the marker on. wrong: tokens that have the
    whole marker in them, and more than the grammar lets in. last: nothing follows what it lets in.
    """

    marker: bytes
    grammar: LLMatcher
    wrong: Sequence[int] = ()
    last: bool = False


@dataclass(frozen=True)
class Plan:
    """Where grammars hold in an answer.

    thoughts: markers around thoughts at its beginning. first: holds from the beginning of the answer on;
    `may_think` are tokens that open thoughts instead. after: by the closing marker of thoughts, a gate that
    this marker is. gates: where nothing holds before them. bare: holds where the answer begins with one of
    the tokens `braces`. single: the answer ends after what one gate lets in.
    """

    thoughts: Sequence[tuple[bytes, bytes]] = ()
    first: LLMatcher | None = None
    may_think: Sequence[int] = ()
    after: dict[bytes, Gate] = field(default_factory=dict)
    gates: Sequence[Gate] = ()
    bare: LLMatcher | None = None
    braces: Sequence[int] = ()
    single: bool = False


class _State(NamedTuple):
    """held: the end of the text as far as it may be the beginning of a marker.

    first: at the beginning, where a grammar holds unless thoughts are opened. start: there, and none holds.
    answer: after thoughts.
    """

    phase: Literal["first", "start", "thinking", "answer", "free", "inside", "over"]
    held: bytes = b""
    close: bytes = b""
    inner: _Inner | None = None
    last: bool = False


@dataclass(frozen=True)
class Surroundings:
    """What gates need of a vocabulary. piece: a token's bytes as they are in the answer. numerals: where
    the grammars are JSON's, whose numbers are bounded."""

    pieces: Pieces
    piece: Callable[[int], bytes]
    n_vocab: int
    ends: Sequence[int]
    numerals: Numerals | None = None


class GatedMatcher:
    """A Guide: the state of an answer before, behind and between gates."""

    def __init__(self, plan: Plan, around: Surroundings, close: bytes = b"") -> None:
        """close: what ends the thoughts that the prompt has opened."""
        self.narrows = plan.first is not None
        self._plan = plan
        self._around = around
        self._past: list[_State] = []  # before each token
        if close:
            self._state = _State("thinking", close=close)
        elif plan.first is None:
            self._state = _State("start")
        elif plan.may_think:
            self._state = _State("first")
        else:
            self._state = _State("inside", inner=self._fresh(plan.first), last=True)

    def begin_round(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        pass

    def mask(self) -> Mask | None:
        state = self._state
        if state.phase == "first":
            assert self._plan.first is not None
            allowed = self._fresh(self._plan.first).mask().copy()
            allowed[list(self._plan.may_think)] = True
            return allowed
        if state.inner is not None and not state.inner.ended:
            return state.inner.mask()
        if state.inner is not None or state.phase == "over":
            allowed = np.zeros(self._around.n_vocab, dtype=np.bool_)
            allowed[list(self._around.ends)] = True
            return allowed
        forbidden = list(self._forbidden(state))
        if not forbidden:
            return None
        allowed = np.ones(self._around.n_vocab, dtype=np.bool_)
        allowed[forbidden] = False
        return allowed

    def consume(self, token: int) -> None:
        self._past.append(self._state)
        self._state = self._next(self._state, token)

    def take_back(self, count: int) -> None:
        if not count:
            return
        back, self._past = self._past[-count:], self._past[:-count]
        for state in reversed(back):
            if state.inner is not None:
                state.inner.take_back(1)
        self._state = back[0]

    def valid(self, tokens: Sequence[int]) -> int:
        count = 0
        for token in tokens:
            if not self._allows(token):
                break
            self.consume(token)
            count += 1
        self.take_back(count)
        return count

    def forced(self) -> list[int]:
        inner = self._state.inner
        return [] if inner is None or inner.ended else inner.forced()

    # ------------------------------------------------------------------------ what may come

    def _allows(self, token: int) -> bool:
        inner = self._state.inner
        if inner is not None and not inner.ended:
            return inner.valid([token]) == 1
        mask = self.mask()
        return mask is None or bool(mask[token])

    def _forbidden(self, state: _State) -> Iterator[int]:
        """Tokens that complete a marker and go on as its grammar does not."""
        for gate in self._gates(state):
            yield from gate.wrong
            for begun in _overlaps(state.held, gate.marker):
                rest = gate.marker[len(begun) :]
                if completing := list(self._around.pieces.beginning(rest)):
                    allowed = self._entered(gate, begun).mask()
                    yield from (token for token in completing if not allowed[token])
        if self._bare_here(state) is not None:
            assert self._plan.bare is not None
            allowed = self._fresh(self._plan.bare).mask()
            yield from (token for token in self._plan.braces if not allowed[token])

    def _gates(self, state: _State) -> Sequence[Gate]:
        if state.phase == "thinking":
            gate = self._plan.after.get(state.close)
            return [gate] if gate is not None else []
        return self._plan.gates

    def _bare_here(self, state: _State) -> LLMatcher | None:
        begins = state.phase in ("start", "answer") and not state.held
        return self._plan.bare if begins else None

    # ------------------------------------------------------------------------ what comes

    def _fresh(self, grammar: LLMatcher) -> _Inner:
        return self._bounded(WholeMatcher(grammar.deep_copy(), self._around.n_vocab))

    def _bounded(self, matcher: WholeMatcher, begun: bytes = b"") -> _Inner:
        numerals = self._around.numerals
        return matcher if numerals is None else BoundedNumbers(matcher, numerals, begun)

    def _entered(self, gate: Gate, begun: bytes) -> _Inner:
        """The gate's grammar after this beginning of its marker."""
        grammar = gate.grammar.deep_copy()
        if begun:
            grammar.consume_tokens(self._around.pieces.spell(begun))
        return self._bounded(WholeMatcher(grammar, self._around.n_vocab), begun)

    def _next(self, state: _State, token: int) -> _State:
        if state.phase == "over":
            return state
        if state.inner is not None:
            return self._behind(state, state.inner, token)
        piece = self._around.piece(token)
        if state.phase == "first" and token not in self._plan.may_think:
            assert self._plan.first is not None
            inner = self._fresh(self._plan.first)
            return self._behind(_State("inside", inner=inner, last=True), inner, token)
        for gate in self._gates(state):
            for begun in (*_overlaps(state.held, gate.marker), b""):
                if piece.startswith(gate.marker[len(begun) :]):
                    inner = self._entered(gate, begun)
                    return self._behind(_State("inside", inner=inner, last=gate.last), inner, token)
        bare = self._bare_here(state)
        if bare is not None and piece.lstrip().startswith(b"{"):
            inner = self._fresh(bare)
            return self._behind(_State("inside", inner=inner, last=True), inner, token)
        return self._read(state, piece)

    def _behind(self, state: _State, inner: _Inner, token: int) -> _State:
        inner.consume(token)
        if not inner.ended or state.last:
            return state
        return _State("over" if self._plan.single else "free")

    def _read(self, state: _State, piece: bytes) -> _State:
        """More of a text that opens no gate."""
        held = state.held + piece
        if state.phase == "thinking":
            return self._in_thoughts(state.close, held)
        if state.phase in ("first", "start", "answer"):
            text = held.lstrip()
            if not text:
                return state
            for opening, close in self._plan.thoughts if state.phase != "answer" else ():
                if text.startswith(opening):
                    return self._in_thoughts(close, text[len(opening) :])
                if opening.startswith(text):
                    return _State("start", text)
        return self._free(held)

    def _in_thoughts(self, close: bytes, held: bytes) -> _State:
        at = held.find(close)
        if at < 0:
            return _State("thinking", _tail(held, [close]), close)
        rest = held[at + len(close) :].lstrip()
        return self._free(rest) if rest else _State("answer")

    def _free(self, text: bytes) -> _State:
        return _State("free", _tail(text, [gate.marker for gate in self._plan.gates]))


def _overlaps(text: bytes, marker: bytes) -> Iterator[bytes]:
    """The ends of `text` that a marker begins with and is not the whole of, the longest first."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            yield marker[:size]


def _tail(text: bytes, marks: Sequence[bytes]) -> bytes:
    """The longest end of `text` that one of the markers may begin with."""
    found = (next(_overlaps(text, mark), b"") for mark in marks)
    return max(found, key=len, default=b"")
