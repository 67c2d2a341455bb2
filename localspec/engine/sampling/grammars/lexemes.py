"""Which parts of a grammar llguidance may read as one lexeme each.

llguidance splits a text into lexemes, each as long as possible, before its parser sees any. A lexeme of one
character is always right, but slow: with a vocabulary of 150 000 tokens, a mask within a string takes 50
times as long as where the string is one lexeme, and may exceed llguidance's limits. A longer lexeme is right
only where taking it as long as possible is what the grammar means: `[a-z]+ "ab"` is not one of these, since
`[a-z]+` would swallow the "ab" behind it.

So we begin with lexemes as long as can be, look for conflicts, and split what is in conflict until there are
none. Lexeme A is in conflict with B (which may be A) if a word of A, followed by a character that may follow
A in the grammar, is the beginning of a word of B: the lexer would go on with B where the grammar wants A to
end. Without such a pair, whenever the grammar wants a lexeme to end, no other one can go on, so the lexer
finds all the splits that the grammar has. Where in doubt, there is a conflict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from localspec.engine.sampling.grammars.gbnf import (
    Alternatives,
    Characters,
    Element,
    Grammar,
    Lexeme,
    Reference,
    Repeat,
    references,
)

MAX_WHOLE = 20_000  # characters of a grammar that is a single lexeme, each counted where it is used
MAX_POSITIONS = 2_000  # the same for a lexeme that is one of several
MAX_LEXEMES = 300
MAX_STEPS = 300_000  # of looking for conflicts, in all; less than a microsecond each
_MAX_NESTING = 40  # of rules within a lexeme, which are followed by recursion

Items = tuple[Element, ...]


def divide_into_lexemes(grammar: Grammar) -> Grammar:
    """Return a grammar of the same language that is made of lexemes, as long as is certainly right."""
    sizes = _regular_sizes(grammar.rules)
    # Its size may be far beyond that of the source, where rules use other ones twice and these others.
    written = sum(1 for _ in _all_characters(grammar.rules))
    if sizes.get(grammar.root, sys.maxsize) <= max(written, MAX_WHOLE):
        # Nothing follows it, so there is nothing that it could swallow.
        root = max(grammar.rules) + 1
        return Grammar(grammar.rules | {root: [(Lexeme((Reference(grammar.root),)),)]}, root)
    grammar = _unroll(grammar)
    grammar = _Gatherer(grammar, _regular_sizes(grammar.rules)).gather()
    grammar = _join_alternatives(grammar, _regular_sizes(grammar.rules))
    divider = _Divider(grammar, _regular_sizes(grammar.rules))
    steps = MAX_STEPS
    while steps > 0:
        divided = divider.divide()
        conflicts = _Conflicts(grammar, divided, steps)
        found = conflicts.find()
        if not found:
            return Grammar(grammar.rules | divided, grammar.root)
        divider.split |= found
        steps = conflicts.steps
    divider.split_all = True
    return Grammar(grammar.rules | divider.divide(), grammar.root)


def _lexemes(sequences: Iterable[Sequence[Element]]) -> Iterator[Lexeme]:
    for items in sequences:
        for item in items:
            if isinstance(item, Lexeme):
                yield item
            elif isinstance(item, Repeat):
                yield from _lexemes([item.items])


# ------------------------------------------------------------------ what can be a lexeme


def _regular_sizes(rules: Mapping[int, Alternatives]) -> dict[int, int]:
    """Return how many characters a rule has, for rules without recursion and token terminals.

    Rules within it are counted wherever they are used.
    """
    sizes: dict[int, int] = {}
    nesting: dict[int, int] = {}
    done: set[int] = set()
    for start in rules:
        path = {} if start in done else {start: references(rules[start])}
        while path:
            symbol, pending = next(reversed(path.items()))
            new = next((each for each in pending if each not in done), None)
            if new is not None and new not in path:
                path[new] = references(rules[new])
                continue
            if new is None:
                del path[symbol]
                done.add(symbol)
                depth = 1 + max(
                    (nesting.get(each, 0) for each in references(rules[symbol])), default=0
                )
                size = _size_of_all(rules[symbol], sizes)
                # A rule that is still open here has no size yet, so no rule of a cycle ever gets one.
                if size is not None and depth <= _MAX_NESTING:
                    sizes[symbol], nesting[symbol] = size, depth
    return sizes


def _size_of_all(alternatives: Iterable[Items], sizes: Mapping[int, int]) -> int | None:
    total = 0
    for items in alternatives:
        size = _size(items, sizes)
        if size is None:
            return None
        total += size
    return total


def _size(items: Items, sizes: Mapping[int, int]) -> int | None:
    """Return how many characters a sequence has, or None where it cannot be a lexeme."""
    total = 0
    for item in items:
        match item:
            case Characters():
                size: int | None = 1
            case Reference():
                size = sizes.get(item.symbol)
            case Repeat():
                size = _size(item.items, sizes)
            case _:
                size = None
        if size is None:
            return None
        total += size
    return total


def _unroll(grammar: Grammar) -> Grammar:
    """Write rules that end with themselves as repetitions: `x ::= a x | b` is `a* b`.

    llguidance's parser takes time in the square of such a chain's length, and a repetition may be a lexeme.
    """
    rules = dict(grammar.rules)
    fresh = count(max(rules) + 1)
    for symbol, alternatives in grammar.rules.items():
        own = Reference(symbol)
        again = [items[:-1] for items in alternatives if items[-1:] == (own,)]
        rest = [items for items in alternatives if items[-1:] != (own,)]
        if again and rest:
            head, tail = next(fresh), next(fresh)
            rules |= {head: again, tail: rest}
            rules[symbol] = [(Repeat((Reference(head),), 0, None), Reference(tail))]
    return Grammar(rules, grammar.root)


class _Gatherer:
    """Rewrites what is repeated and is a lexeme only in some alternatives: `(a | b)*` is `a* (b a*)*`.

    In `([^<]+ | element)*`, a lexeme for the characters could be followed by another one, so it would be
    in conflict with itself; `[^<]+*` as a whole is not.
    """

    def __init__(self, grammar: Grammar, sizes: Mapping[int, int]) -> None:
        self._grammar = grammar
        self._sizes = sizes
        self._rules = dict(grammar.rules)
        self._fresh = count(max(grammar.rules) + 1)
        self._parts: dict[int, tuple[int, int] | None] = {}
        self._pending = list(grammar.rules.items())

    def gather(self) -> Grammar:
        for symbol, alternatives in self._pending:  # which grows meanwhile
            self._rules[symbol] = [self._rewritten(items) for items in alternatives]
        return Grammar(self._rules, self._grammar.root)

    def _rewritten(self, items: Items) -> Items:
        rewritten: list[Element] = []
        for item in items:
            if isinstance(item, Repeat):
                again = self._apart(item)
                inner = Repeat(self._rewritten(item.items), item.low, item.high)
                rewritten.append(inner if again is None else again)
            else:
                rewritten.append(item)
        return tuple(rewritten)

    def _apart(self, repeat: Repeat) -> Reference | None:
        match repeat:
            case Repeat(items=(Reference(symbol=symbol),), low=0 | 1 as low, high=None):
                alternatives = self._grammar.rules[symbol]
            case _:
                return None
        if symbol not in self._parts:
            self._parts[symbol] = self._divide(alternatives)
        parts = self._parts[symbol]
        if parts is None:
            return None
        a, b_and_a = (Reference(part) for part in parts)
        any_more = Repeat((b_and_a,), 0, None)
        at_least_one: Alternatives = [
            (Repeat((a,), 1, None), any_more),
            (Repeat((b_and_a,), 1, None),),
        ]
        whole = next(self._fresh)
        self._rules[whole] = [(Repeat((a,), 0, None), any_more)] if low == 0 else at_least_one
        return Reference(whole)

    def _divide(self, alternatives: Alternatives) -> tuple[int, int] | None:
        """Return rules for `a` and for `b a*`, if there are both."""
        regular = [items for items in alternatives if _size(items, self._sizes) is not None]
        others = [items for items in alternatives if _size(items, self._sizes) is None]
        if not regular or not others:
            return None
        a, b, b_and_a = next(self._fresh), next(self._fresh), next(self._fresh)
        self._rules[a] = regular
        self._rules[b_and_a] = [(Reference(b), Repeat((Reference(a),), 0, None))]
        self._pending.append((b, others))
        return a, b_and_a


def _join_alternatives(grammar: Grammar, sizes: Mapping[int, int]) -> Grammar:
    """Give those alternatives of a rule that may be lexemes a rule of their own: one lexeme for all."""
    rules = dict(grammar.rules)
    fresh = count(max(rules) + 1)
    for symbol, alternatives in grammar.rules.items():
        regular = [items for items in alternatives if _size(items, sizes) is not None]
        if symbol not in sizes and len(regular) > 1:
            joined = next(fresh)
            rules[joined] = regular
            others = [items for items in alternatives if _size(items, sizes) is None]
            rules[symbol] = [(Reference(joined),), *others]
    return Grammar(rules, grammar.root)


class _Divider:
    """Divides rules into lexemes. split: what must not be one."""

    def __init__(self, grammar: Grammar, sizes: Mapping[int, int]) -> None:
        self._grammar = grammar
        self._sizes = sizes
        self.split: set[Items] = set()
        self.split_all = False

    def divide(self) -> dict[int, Alternatives]:
        """Return the rules that are needed, made of lexemes."""
        divided: dict[int, Alternatives] = {}
        queue = [self._grammar.root]
        for symbol in queue:  # which grows meanwhile
            if symbol not in divided:
                divided[symbol] = [self._divide(items) for items in self._grammar.rules[symbol]]
                queue += references(divided[symbol])
        return divided

    def _divide(self, items: Items) -> Items:
        divided: list[Element] = []
        for regular, run in groupby(items, lambda item: _size((item,), self._sizes) is not None):
            for part in [tuple(run)] if regular else [(item,) for item in run]:
                divided += self._split(part) if regular else self._irregular(part[0])
        return tuple(divided)

    def _irregular(self, item: Element) -> list[Element]:
        if isinstance(item, Repeat):
            return [Repeat(self._divide(item.items), item.low, item.high)]
        return [item]

    def _split(self, run: Items) -> list[Element]:
        """Divide a sequence that could be a lexeme."""
        size = _size(run, self._sizes) or 0
        if run not in self.split and size <= MAX_POSITIONS and not self.split_all:
            return [Lexeme(run)]
        if len(run) > 1:
            literal = all(isinstance(item, Characters) for item in run)
            parts: list[Items] = []
            for together, group in groupby(run, lambda item: isinstance(item, Characters)):
                part = tuple(group)
                parts += [part] if together and not literal else [(item,) for item in part]
            return [item for part in parts for item in self._split(part)]
        [item] = run
        if isinstance(item, Repeat):
            return [Repeat(tuple(self._split(item.items)), item.low, item.high)]
        return [Lexeme(run)] if isinstance(item, Characters) else [item]


# ------------------------------------------------------------------ automata


class _Alphabet:
    """Sets of characters as bits of a number: one bit for all characters that no set tells apart."""

    def __init__(self, rules: Mapping[int, Alternatives]) -> None:
        edges = {
            edge
            for chars in _all_characters(rules)
            for low, high in chars.ranges
            for edge in (low, high + 1)
        }
        self._index = {edge: at for at, edge in enumerate(sorted(edges))}
        self._bits: dict[Characters, int] = {}

    def bits(self, chars: Characters) -> int:
        if chars not in self._bits:
            index = self._index
            ranges = ((1 << index[high + 1]) - (1 << index[low]) for low, high in chars.ranges)
            self._bits[chars] = sum(ranges)
        return self._bits[chars]


def _all_characters(rules: Mapping[int, Alternatives]) -> Iterator[Characters]:
    pending: list[Element] = [item for rule in rules.values() for items in rule for item in items]
    for item in pending:  # which grows meanwhile
        if isinstance(item, Characters):
            yield item
        elif isinstance(item, Repeat):
            pending += item.items


@dataclass(frozen=True)
class _Ends:
    """Positions, as bits, that a part may begin and end with, and whether it may be empty."""

    first: int
    last: int
    empty: bool


class _Automaton:
    """The positions of a lexeme's characters and which may follow which (Glushkov's construction).

    It may accept more than the lexeme, as repetitions are not counted, but never less.
    """

    def __init__(self, lexeme: Lexeme, grammar: Grammar, alphabet: _Alphabet) -> None:
        self._grammar = grammar
        self._alphabet = alphabet
        self.chars: list[int] = []  # of each position
        self.following: list[int] = []  # the positions behind each position, as bits
        self.ends = self._sequence(lexeme.items)
        self.first = self.chars_of(self.ends.first)
        behind = 0
        for positions in self.following:
            behind |= positions
        self.tail = self.chars_of(behind)  # every character but the first ones

    def chars_of(self, positions: int) -> int:
        chars = 0
        for position in _bits(positions):
            chars |= self.chars[position]
        return chars

    def _sequence(self, items: Items) -> _Ends:
        ends = _Ends(0, 0, empty=True)
        for item in items:
            part = self._part(item)
            self._join(ends.last, part.first)
            first = ends.first | (part.first if ends.empty else 0)
            last = part.last | (ends.last if part.empty else 0)
            ends = _Ends(first, last, ends.empty and part.empty)
        return ends

    def _part(self, item: Element) -> _Ends:
        if isinstance(item, Characters):
            position = 1 << len(self.chars)
            self.chars.append(self._alphabet.bits(item))
            self.following.append(0)
            return _Ends(position, position, empty=False)
        if isinstance(item, Repeat):
            inner = self._sequence(item.items)
            if item.high != 1:
                self._join(inner.last, inner.first)
            return _Ends(inner.first, inner.last, inner.empty or item.low == 0)
        assert isinstance(item, Reference)
        ends = _Ends(0, 0, empty=False)
        for items in self._grammar.rules[item.symbol]:
            part = self._sequence(items)
            ends = _Ends(ends.first | part.first, ends.last | part.last, ends.empty or part.empty)
        return ends

    def _join(self, before: int, behind: int) -> None:
        for position in _bits(before):
            self.following[position] |= behind


def _bits(number: int) -> Iterator[int]:
    """Yield which bits are set."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


