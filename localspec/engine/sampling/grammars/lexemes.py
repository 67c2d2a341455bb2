"""Decide which parts of a grammar llguidance's lexer may read as one lexeme each.

llguidance splits a text into lexemes, each as long as possible, before its parser runs. A lexeme of one
character is always correct, but slow. With a vocabulary of 150 000 tokens, a mask within a string takes 50
times as long as with one lexeme for the whole string, and may exceed llguidance's limits. A longer lexeme is
correct only if the longest match is what the grammar means. In `[a-z]+ "ab"` it is not, because `[a-z]+`
would also match the "ab" after it.

The algorithm begins with lexemes that are as long as possible, looks for conflicts, and splits lexemes in
conflict until there are none. Lexeme A is in conflict with B (which may be A) if a word of A, followed by a
character that may follow A in the grammar, is the beginning of a word of B. The lexer would then continue
with B where the grammar needs A to end. Without conflicts, no other lexeme can continue wherever the grammar
needs one to end, so the lexer finds every split that the grammar allows. Doubtful cases count as conflicts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from itertools import count, groupby
from operator import or_
from typing import Any, NamedTuple, TypeVar

from localspec.engine.sampling.grammars.gbnf import (
    MAX_DEPTH,
    NO_TOKENS,
    Alternatives,
    Characters,
    Element,
    Grammar,
    GrammarSyntaxError,
    Lexeme,
    Reference,
    Repeat,
    TokenMatch,
    TokenTable,
    elements,
    parse_gbnf,
    references,
)

# Sizes count character sets, those of a rule once for each use of the rule.
MAX_SINGLE_LEXEME_SIZE = 20_000  # Size of a grammar that is a single lexeme.
MAX_LEXEME_SIZE = 2_000  # Size of a lexeme that is one of several.
MAX_LEXEMES = 300  # The search for conflicts compares lexemes in pairs.
MAX_STEPS = 300_000  # Total steps of the search for conflicts; each takes less than a microsecond.
_MAX_NESTING = 40  # Nesting of rules within a lexeme, which are visited recursively.

Items = tuple[Element, ...]
_Kind = TypeVar("_Kind", bound=Element)


def divide_into_lexemes(grammar: Grammar) -> Grammar:
    """Return an equivalent grammar made of lexemes that are as long as is certainly correct."""
    sizes = _regular_sizes(grammar.rules)
    # The size can be exponential in that of the source, if rules use other rules more than once.
    source_size = sum(1 for _ in _elements_of(grammar, Characters))
    if sizes.get(grammar.root, sys.maxsize) <= max(source_size, MAX_SINGLE_LEXEME_SIZE):
        # Nothing follows the root, so its lexeme cannot match too much.
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
        conflicting = conflicts.find()
        if not conflicting:
            return Grammar(grammar.rules | divided, grammar.root)
        divider.split |= conflicting
        steps = conflicts.steps
    divider.split_all = True
    return Grammar(grammar.rules | divider.divide(), grammar.root)


def _elements_of(grammar: Grammar, kind: type[_Kind]) -> Iterator[_Kind]:
    """Yield the elements of one kind in all rules."""
    sequences = (items for rule in grammar.rules.values() for items in rule)
    return (item for item in elements(sequences) if isinstance(item, kind))


def _regular_sizes(rules: Mapping[int, Alternatives]) -> dict[int, int]:
    """Return the size of each rule that can be a lexeme, which has no recursion or token terminals.

    The size counts character sets, and includes that of other rules once for each use.
    """
    sizes: dict[int, int] = {}
    nesting: dict[int, int] = {}
    order = TopologicalSorter({symbol: set(references(rule)) for symbol, rule in rules.items()})
    with suppress(CycleError):  # Rules of a cycle, and those that use them, are never ready.
        order.prepare()
    while ready := order.get_ready():
        for symbol in ready:
            depth = 1 + max((nesting.get(used, 0) for used in references(rules[symbol])), default=0)
            size = _size([item for items in rules[symbol] for item in items], sizes)
            if size is not None and depth <= _MAX_NESTING:
                sizes[symbol], nesting[symbol] = size, depth
        order.done(*ready)
    return sizes


def _size(items: Iterable[Element], sizes: Mapping[int, int]) -> int | None:
    """Return the size of a sequence, or None if it cannot be a lexeme."""
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


def _split_regular(
    alternatives: Alternatives, sizes: Mapping[int, int]
) -> tuple[Alternatives, Alternatives]:
    """Return the alternatives that can be lexemes, and the others."""
    parts: tuple[Alternatives, Alternatives] = [], []
    for items in alternatives:
        parts[_size(items, sizes) is None].append(items)
    return parts


def _unroll(grammar: Grammar) -> Grammar:
    """Replace rules that end with themselves by repetitions: `x ::= a x | b` is `a* b`.

    llguidance's parser takes quadratic time for such a chain, and a repetition can be a lexeme.
    """
    rules = dict(grammar.rules)
    new_symbols = count(max(rules) + 1)
    for symbol, alternatives in grammar.rules.items():
        itself = Reference(symbol)
        repeated = [items[:-1] for items in alternatives if items[-1:] == (itself,)]
        final = [items for items in alternatives if items[-1:] != (itself,)]
        if repeated and final:
            head, tail = next(new_symbols), next(new_symbols)
            rules |= {head: repeated, tail: final}
            rules[symbol] = [(Repeat((Reference(head),), 0, None), Reference(tail))]
    return Grammar(rules, grammar.root)


class _Gatherer:
    """A rewriter of repetitions of which only some alternatives can be lexemes.

    It replaces `(a | b)*` by `a* (b a*)*`, where only `a` can be a lexeme. In `([^<]+ | element)*`, a lexeme
    of characters could be followed by another one and would be in conflict with itself. The lexeme
    `([^<]+)*` is not.
    """

    def __init__(self, grammar: Grammar, sizes: Mapping[int, int]) -> None:
        self._grammar = grammar
        self._sizes = sizes
        self._rules = dict(grammar.rules)
        self._new_symbols = count(max(grammar.rules) + 1)
        self._parts: dict[int, tuple[Reference, Reference] | None] = {}
        self._pending = list(grammar.rules.items())

    def gather(self) -> Grammar:
        for symbol, alternatives in self._pending:  # `_divide` appends to this list.
            self._rules[symbol] = [self._rewrite(items) for items in alternatives]
        return Grammar(self._rules, self._grammar.root)

    def _rewrite(self, items: Items) -> Items:
        rewritten: list[Element] = []
        for item in items:
            if isinstance(item, Repeat):
                separated = self._separate(item)
                item = separated or Repeat(self._rewrite(item.items), item.low, item.high)
            rewritten.append(item)
        return tuple(rewritten)

    def _separate(self, repeat: Repeat) -> Reference | None:
        """Return a rule equivalent to `repeat` with its lexemes separated, or None if there is none."""
        if len(repeat.items) != 1 or repeat.low > 1 or repeat.high is not None:
            return None
        [item] = repeat.items
        if not isinstance(item, Reference):
            return None
        if item.symbol not in self._parts:
            self._parts[item.symbol] = self._divide(self._grammar.rules[item.symbol])
        parts = self._parts[item.symbol]
        if parts is None:
            return None
        a, b_and_a = parts
        new_symbol = next(self._new_symbols)
        any_more = Repeat((b_and_a,), 0, None)
        self._rules[new_symbol] = [(Repeat((a,), repeat.low, None), any_more)]
        if repeat.low:
            self._rules[new_symbol].append((Repeat((b_and_a,), 1, None),))
        return Reference(new_symbol)

    def _divide(self, alternatives: Alternatives) -> tuple[Reference, Reference] | None:
        """Return rules for `a` and `b a*`, or None if all or none of the alternatives can be lexemes."""
        regular, irregular = _split_regular(alternatives, self._sizes)
        if not regular or not irregular:
            return None
        a, b, b_and_a = (Reference(next(self._new_symbols)) for _ in range(3))
        self._rules[a.symbol] = regular
        self._rules[b_and_a.symbol] = [(b, Repeat((a,), 0, None))]
        self._pending.append((b.symbol, irregular))
        return a, b_and_a


def _join_alternatives(grammar: Grammar, sizes: Mapping[int, int]) -> Grammar:
    """Move the alternatives of a rule that can be lexemes to a rule of their own, as one lexeme."""
    rules = dict(grammar.rules)
    new_symbols = count(max(rules) + 1)
    for symbol, alternatives in grammar.rules.items():
        regular, irregular = _split_regular(alternatives, sizes)
        if symbol not in sizes and len(regular) > 1:
            joined = next(new_symbols)
            rules[joined] = regular
            rules[symbol] = [(Reference(joined),), *irregular]
    return Grammar(rules, grammar.root)


class _Divider:
    """A divider of rules into lexemes. split: sequences that must not be one lexeme."""

    def __init__(self, grammar: Grammar, sizes: Mapping[int, int]) -> None:
        self._grammar = grammar
        self._sizes = sizes
        self.split: set[Items] = set()
        self.split_all = False

    def divide(self) -> dict[int, Alternatives]:
        """Return the rules that the root uses, made of lexemes."""
        divided: dict[int, Alternatives] = {}
        queue = [self._grammar.root]
        for symbol in queue:  # The loop body appends to this list.
            if symbol not in divided:
                divided[symbol] = [self._divide(items) for items in self._grammar.rules[symbol]]
                queue += references(divided[symbol])
        return divided

    def _divide(self, items: Items) -> Items:
        divided: list[Element] = []
        for regular, run in groupby(items, lambda item: _size((item,), self._sizes) is not None):
            if regular:
                divided += self._split(tuple(run))
                continue
            divided += (
                Repeat(self._divide(item.items), item.low, item.high)
                if isinstance(item, Repeat)
                else item
                for item in run
            )
        return tuple(divided)

    def _split(self, run: Items) -> list[Element]:
        """Divide a sequence that could be a lexeme."""
        size = _size(run, self._sizes) or 0
        if run not in self.split and size <= MAX_LEXEME_SIZE and not self.split_all:
            return [Lexeme(run)]
        if len(run) > 1:
            literal = all(isinstance(item, Characters) for item in run)
            parts: list[Items] = []
            for is_literal, group in groupby(run, lambda item: isinstance(item, Characters)):
                part = tuple(group)
                parts += [part] if is_literal and not literal else [(item,) for item in part]
            return [item for part in parts for item in self._split(part)]
        [item] = run
        if isinstance(item, Repeat):
            return [Repeat(tuple(self._split(item.items)), item.low, item.high)]
        return [Lexeme(run)] if isinstance(item, Characters) else [item]


class _Alphabet:
    """A map from character sets to bit sets, with one bit for all characters that no set distinguishes."""

    def __init__(self, grammar: Grammar) -> None:
        ranges = [pair for chars in _elements_of(grammar, Characters) for pair in chars.ranges]
        edges = sorted({edge for low, high in ranges for edge in (low, high + 1)})
        self._index = {edge: index for index, edge in enumerate(edges)}
        self._bits: dict[Characters, int] = {}

    def bits(self, chars: Characters) -> int:
        """Return a character set as a bit set."""
        if chars not in self._bits:
            index = self._index
            ranges = ((1 << index[high + 1]) - (1 << index[low]) for low, high in chars.ranges)
            self._bits[chars] = sum(ranges)
        return self._bits[chars]


class _Ends(NamedTuple):
    """The positions, as bit sets, that a part may begin and end with, and whether it may be empty."""

    first: int
    last: int
    empty: bool


class _Automaton:
    """The positions of a lexeme's characters and which may follow which (Glushkov's construction).

    It may accept more than the lexeme, because it does not count repetitions, but never less.
    """

    def __init__(self, lexeme: Lexeme, grammar: Grammar, alphabet: _Alphabet) -> None:
        self._grammar = grammar
        self._alphabet = alphabet
        self.chars: list[int] = []  # The characters of each position, as bit sets.
        self.following: list[int] = []  # The positions that may follow each position, as bit sets.
        self.ends = self._add_sequence(lexeme.items)
        self.first = self.chars_of(self.ends.first)
        # The characters at other places than the first.
        self.tail = self.chars_of(reduce(or_, self.following, 0))

    def chars_of(self, positions: int) -> int:
        """Return the characters of a set of positions."""
        return reduce(or_, map(self.chars.__getitem__, _bits(positions)), 0)

    def _add_sequence(self, items: Items) -> _Ends:
        ends = _Ends(0, 0, empty=True)
        for item in items:
            part = self._add_element(item)
            self._join(ends.last, part.first)
            first = ends.first | (part.first if ends.empty else 0)
            last = part.last | (ends.last if part.empty else 0)
            ends = _Ends(first, last, ends.empty and part.empty)
        return ends

    def _add_element(self, item: Element) -> _Ends:
        if isinstance(item, Characters):
            position = 1 << len(self.chars)
            self.chars.append(self._alphabet.bits(item))
            self.following.append(0)
            return _Ends(position, position, empty=False)
        if isinstance(item, Repeat):
            inner = self._add_sequence(item.items)
            if item.high != 1:
                self._join(inner.last, inner.first)
            return _Ends(inner.first, inner.last, inner.empty or item.low == 0)
        assert isinstance(item, Reference)
        firsts, lasts, empty = zip(
            *map(self._add_sequence, self._grammar.rules[item.symbol]), strict=True
        )
        return _Ends(reduce(or_, firsts), reduce(or_, lasts), any(empty))

    def _join(self, positions: int, followers: int) -> None:
        for position in _bits(positions):
            self.following[position] |= followers


def _bits(number: int) -> Iterator[int]:
    """Yield the indices of the bits that are set."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


