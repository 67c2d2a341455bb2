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
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

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


def divide_into_lexemes(grammar: Grammar) -> Grammar:
    """Return an equivalent grammar made of lexemes that are as long as is certainly correct."""
    sizes = _regular_sizes(grammar.rules)
    # The size can be exponential in that of the source, if rules use other rules more than once.
    source_size = sum(1 for _ in _all_characters(grammar.rules))
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


def _lexemes(sequences: Iterable[Sequence[Element]]) -> Iterator[Lexeme]:
    for items in sequences:
        for item in items:
            if isinstance(item, Lexeme):
                yield item
            elif isinstance(item, Repeat):
                yield from _lexemes([item.items])


# ------------------------------------------------------------------ candidates for lexemes


def _regular_sizes(rules: Mapping[int, Alternatives]) -> dict[int, int]:
    """Return the size of each rule that can be a lexeme, which has no recursion or token terminals.

    The size counts character sets, and includes that of other rules once for each use.
    """
    sizes: dict[int, int] = {}
    nesting: dict[int, int] = {}
    done: set[int] = set()
    for start in rules:
        path = {} if start in done else {start: references(rules[start])}
        while path:
            symbol, pending = next(reversed(path.items()))
            used = next((rule for rule in pending if rule not in done), None)
            if used is not None and used not in path:
                path[used] = references(rules[used])
                continue
            if used is None:
                del path[symbol]
                done.add(symbol)
                depth = 1 + max(
                    (nesting.get(used, 0) for used in references(rules[symbol])), default=0
                )
                size = _size_of_all(rules[symbol], sizes)
                # A rule that is still on the path has no size yet, so rules of a cycle never get one.
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
        self._parts: dict[int, tuple[int, int] | None] = {}
        self._pending = list(grammar.rules.items())

    def gather(self) -> Grammar:
        """Return the rewritten grammar."""
        for symbol, alternatives in self._pending:  # `_divide` appends to this list.
            self._rules[symbol] = [self._rewrite(items) for items in alternatives]
        return Grammar(self._rules, self._grammar.root)

    def _rewrite(self, items: Items) -> Items:
        rewritten: list[Element] = []
        for item in items:
            if isinstance(item, Repeat):
                separated = self._separate(item)
                inner = Repeat(self._rewrite(item.items), item.low, item.high)
                rewritten.append(inner if separated is None else separated)
            else:
                rewritten.append(item)
        return tuple(rewritten)

    def _separate(self, repeat: Repeat) -> Reference | None:
        """Return a rule equivalent to `repeat` with its lexemes separated, or None if there is none."""
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
        new_symbol = next(self._new_symbols)
        self._rules[new_symbol] = [(Repeat((a,), 0, None), any_more)] if low == 0 else at_least_one
        return Reference(new_symbol)

    def _divide(self, alternatives: Alternatives) -> tuple[int, int] | None:
        """Return rules for `a` and `b a*`, or None if all or none of the alternatives can be lexemes."""
        regular = [items for items in alternatives if _size(items, self._sizes) is not None]
        irregular = [items for items in alternatives if _size(items, self._sizes) is None]
        if not regular or not irregular:
            return None
        a, b, b_and_a = next(self._new_symbols), next(self._new_symbols), next(self._new_symbols)
        self._rules[a] = regular
        self._rules[b_and_a] = [(Reference(b), Repeat((Reference(a),), 0, None))]
        self._pending.append((b, irregular))
        return a, b_and_a


def _join_alternatives(grammar: Grammar, sizes: Mapping[int, int]) -> Grammar:
    """Move the alternatives of a rule that can be lexemes to a rule of their own, as one lexeme."""
    rules = dict(grammar.rules)
    new_symbols = count(max(rules) + 1)
    for symbol, alternatives in grammar.rules.items():
        regular = [items for items in alternatives if _size(items, sizes) is not None]
        if symbol not in sizes and len(regular) > 1:
            joined = next(new_symbols)
            rules[joined] = regular
            irregular = [items for items in alternatives if _size(items, sizes) is None]
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
            for part in [tuple(run)] if regular else [(item,) for item in run]:
                divided += self._split(part) if regular else self._divide_irregular(part[0])
        return tuple(divided)

    def _divide_irregular(self, item: Element) -> list[Element]:
        if isinstance(item, Repeat):
            return [Repeat(self._divide(item.items), item.low, item.high)]
        return [item]

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


# ------------------------------------------------------------------ automata


class _Alphabet:
    """A map from character sets to bit sets, with one bit for all characters that no set distinguishes."""

    def __init__(self, rules: Mapping[int, Alternatives]) -> None:
        edges = {
            edge
            for chars in _all_characters(rules)
            for low, high in chars.ranges
            for edge in (low, high + 1)
        }
        self._index = {edge: index for index, edge in enumerate(sorted(edges))}
        self._bits: dict[Characters, int] = {}

    def bits(self, chars: Characters) -> int:
        """Return a character set as a bit set."""
        if chars not in self._bits:
            index = self._index
            ranges = ((1 << index[high + 1]) - (1 << index[low]) for low, high in chars.ranges)
            self._bits[chars] = sum(ranges)
        return self._bits[chars]


