"""Parse GBNF, llama.cpp's notation for grammars, exactly as llama.cpp does.

The parser follows `src/llama-grammar.cpp` of llama.cpp, including undocumented behaviour, so that it accepts
and rejects the same sources. It differs only in sources that nobody writes on purpose:

- A source that contains a NUL is rejected. llama.cpp would ignore everything after the NUL.
- `{5,3}` is rejected. llama.cpp would run out of memory.
- An alternative that cannot be completed is removed: `"a" | "b" [z-a]` matches "a". llama.cpp would allow the
  "b", and then nothing. A grammar that no text matches is rejected.
- Nesting is limited (MAX_DEPTH, MAX_QUANTIFIERS). llama.cpp would overflow its stack at some depth.

`lexemes` decides which parts llguidance's lexer reads as units, and `compile` writes the grammar for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MAX_REPETITIONS = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD
MAX_DEPTH = 200  # Nesting of rules and groups, which llguidance compiles recursively.
MAX_QUANTIFIERS = 20  # Consecutive quantifiers on one element.

_MAX_NUMBER = 2**64 - 1  # llama.cpp reads bounds and token ids as unsigned 64-bit integers.
_MAX_TOKEN = 2**32 - 1
_MAX_ESCAPE = 2**32 - 1  # The largest code point that \UFFFFFFFF can write.
# The characters of UTF-8 text, without NUL, because llama.cpp matches no token that begins with NUL.
_UNIVERSE = ((0x01, 0xD7FF), (0xE000, 0x10FFFF))

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*+")
_SPACE_OR_NEWLINE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*+")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DIGITS = re.compile(r"[0-9]+")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_HEX = {"x": re.compile("[0-9a-fA-F]{0,2}"), "u": re.compile("[0-9a-fA-F]{0,4}")}
_HEX["U"] = re.compile("[0-9a-fA-F]{0,8}")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {char: char for char in '\\"[]-'}


class GrammarSyntaxError(ValueError):
    """Raised for a source that is not GBNF. The message gives the place and what was expected there."""


@dataclass(frozen=True, slots=True)
class Characters:
    """Any one character within sorted, disjoint ranges. Without ranges, no character matches."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TokenMatch:
    """The token `token` of the vocabulary, or, if negated, any other token."""

    token: int
    negated: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a rule by its symbol."""

    symbol: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """A sequence repeated between `low` and `high` times; without `high`, at least `low` times."""

    items: tuple[Element, ...]
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A sequence that llguidance's lexer reads as a unit. `lexemes` creates them, not the parser."""

    items: tuple[Element, ...]


Element = Characters | TokenMatch | Reference | Repeat | Lexeme
Alternatives = list[tuple[Element, ...]]


@dataclass(frozen=True)
class TokenTable:
    """The parts of a vocabulary that token terminals need.

    ids: the tokens that `<…>` may name, by their text including the brackets. unusable: tokens that no
    grammar can match, because they end an answer or have no text.
    """

    size: int = 0
    ids: Mapping[str, int] = field(default_factory=dict)
    unusable: Collection[int] = ()


NO_TOKENS = TokenTable()


@dataclass(frozen=True)
class Grammar:
    """A parsed grammar. Each group is a rule of its own, as in llama.cpp."""

    rules: dict[int, Alternatives]
    root: int


def parse_gbnf(source: str, tokens: TokenTable) -> Grammar:
    """Parse a GBNF source.

    Raises:
        GrammarSyntaxError: llama.cpp rejects the source, or it exceeds a limit of this module.
    """
    return _Parser(source, tokens).parse()