class _Conflicts:
    """A search for lexemes that must be split. steps: the number of steps that it may still take."""

    def __init__(self, grammar: Grammar, rules: dict[int, Alternatives], steps: int) -> None:
        self._rules = rules
        self.steps = steps
        alphabet = _Alphabet(grammar)
        lexemes = dict.fromkeys(_elements_of(Grammar(rules, grammar.root), Lexeme))
        self._automata: dict[Lexeme, _Automaton] = {}
        if len(lexemes) <= MAX_LEXEMES:
            self._automata = {lexeme: _Automaton(lexeme, grammar, alphabet) for lexeme in lexemes}
        else:
            self.steps = 0
        self._first = dict.fromkeys(rules, 0)  # The characters that a rule may begin with.
        self._empty = dict.fromkeys(rules, False)  # Whether a rule may be empty.
        self._after_rule = dict.fromkeys(rules, 0)  # The characters that may follow a rule.
        self._after_lexeme = dict.fromkeys(lexemes, 0)  # The characters that may follow a lexeme.

    def find(self) -> set[Items]:
        """Return the lexemes to split, or only some of them if `steps` do not suffice."""
        self._iterate(self._update_first)
        self._iterate(lambda symbol, items: self._follow_within(items, self._after_rule[symbol]))
        conflicting: set[Items] = set()
        for longer, automaton in self._automata.items():
            for ending, followers in self._after_lexeme.items():
                self.steps -= 1
                if followers & automaton.tail and self._continues(ending, automaton, followers):
                    conflicting.add(longer.items)
                    break
            if self.steps <= 0:
                break
        return conflicting

    def _iterate(self, step: Callable[[int, Items], bool]) -> None:
        """Apply `step` to every alternative of every rule until nothing changes."""
        changed = True
        while changed and self.steps > 0:
            changed = False
            for symbol, alternatives in self._rules.items():
                for items in alternatives:
                    self.steps -= 1 + len(items)
                    changed |= step(symbol, items)

    def _update_first(self, symbol: int, items: Items) -> bool:
        first, empty = self._beginning(items)
        changed = _add(self._first, symbol, first)
        return _add(self._empty, symbol, empty) or changed

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
                    begins, empty = 0, False  # A token terminal matches no character.
            first |= begins
            if not empty:
                return first, False
        return first, True

    def _follow_within(self, items: Items, followers: int) -> bool:
        """Add the followers of each part of a sequence, given those of the sequence. Return any change."""
        changed = False
        for item in reversed(items):
            match item:
                case Lexeme():
                    changed |= _add(self._after_lexeme, item, followers)
                case Reference():
                    changed |= _add(self._after_rule, item.symbol, followers)
                case Repeat():
                    repeated = self._beginning(item.items)[0] if item.high != 1 else 0
                    changed |= self._follow_within(item.items, followers | repeated)
            first, empty = self._beginning([item])
            followers = first | (followers if empty else 0)
        return changed

    def _continues(self, ending: Lexeme, longer: _Automaton, followers: int) -> bool:
        """Return whether a word of `ending` and a character of `followers` begin a word of `longer`."""
        shorter = self._automata[ending]
        if not shorter.first & longer.first:
            return False
        by_chars: dict[int, int] = {}  # The positions of the longer lexeme by their characters.
        for position, chars in enumerate(longer.chars):
            by_chars[chars] = by_chars.get(chars, 0) | 1 << position
        # For each position of the shorter lexeme, the positions of the longer one after the same text.
        reached: dict[int, int] = {}
        pending = [(position, longer.ends.first) for position in _bits(shorter.ends.first)]
        for position, candidates in pending:  # The loop body appends to this list.
            self.steps -= 1 + len(by_chars)
            if self.steps <= 0:
                return True
            chars = shorter.chars[position]
            matching = sum(bits for key, bits in by_chars.items() if key & chars) & candidates
            new = matching & ~reached.get(position, 0)
            if not new:
                continue
            reached[position] = reached.get(position, 0) | new
            self.steps -= new.bit_count()
            successors = reduce(or_, map(longer.following.__getitem__, _bits(new)), 0)
            if shorter.ends.last >> position & 1 and longer.chars_of(successors) & followers:
                return True
            pending += [(follower, successors) for follower in _bits(shorter.following[position])]
        return False


