"""A guide that applies grammars from a marker on, and allows any text before it.

Examples are tool calls that the model opens by itself, and an answer that follows the model's thoughts. A
gate is a marker with a grammar, which begins with the marker. While the text ends with part of a marker,
a token that completes the marker is allowed only if the grammar also accepts the token's bytes after the
marker. The text after a gate therefore follows the grammar from its first byte, however it is tokenized,
and also within a run of draft tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from localspec.chat.markers import AnswerMarkers, Place
from localspec.engine.sampling.grammars.matcher import BoundedNumbers, Mask, Numerals, WholeMatcher
from localspec.engine.sampling.grammars.sources import GrammarTokens
from localspec.engine.sampling.guide import Guide

_Inner = WholeMatcher | BoundedNumbers


class PieceIndex:
    """An index of tokens by their bytes. `special` are the vocabulary's special tokens."""

    def __init__(self, pieces: Sequence[bytes], special: GrammarTokens) -> None:
        self._pieces = pieces
        self.special = special
        self._order = sorted(range(len(pieces)), key=pieces.__getitem__)
        self._sorted = [pieces[token] for token in self._order]
        self._tokens = {piece: token for token, piece in enumerate(pieces) if piece}

    def beginning(self, text: bytes) -> Iterator[int]:
        """Yield the tokens that begin with `text`."""
        for index in range(bisect_left(self._sorted, text), len(self._sorted)):
            if not self._sorted[index].startswith(text):
                return
            yield self._order[index]

    def where(self, predicate: Callable[[bytes], bool]) -> list[int]:
        """Return the tokens whose bytes satisfy `predicate`."""
        return [token for token, piece in enumerate(self._pieces) if predicate(piece)]

    def spell(self, text: bytes) -> list[int]:
        """Return tokens whose bytes make up `text`, longest first; the rest is cut if there are none.

        A grammar accepts any tokenization of its text, so this need not be the model's.
        """
        tokens: list[int] = []
        while text:
            sizes = range(len(text), 0, -1)
            size = next((n for n in sizes if text[:n] in self._tokens), 0)
            if not size:
                break
            tokens.append(self._tokens[text[:size]])
            text = text[size:]
        return tokens


@dataclass(frozen=True)
class Gate:
    """A marker and the grammar that applies from it on.

    marker: the bytes that open the gate. grammar: in its initial state, before the marker. wrong: tokens
    that contain the whole marker but do not fit the grammar. last: whether the answer ends with the
    grammar.
    """

    marker: bytes
    grammar: LLMatcher
    wrong: Sequence[int] = ()
    last: bool = False