@dataclass
class _Body:
    """The body of a rule or group that is being read.

    space: the blanks allowed between elements; newlines are allowed only in groups.
    last_start: the index in `sequence` at which the last element begins; a quantifier applies from there on.
    weight: the number of rules that llama.cpp would repeat with the last element, which it limits.
    quantifiers: the number of quantifiers on the last element.
    """

    symbol: int
    symbols_before: int
    space: re.Pattern[str]
    alternatives: Alternatives = field(default_factory=list)
    sequence: list[Element] = field(default_factory=list)
    last_start: int = 0
    weight: int = 1
    quantifiers: int = 0

    def add(self, items: Iterable[Element], weight: int = 1) -> None:
        """Add an element, to which the next quantifier applies."""
        self.last_start = len(self.sequence)
        self.weight, self.quantifiers = weight, 0
        self.sequence += items

    def end_alternative(self) -> None:
        self.alternatives.append(tuple(self.sequence))
        self.sequence = []
        self.add(())


class _Parser:
    """A parser of one source.

    Symbols are numbered as in llama.cpp, because its treatment of undefined rules and of repetitions depends
    on their numbers.
    """

    def __init__(self, source: str, tokens: TokenTable) -> None:
        self._source = source
        self._tokens = tokens
        self._position = 0
        self._symbols = 0
        self._names: dict[str, int] = {}
        self._used_at: dict[int, int] = {}  # For each symbol, the first position of its name.
        self._rules: dict[int, Alternatives] = {}
        self._repeats: list[Repeat] = []  # Repetitions that are rules of their own in llama.cpp.
        self._last_defined = -1  # The highest symbol that has a definition.

    def parse(self) -> Grammar:
        source = self._source
        if "\0" in source:
            raise self._error("GBNF, which has no NUL characters", source.index("\0"))
        self._skip(_SPACE_OR_NEWLINE)
        while self._position < len(source):
            self._read_rule()
        self._check_definitions()
        self._check_left_recursion()
        return _without_dead_ends(Grammar(self._rules, self._names["root"]))

    def _peek(self) -> str:
        return self._source[self._position : self._position + 1]

    def _take(self, text: str) -> bool:
        """Skip `text`. Return whether it was there."""
        found = self._source.startswith(text, self._position)
        self._position += len(text) * found
        return found

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Skip the text that the pattern matches at the position, which may be empty, and return it."""
        match = pattern.match(self._source, self._position)
        if match is None:
            return ""
        self._position = match.end()
        return match.group()

    def _error(self, expected: str, position: int | None = None) -> GrammarSyntaxError:
        """Return the error of a source that has something other than `expected` at a position."""
        position = self._position if position is None else position
        lines = _NEWLINE.split(self._source[:position])
        char = self._source[position : position + 1]
        if not char:
            actual = "the end"
        elif char in "\r\n":
            actual = "the end of the line"
        else:
            actual = f"'{char}'" if char.isprintable() else f"U+{ord(char):04X}"
        return GrammarSyntaxError(
            f"line {len(lines)}, column {len(lines[-1]) + 1}: found {actual}, expected {expected}."
        )

    def _new_symbol(self, count: int = 1) -> int:
        self._symbols += count
        return self._symbols - 1

    def _symbol_of(self, name: str, position: int) -> int:
        """Return the symbol of a rule's name, which stands at `position`; a new one if it is new."""
        if name not in self._names:
            self._names[name] = symbol = self._new_symbol()
            self._used_at[symbol] = position
        return self._names[name]

    def _define(self, symbol: int, alternatives: Alternatives) -> None:
        """Define a rule, replacing an earlier definition."""
        self._rules[symbol] = alternatives
        self._last_defined = max(self._last_defined, symbol)

    def _read_rule(self) -> None:
        start = self._position
        name = self._skip(_NAME)
        if not name:
            raise self._error("the name of a rule")
        self._skip(_SPACE)
        symbol = self._symbol_of(name, start)
        if not self._take("::="):
            raise self._error("'::='")
        self._skip(_SPACE_OR_NEWLINE)
        self._define(symbol, self._read_body(symbol))
        if self._position < len(self._source) and not self._skip(_NEWLINE):
            raise self._error("an element, '|' or the end of the rule")
        self._skip(_SPACE_OR_NEWLINE)

    def _read_body(self, symbol: int) -> Alternatives:
        """Read the alternatives of a rule up to its end, with a stack for nested groups."""
        stack = [_Body(symbol, self._symbols, _SPACE)]
        while True:
            body, nested = stack[-1], len(stack) > 1
            if self._take("("):
                symbols_before = self._symbols
                stack.append(_Body(self._new_symbol(), symbols_before, _SPACE_OR_NEWLINE))
                self._skip(_SPACE_OR_NEWLINE)
            elif self._take("|"):
                self._skip(_SPACE_OR_NEWLINE)
                body.end_alternative()
            elif nested and self._take(")"):
                body.end_alternative()
                self._define(body.symbol, body.alternatives)
                stack.pop()
                weight = max(1, self._symbols - body.symbols_before)
                stack[-1].add([Reference(body.symbol)], weight)
                self._skip(stack[-1].space)
            elif self._read_element(body):
                self._skip(body.space)
            elif nested:
                raise self._error("an element, '|' or ')'")
            else:
                body.end_alternative()
                return body.alternatives

    def _read_element(self, body: _Body) -> bool:
        """Read one element or a quantifier of the last one. Return False if there is neither."""
        start, char = self._position, self._peek()
        if char and char in "*+?{":
            self._read_quantifier(body, char)
        elif self._take('"'):
            body.add(self._read_literal())
        elif self._take("["):
            body.add(self._read_class())
        elif self._take("."):
            body.add([Characters(_UNIVERSE)])
        elif char and char in "<!":
            body.add([self._read_token()])
        elif name := self._skip(_NAME):
            body.add([Reference(self._symbol_of(name, start))])
        else:
            return False
        return True

    def _read_literal(self) -> Iterator[Characters]:
        while not self._take('"'):
            char = self._read_char("'\"' at the end of the text")
            yield characters([(char, char)], negated=False)

    def _read_class(self) -> list[Characters]:
        """Read a character class. An empty one, `[]` or `[^]`, is not an element in llama.cpp."""
        negated = self._take("^")
        ranges = []
        while not self._take("]"):
            low = high = self._read_char("']' at the end of the class")
            if self._peek() == "-" and self._source[self._position + 1 : self._position + 2] != "]":
                self._position += 1
                high = self._read_char("the end of the range")
            ranges.append((low, high))
        return [characters(ranges, negated)] if ranges else []

    def _read_char(self, expected: str) -> int:
        """Read one character or escape of a text or class, and return its code point."""
        char = self._peek()
        if not char:
            raise self._error(expected)
        self._position += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        if kind not in _ESCAPES and kind not in _HEX:
            raise self._error('one of x u U t r n \\ " [ ] - after the backslash')
        self._position += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        digits, length = self._skip(_HEX[kind]), {"x": 2, "u": 4, "U": 8}[kind]
        if len(digits) < length:
            raise self._error(f"{length} hexadecimal digits after '\\{kind}'")
        return int(digits, 16)

    def _read_token(self) -> Element:
        negated = self._take("!")
        start = self._position
        if not self._take("<"):
            raise self._error("'<' after '!'")
        if self._take("["):
            token = self._read_int("a token id")
            if token > _MAX_TOKEN:
                raise self._error(f"a token id of at most {_MAX_TOKEN}", start + 2)
            for closing in "]>":
                if not self._take(closing):
                    raise self._error("']>' after the token id")
        else:
            end = self._source.find(">", self._position)
            if end < 0:
                raise self._error("'>' at the end of the token", len(self._source))
            text = self._source[start : end + 1]
            if text not in self._tokens.ids:
                raise self._error(f"a token of the model, which '{text[:40]}' is not", start)
            self._position = end + 1
            token = self._tokens.ids[text]
        usable = token < self._tokens.size and token not in self._tokens.unusable
        return TokenMatch(token, negated) if usable or negated else Characters(())

    def _read_int(self, expected: str) -> int:
        start = self._position
        digits = self._skip(_DIGITS)
        if not digits:
            raise self._error(expected)
        if len(digits.lstrip("0")) > 20 or int(digits) > _MAX_NUMBER:
            raise self._error("a number below 2^64", start)
        return int(digits)

    def _read_quantifier(self, body: _Body, char: str) -> None:
        start = self._position
        self._position += 1
        if char == "{":
            low, high = self._read_bounds(start, body.space)
        else:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if body.last_start == len(body.sequence):
            raise self._error("something to repeat before it", start)
        body.weight *= high or low or 1
        if body.weight > MAX_REPETITIONS:
            raise self._error(f"at most {MAX_REPETITIONS} repetitions of rules", start)
        body.quantifiers += 1
        if body.quantifiers > MAX_QUANTIFIERS:
            raise self._error(f"at most {MAX_QUANTIFIERS} quantifiers on one element", start)
        repeat = Repeat(tuple(body.sequence[body.last_start :]), low, high)
        body.sequence[body.last_start :] = [repeat] if high != 0 else []
        # The number of rules that llama.cpp creates for it.
        if optional := 1 if high is None else high - low:
            self._last_defined = max(self._last_defined, self._new_symbol(optional))
            self._repeats.append(repeat)

    def _read_bounds(self, start: int, space: re.Pattern[str]) -> tuple[int, int | None]:
        self._skip(space)
        low = self._read_int("a number of repetitions")
        high: int | None = low
        self._skip(space)
        expected = "',' or '}'"
        if self._take(","):
            self._skip(space)
            high = self._read_int("") if _DIGITS.match(self._source, self._position) else None
            self._skip(space)
            expected = "'}' or a number of repetitions"
        if not self._take("}"):
            raise self._error(expected)
        if low > MAX_REPETITIONS:
            raise self._error(f"at most {MAX_REPETITIONS} repetitions", start)
        if high is not None and high > MAX_REPETITIONS:
            high = None
        if high is not None and high < low:
            raise self._error("a second bound that is not below the first", start)
        return low, high

    def _check_definitions(self) -> None:
        """Reject references to rules without a definition, as llama.cpp does."""
        if "root" not in self._names:
            raise GrammarSyntaxError("there is no rule named 'root'.")
        live = [items for rule in self._rules.values() for items in rule]
        live += [repeat.items for repeat in self._repeats]
        # A name may be undefined if it is used only by an element with {0} or by a replaced definition, and
        # if no rule has a higher number. llama.cpp checks its list of rules only up to the last definition.
        used = {symbol for symbol in self._used_at if symbol <= self._last_defined}
        if undefined := used.union(references(live)) - self._rules.keys():
            first = min(undefined, key=self._used_at.__getitem__)
            name = next(name for name, symbol in self._names.items() if symbol == first)
            raise self._error(
                f"a rule that is defined, which '{name}' is not", self._used_at[first]
            )

    def _check_left_recursion(self) -> None:
        """Reject rules that may begin with themselves.

        llguidance would accept them, but a grammar that works here should also work with llama.cpp. As in
        llama.cpp, a rule counts as possibly empty only if one of its alternatives has no element.
        """
        self._empty = {symbol for symbol, rule in self._rules.items() if () in rule}
        for repeat in self._repeats:
            if repeat.high is None and self._leftmost(repeat.items)[1]:
                raise GrammarSyntaxError(
                    "what is repeated without limit must not be empty, but an alternative of it is."
                )
        edges = {
            symbol: {first for items in rule for first in self._leftmost(items)[0]}
            for symbol, rule in self._rules.items()
        }
        if cycle := _find_cycle(edges):
            names = {symbol: name for name, symbol in self._names.items()}
            name = next((names[symbol] for symbol in cycle if symbol in names), "")
            raise GrammarSyntaxError(
                f"the rule '{name}' begins with itself (left recursion); write it as a repetition."
            )

    def _leftmost(self, items: Sequence[Element]) -> tuple[set[int], bool]:
        """Return the rules that a sequence may begin with, and whether it may be empty."""
        symbols: set[int] = set()
        for item in items:
            if isinstance(item, Reference):
                symbols.add(item.symbol)
                may_be_empty = item.symbol in self._empty
            elif isinstance(item, Repeat):
                inner, may_be_empty = self._leftmost(item.items)
                symbols |= inner
                may_be_empty = may_be_empty or item.low == 0
            else:
                may_be_empty = False
            if not may_be_empty:
                return symbols, False
        return symbols, True