def _all_characters(rules: Mapping[int, Alternatives]) -> Iterator[Characters]:
    pending: list[Element] = [item for rule in rules.values() for items in rule for item in items]
    for item in pending:  # The loop body appends to this list.
        if isinstance(item, Characters):
            yield item
        elif isinstance(item, Repeat):
            pending += item.items


@dataclass(frozen=True)
class _Ends:
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
        followers = 0
        for positions in self.following:
            followers |= positions
        self.tail = self.chars_of(followers)  # The characters at other places than the first.

    def chars_of(self, positions: int) -> int:
        """Return the characters of a set of positions."""
        chars = 0
        for position in _bits(positions):
            chars |= self.chars[position]
        return chars

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
        ends = _Ends(0, 0, empty=False)
        for items in self._grammar.rules[item.symbol]:
            part = self._add_sequence(items)
            ends = _Ends(ends.first | part.first, ends.last | part.last, ends.empty or part.empty)
        return ends

    def _join(self, positions: int, followers: int) -> None:
        for position in _bits(positions):
            self.following[position] |= followers


def _bits(number: int) -> Iterator[int]:
    """Yield the indices of the bits that are set."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


# ------------------------------------------------------------------ conflicts


class _Conflicts:
    """A search for lexemes that must be split. steps: the number of steps that it may still take."""

    def __init__(self, grammar: Grammar, rules: Mapping[int, Alternatives], steps: int) -> None:
        self._rules = rules
        self.steps = steps
        alphabet = _Alphabet(grammar.rules)
        sequences = (items for rule in rules.values() for items in rule)
        lexemes = dict.fromkeys(_lexemes(sequences))
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
        self._iterate(self._update_following)
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
        previous = self._first[symbol], self._empty[symbol]
        self._first[symbol] |= first
        self._empty[symbol] |= empty
        return previous != (self._first[symbol], self._empty[symbol])

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

    def _update_following(self, symbol: int, items: Items) -> bool:
        return self._follow_within(items, self._after_rule[symbol])

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
            successors = 0
            for index in _bits(new):
                successors |= longer.following[index]
                self.steps -= 1
            if shorter.ends.last >> position & 1 and longer.chars_of(successors) & followers:
                return True
            pending += [(follower, successors) for follower in _bits(shorter.following[position])]
        return False


def _add(table: dict[Any, int], key: object, bits: int) -> bool:
    """Add bits to an entry. Return whether that changes it."""
    previous = table[key]
    table[key] = previous | bits
    return table[key] != previous


# ------------------------------------------------------------------------ lark
# Write a GBNF grammar in llguidance's Lark.


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
        named = set(_named_tokens(grammar)).difference(tokens.unusable)
        self._named = sorted(token for token in named if token < tokens.size)

    def write(self) -> str:
        """Return the grammar in Lark."""
        self._queue.append(("start", [(Reference(self._grammar.root),)]))
        for name, alternatives in self._queue:  # Writing a rule appends those that it refers to.
            sequences = (self._write_sequence(items, name.isupper()) for items in alternatives)
            self._lines.append(f"{name}: {' | '.join(dict.fromkeys(sequences))}")
        return "\n".join(self._lines)

    def _write_sequence(self, items: Sequence[Element], in_lexeme: bool) -> str:
        return " ".join(self._write_element(item, in_lexeme) for item in items) or '""'

    def _write_element(self, item: Element, in_lexeme: bool) -> str:
        match item:
            case Characters():
                return self._write_character(item)
            case Lexeme():
                return self._write_lexeme(item)
            case TokenMatch():
                return self._write_token(item)
            case Reference():
                name = f"{'R' if in_lexeme else 'r'}{item.symbol}"
                if name not in self._written:
                    self._written.add(name)
                    self._queue.append((name, self._grammar.rules[item.symbol]))
                return name
            case Repeat():
                return self._write_repeated(item.items, in_lexeme) + _write_quantifier(item)

    def _write_lexeme(self, lexeme: Lexeme) -> str:
        if len(lexeme.items) == 1 and isinstance(lexeme.items[0], Characters | Reference):
            return self._write_element(lexeme.items[0], True)
        if lexeme not in self._terminals:
            self._terminals[lexeme] = name = f"L{len(self._terminals)}"
            self._queue.append((name, [lexeme.items]))
        return self._terminals[lexeme]

    def _write_character(self, characters: Characters) -> str:
        if characters not in self._terminals:
            self._terminals[characters] = name = f"C{len(self._terminals)}"
            self._lines.append(f"{name}: {_write_pattern(characters)}")
        return self._terminals[characters]

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


def _named_tokens(grammar: Grammar) -> Iterator[int]:
    """Yield the tokens that the grammar's token terminals name."""
    pending: list[Element] = [
        item for rule in grammar.rules.values() for items in rule for item in items
    ]
    for item in pending:  # The loop body appends to this list.
        if isinstance(item, TokenMatch):
            yield item.token
        elif isinstance(item, Repeat):
            pending += item.items


def _write_quantifier(item: Repeat) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((item.low, item.high))
    return short or f"{{{item.low},{'' if item.high is None else item.high}}}"


def _write_pattern(characters: Characters) -> str:
    """Return a regular expression that matches a set of characters."""
    ranges = (
        f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}"
        for low, high in characters.ranges
    )
    return f"/[{''.join(ranges)}]/"