def _add(table: dict[Any, Any], key: object, bits: int) -> bool:
    """Add bits to an entry. Return whether that changes it."""
    previous = table[key]
    table[key] |= bits
    return bool(table[key] != previous)


def gbnf_to_lark(source: str, tokens: TokenTable = NO_TOKENS) -> str:
    """Translate a GBNF source to llguidance's Lark. Without a token table, `<…>` can name no token.

    Raises:
        GrammarSyntaxError: llama.cpp rejects the source, or it exceeds a limit of the parser.
    """
    grammar = parse_gbnf(source, tokens)
    _check_depth(grammar)
    return _Writer(divide_into_lexemes(grammar), tokens).write()


def _check_depth(grammar: Grammar) -> None:
    """Reject rules that are nested too deeply, in the order in which llguidance will compile them."""
    visited = {grammar.root}
    path = [references(grammar.rules[grammar.root])]
    while path:
        symbol = next((symbol for symbol in path[-1] if symbol not in visited), None)
        if symbol is None:
            path.pop()
            continue
        visited.add(symbol)
        path.append(references(grammar.rules[symbol]))
        if len(path) > MAX_DEPTH:
            raise GrammarSyntaxError(f"rules and groups are more than {MAX_DEPTH} levels deep.")


class _Writer:
    """A writer of one grammar.

    It writes a Lark rule for each rule, and a terminal for each lexeme and each rule within a lexeme.
    """

    def __init__(self, grammar: Grammar, tokens: TokenTable) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._lines: list[str] = []
        self._written: set[str] = set()
        self._queue: list[tuple[str, Alternatives]] = []
        self._terminals: dict[Element, str] = {}
        self._helpers = 0
        named = {match.token for match in _elements_of(grammar, TokenMatch)}
        named.difference_update(tokens.unusable)
        self._named = sorted(token for token in named if token < tokens.size)

    def write(self) -> str:
        self._queue.append(("start", [(Reference(self._grammar.root),)]))
        for name, alternatives in self._queue:  # Writing a rule appends those that it refers to.
            sequences = (self._write_sequence(items, name.isupper()) for items in alternatives)
            self._lines.append(f"{name}: {' | '.join(dict.fromkeys(sequences))}")
        return "\n".join(self._lines)

    def _write_sequence(self, items: Sequence[Element], in_lexeme: bool) -> str:
        return " ".join(self._write_element(item, in_lexeme) for item in items) or '""'

    def _write_element(self, item: Element, in_lexeme: bool) -> str:
        match item:
            case Lexeme(items=(Characters() | Reference() as only,)):
                return self._write_element(only, True)
            case Lexeme() | Characters():
                return self._write_terminal(item)
            case TokenMatch():
                return self._write_token(item)
            case Reference():
                name = f"{'R' if in_lexeme else 'r'}{item.symbol}"
                if name not in self._written:
                    self._written.add(name)
                    self._queue.append((name, self._grammar.rules[item.symbol]))
                return name
            case Repeat(items, low, high):
                short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
                quantifier = short or f"{{{low},{'' if high is None else high}}}"
                return self._write_repeated(items, in_lexeme) + quantifier

    def _write_terminal(self, item: Lexeme | Characters) -> str:
        if item in self._terminals:
            return self._terminals[item]
        kind = "L" if isinstance(item, Lexeme) else "C"
        self._terminals[item] = name = f"{kind}{len(self._terminals)}"
        if isinstance(item, Lexeme):
            self._queue.append((name, [item.items]))
            return name
        ranges = (
            f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}"
            for low, high in item.ranges
        )
        self._lines.append(f"{name}: /[{''.join(ranges)}]/")
        return name

    def _write_repeated(self, items: Sequence[Element], in_lexeme: bool) -> str:
        """Return the name of a repeated element. A sequence or another repetition gets its own rule."""
        if len(items) == 1 and not isinstance(items[0], Repeat):
            return self._write_element(items[0], in_lexeme)
        self._helpers += 1
        name = f"{'S' if in_lexeme else 's'}{self._helpers}"
        self._queue.append((name, [tuple(items)]))
        return name

    def _write_token(self, item: TokenMatch) -> str:
        """Return the terminal of a token.

        llguidance takes the first terminal that contains a token, so no two different terminals may share
        one. "Any other token" is therefore one terminal per other token that the grammar names, and one
        terminal for all tokens that it does not name.
        """
        if not item.negated:
            return self._write_token_ids([item.token])
        name = f"t{item.token}"
        if name not in self._written:
            self._written.add(name)
            excluded = {*self._tokens.unusable, *self._named}
            unnamed = [token for token in range(self._tokens.size) if token not in excluded]
            groups = [unnamed, *([token] for token in self._named if token != item.token)]
            self._lines.append(
                f"{name}: {' | '.join(map(self._write_token_ids, filter(None, groups)))}"
            )
        return name

    def _write_token_ids(self, tokens: Sequence[int]) -> str:
        """Return a terminal that matches any of the sorted `tokens`."""
        ranges: list[list[int]] = []
        for token in tokens:
            if ranges and ranges[-1][1] == token - 1:
                ranges[-1][1] = token
            else:
                ranges.append([token, token])
        return f"<[{','.join(f'{low}-{high}' for low, high in ranges)}]>"