def characters(ranges: Iterable[tuple[int, int]], negated: bool) -> Characters:
    """Return the characters in the ranges or, if negated, all others. A reversed range is empty."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted((low, high) for low, high in ranges if low <= high):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    if negated:
        edges = [(-1, -1), *merged, (_MAX_ESCAPE + 1, _MAX_ESCAPE + 1)]
        merged = [(below[1] + 1, above[0] - 1) for below, above in pairwise(edges)]
    within = (
        (max(low, first), min(high, last)) for low, high in merged for first, last in _UNIVERSE
    )
    return Characters(tuple((low, high) for low, high in within if low <= high))


def elements(sequences: Iterable[Iterable[Element]]) -> Iterator[Element]:
    """Yield the elements of sequences and those that they repeat, except those within lexemes."""
    for items in sequences:
        for item in items:
            yield item
            if isinstance(item, Repeat):
                yield from elements([item.items])


def references(sequences: Iterable[Iterable[Element]]) -> Iterator[int]:
    """Yield the symbols of the rules that sequences refer to, except those within lexemes."""
    return (item.symbol for item in elements(sequences) if isinstance(item, Reference))


def _find_cycle(edges: Mapping[int, Iterable[int]]) -> list[int]:
    """Return the nodes of one cycle, if there is one."""
    done: set[int] = set()
    for start in edges:
        # The search is not recursive, because a path may be as long as the source. Nodes are in the order of
        # the path, with their unvisited edges.
        path = {} if start in done else {start: iter(edges[start])}
        while path:
            node = next(reversed(path))
            following = next(path[node], None)
            if following is None:
                done.add(node)
                del path[node]
            elif following in path:
                nodes = list(path)
                return nodes[nodes.index(following) :]
            elif following not in done:
                path[following] = iter(edges[following])
    return []


def _without_dead_ends(grammar: Grammar) -> Grammar:
    """Remove alternatives that need a character or token which nothing matches."""
    dead: set[int] = set()

    def is_dead(items: Iterable[Element]) -> bool:
        return any(
            item == Characters(())
            or (isinstance(item, Reference) and item.symbol in dead)
            or (isinstance(item, Repeat) and item.low > 0 and is_dead(item.items))
            for item in items
        )

    def prune(items: Iterable[Element]) -> tuple[Element, ...]:
        return tuple(
            Repeat(prune(item.items), item.low, item.high) if isinstance(item, Repeat) else item
            for item in items
            if not (isinstance(item, Repeat) and is_dead(item.items))
        )

    users: dict[int, set[int]] = {}
    for symbol, rule in grammar.rules.items():
        for used in references(rule):
            users.setdefault(used, set()).add(symbol)
    pending = list(grammar.rules)
    for symbol in pending:  # The loop body appends to this list.
        if symbol not in dead and all(map(is_dead, grammar.rules[symbol])):
            dead.add(symbol)
            pending += users.get(symbol, ())
    if grammar.root in dead:
        raise GrammarSyntaxError("no text matches it.")
    rules = {
        symbol: [prune(items) for items in rule if not is_dead(items)]
        for symbol, rule in grammar.rules.items()
        if symbol not in dead
    }
    return Grammar(rules, grammar.root)