@dataclass(frozen=True)
class GatePlan:
    """Where grammars apply in an answer.

    thoughts: pairs of opening and closing markers of thoughts at the beginning of the answer.
    first: the grammar that applies from the beginning of the answer on.
    may_think: tokens that may open thoughts instead of `first`.
    after: for each closing marker of thoughts, the gate that it opens.
    gates: gates that may be opened anywhere in free text.
    bare: the grammar that applies if the answer begins with one of the tokens `braces`.
    single: whether the answer ends after one gate.
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
    """The state between two tokens.

    place: where the text is, as long as no grammar applies; None if the answer is over. held: the end of
    the text that may be the beginning of a marker. is_first: the answer begins here with a grammar,
    unless thoughts are opened. inner: the matcher of the grammar that applies. last: whether the answer
    ends with it.
    """

    place: Place | None
    held: bytes = b""
    is_first: bool = False
    inner: _Inner | None = None
    last: bool = False


@dataclass(frozen=True)
class Surroundings:
    """The parts of a vocabulary that gates need.

    piece: returns a token's bytes as they are in the answer. numerals: set if the grammars describe JSON,
    whose numbers are then bounded.
    """

    pieces: PieceIndex
    piece: Callable[[int], bytes]
    n_vocab: int
    ends: Sequence[int]
    numerals: Numerals | None = None


class GatedMatcher(Guide):
    """A guide that applies the grammars of a plan from their markers on."""

    def __init__(
        self, plan: GatePlan, surroundings: Surroundings, close: bytes = b"", tail: bytes = b""
    ) -> None:
        """Begin an answer.

        close: the marker that ends thoughts which the prompt has opened. tail: the end of the prompt,
        which may be the beginning of a gate's marker.
        """
        self.forbids_often = plan.first is not None
        self._plan = plan
        self._surroundings = surroundings
        self._earlier_states: list[_State] = []  # The state before each consumed token.
        pairs = [
            (opening.decode("latin-1"), end.decode("latin-1")) for opening, end in plan.thoughts
        ]
        self._markers = AnswerMarkers(pairs, channels=False)
        if close:
            self._state = _State(Place("thoughts", close.decode("latin-1")))
        elif plan.first is None:
            self._state = _State(Place(), _tail(tail, [gate.marker for gate in plan.gates]))
        elif plan.may_think:
            self._state = _State(Place(), is_first=True)
        else:
            self._state = _State(Place(), inner=self._start_grammar(plan.first), last=True)

    def mask(self) -> Mask | None:
        state = self._state
        if state.is_first:
            assert self._plan.first is not None
            allowed = self._start_grammar(self._plan.first).mask().copy()
            allowed[list(self._plan.may_think)] = True
            return allowed
        if state.inner is not None and not state.inner.ended:
            return state.inner.mask()
        if state.inner is not None or state.place is None:
            allowed = np.zeros(self._surroundings.n_vocab, dtype=np.bool_)
            allowed[list(self._surroundings.ends)] = True
            return allowed
        forbidden = list(self._forbidden(state))
        if not forbidden:
            return None
        allowed = np.ones(self._surroundings.n_vocab, dtype=np.bool_)
        allowed[forbidden] = False
        return allowed

    def consume(self, token: int) -> None:
        self._earlier_states.append(self._state)
        self._state = self._next(self._state, token)

    def take_back(self, count: int) -> None:
        if not count:
            return
        undone = self._earlier_states[-count:]
        self._earlier_states = self._earlier_states[:-count]
        for state in reversed(undone):
            if state.inner is not None:
                state.inner.take_back(1)
        self._state = undone[0]

    def count_valid(self, tokens: Sequence[int]) -> int:
        count = 0
        for token in tokens:
            if not self._allows(token):
                break
            self.consume(token)
            count += 1
        self.take_back(count)
        return count

    def forced_tokens(self) -> list[int]:
        inner = self._state.inner
        return [] if inner is None or inner.ended else inner.forced_tokens()

    def _allows(self, token: int) -> bool:
        inner = self._state.inner
        if inner is not None and not inner.ended:
            return inner.count_valid([token]) == 1
        mask = self.mask()
        return mask is None or bool(mask[token])

    def _forbidden(self, state: _State) -> Iterator[int]:
        """Yield the tokens that complete a marker but do not fit its grammar."""
        for gate in self._gates(state):
            yield from gate.wrong
            for prefix in _overlaps(state.held, gate.marker):
                suffix = gate.marker[len(prefix) :]
                if completing := list(self._surroundings.pieces.beginning(suffix)):
                    allowed = self._enter(gate, prefix).mask()
                    yield from (token for token in completing if not allowed[token])
        if self._bare_grammar(state) is not None:
            assert self._plan.bare is not None
            allowed = self._start_grammar(self._plan.bare).mask()
            yield from (token for token in self._plan.braces if not allowed[token])

    def _gates(self, state: _State) -> Sequence[Gate]:
        if state.place is not None and state.place.region == "thoughts":
            gate = self._plan.after.get(state.place.close.encode("latin-1"))
            return [gate] if gate is not None else []
        return self._plan.gates

    def _bare_grammar(self, state: _State) -> LLMatcher | None:
        """Return the grammar of an answer that begins with a brace, if it can begin in `state`."""
        at_start = state.place is not None and state.place.region in ("start", "behind")
        return self._plan.bare if at_start and not state.held.strip() else None

    def _start_grammar(self, grammar: LLMatcher) -> _Inner:
        return self._bound_numbers(WholeMatcher(grammar.deep_copy(), self._surroundings.n_vocab))

    def _bound_numbers(self, matcher: WholeMatcher, prefix: bytes = b"") -> _Inner:
        """Return `matcher` with bounded numbers if its grammar describes JSON."""
        numerals = self._surroundings.numerals
        return matcher if numerals is None else BoundedNumbers(matcher, numerals, prefix)

    def _enter(self, gate: Gate, prefix: bytes) -> _Inner:
        """Return a matcher of the gate's grammar after `prefix`, the beginning of its marker."""
        grammar = gate.grammar.deep_copy()
        if prefix:
            grammar.consume_tokens(self._surroundings.pieces.spell(prefix))
        return self._bound_numbers(WholeMatcher(grammar, self._surroundings.n_vocab), prefix)

    def _next(self, state: _State, token: int) -> _State:
        if state.place is None:
            return state
        if state.inner is not None:
            return self._advance_inner(state, state.inner, token)
        piece = self._surroundings.piece(token)
        if state.is_first and token not in self._plan.may_think:
            assert self._plan.first is not None
            inner = self._start_grammar(self._plan.first)
            return self._advance_inner(_State(state.place, inner=inner, last=True), inner, token)
        for gate in self._gates(state):
            for prefix in (*_overlaps(state.held, gate.marker), b""):
                if piece.startswith(gate.marker[len(prefix) :]):
                    inner = self._enter(gate, prefix)
                    inside = _State(state.place, inner=inner, last=gate.last)
                    return self._advance_inner(inside, inner, token)
        bare = self._bare_grammar(state)
        if bare is not None and piece.lstrip().startswith(b"{"):
            inner = self._start_grammar(bare)
            return self._advance_inner(_State(state.place, inner=inner, last=True), inner, token)
        text = state.held + piece
        place, held = self._markers.follow(state.place, text.decode("latin-1"))
        if place.region == "text":
            return _State(place, _tail(text, [gate.marker for gate in self._plan.gates]))
        return _State(place, held.encode("latin-1"))

    def _advance_inner(self, state: _State, inner: _Inner, token: int) -> _State:
        """Return the state after a token within a grammar."""
        inner.consume(token)
        if not inner.ended or state.last:
            return state
        return _State(None if self._plan.single else Place("text"))


def _overlaps(text: bytes, marker: bytes) -> Iterator[bytes]:
    """Yield the ends of `text` that are proper prefixes of `marker`, longest first."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            yield marker[:size]


def _tail(text: bytes, markers: Sequence[bytes]) -> bytes:
    """Return the longest end of `text` that is a proper prefix of one of the markers."""
    overlaps = (next(_overlaps(text, marker), b"") for marker in markers)
    return max(overlaps, key=len, default=b"")