# ------------------------------------------------------------------ conflicts


class _Conflicts:
    """Looks for lexemes that must not stay whole. steps: what may still be spent on it."""

    def __init__(self, grammar: Grammar, rules: Mapping[int, Alternatives], steps: int) -> None:
        self._rules = rules
        self.steps = steps
        alphabet = _Alphabet(grammar.rules)
        sequences = (items for rule in rules.values() for items in rule)
        lexemes = dict.fromkeys(_lexemes(sequences))
        self._automata: dict[Lexeme, _Automaton] = {}
        if len(lexemes) <= MAX_LEXEMES:
            self._automata = {each: _Automaton(each, grammar, alphabet) for each in lexemes}
        else:
            self.steps = 0
        self._first = dict.fromkeys(rules, 0)  # what a rule may begin with
        self._empty = dict.fromkeys(rules, False)
        self._behind_rule = dict.fromkeys(rules, 0)  # what may follow a rule
        self._behind = dict.fromkeys(lexemes, 0)  # what may follow a lexeme

    def find(self) -> set[Items]:
        """Return the lexemes to split. Where `steps` end before, they are not all."""
        self._settle(self._begin)
        self._settle(self._follow)
        found: set[Items] = set()
        for longer, automaton in self._automata.items():
            for ending, behind in self._behind.items():
                self.steps -= 1
                if behind & automaton.tail and self._goes_on(ending, automaton, behind):
                    found.add(longer.items)
                    break
            if self.steps <= 0:
                break
        return found

    def _settle(self, step: Callable[[int, Items], bool]) -> None:
        """Apply `step` to every alternative of every rule until nothing changes."""
        changed = True
        while changed and self.steps > 0:
            changed = False
            for symbol, alternatives in self._rules.items():
                for items in alternatives:
                    self.steps -= 1 + len(items)
                    changed |= step(symbol, items)

    def _begin(self, symbol: int, items: Items) -> bool:
        first, empty = self._beginning(items)
        before = self._first[symbol], self._empty[symbol]
        self._first[symbol] |= first
        self._empty[symbol] |= empty
        return before != (self._first[symbol], self._empty[symbol])

    def _beginning(self, items: Iterable[Element]) -> tuple[int, bool]:
        """Return the characters that a sequence may begin with, and whether it may be empty."""
        first = 0
        for item in items:
            match item:
                case Lexeme():
                    begins, empty = self._automata[item].first, self._automata[item].ends.empty
                case Reference():
                    begins, empty = self._first[item.symbol], self._empty[item.symbol]
                case Repeat():
                    begins, empty = self._beginning(item.items)
                    empty = empty or item.low == 0
                case _:
                    begins, empty = 0, False  # a token is no character
            first |= begins
            if not empty:
                return first, False
        return first, True

    def _follow(self, symbol: int, items: Items) -> bool:
        return self._follow_within(items, self._behind_rule[symbol])

    def _follow_within(self, items: Items, behind: int) -> bool:
        """Add what follows each part of a sequence, given what follows the sequence."""
        changed = False
        for item in reversed(items):
            match item:
                case Lexeme():
                    changed |= _add(self._behind, item, behind)
                case Reference():
                    changed |= _add(self._behind_rule, item.symbol, behind)
                case Repeat():
                    again = self._beginning(item.items)[0] if item.high != 1 else 0
                    changed |= self._follow_within(item.items, behind | again)
            first, empty = self._beginning([item])
            behind = first | (behind if empty else 0)
        return changed

    def _goes_on(self, ending: Lexeme, longer: _Automaton, behind: int) -> bool:
        """Whether a word of one lexeme, with a character of `behind`, begins a word of the longer one."""
        shorter = self._automata[ending]
        if not shorter.first & longer.first:
            return False
        by_chars: dict[int, int] = {}  # positions of the longer one by their characters
        for position, chars in enumerate(longer.chars):
            by_chars[chars] = by_chars.get(chars, 0) | 1 << position
        reached: dict[int, int] = {}  # for positions of the shorter one, those of the longer one
        pending = [(position, longer.ends.first) for position in _bits(shorter.ends.first)]
        for position, candidates in pending:  # which grows meanwhile
            self.steps -= 1 + len(by_chars)
            if self.steps <= 0:
                return True
            own = shorter.chars[position]
            meeting = sum(at for chars, at in by_chars.items() if chars & own) & candidates
            new = meeting & ~reached.get(position, 0)
            if not new:
                continue
            reached[position] = reached.get(position, 0) | new
            nexts = 0
            for at in _bits(new):
                nexts |= longer.following[at]
                self.steps -= 1
            if shorter.ends.last >> position & 1 and longer.chars_of(nexts) & behind:
                return True
            pending += [(after, nexts) for after in _bits(shorter.following[position])]
        return False


def _add(table: dict[Any, int], key: object, bits: int) -> bool:
    """Add bits to an entry. Returns whether that changes it."""
    before = table[key]
    table[key] = before | bits
    return table[key] != before
