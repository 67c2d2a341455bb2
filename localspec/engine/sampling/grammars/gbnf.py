"""GBNF, llama.cpp's notation for grammars, read as llama.cpp reads it and written for llguidance.

The parser follows `src/llama-grammar.cpp` of llama.cpp, including what is not in its documentation: a
source is accepted or refused as there. Some things differ, in what nobody writes on purpose:

- A source with a NUL in it is refused. llama.cpp would pass over everything behind the NUL.
- `{5,3}` is refused. llama.cpp would fill the memory.
- What cannot be finished is no part of an answer: `"a" | "b" [z-a]` is "a". llama.cpp would allow the "b",
  and nothing behind it. A grammar that no text matches is refused.
- Nesting is limited (MAX_DEPTH, MAX_QUANTIFIERS). llama.cpp would overflow its stack at some depth.

`lexemes` decides which parts llguidance reads as one, and `lark` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MAX_REPETITIONS = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD
MAX_DEPTH = 200  # rules and groups one within the other; llguidance compiles them by recursion
MAX_QUANTIFIERS = 20  # on one element, one behind the other

_UNLIMITED = 2**64 - 1  # llama.cpp reads bounds and token ids as unsigned 64-bit numbers
_MAX_TOKEN = 2**32 - 1
# What UTF-8 text can contain, but NUL: llama.cpp matches no token that begins with it.
_UNIVERSE = ((0x01, 0xD7FF), (0xE000, 0x10FFFF))

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*+")
_SPACE_OR_NEWLINE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*+")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_DIGITS = re.compile(r"[0-9]+")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {char: char for char in '\\"[]-'}


class GrammarSyntaxError(ValueError):
    """A source that is no GBNF. The message says where, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Characters:
    """Any one character within the ranges, which are sorted and disjoint. None match where there are none."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TokenMatch:
    """One token of the vocabulary, or any other one."""

    token: int
    negated: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule, by its symbol."""

    symbol: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """A sequence between `low` and `high` times; without `high`, any number of times from `low` on."""

    items: tuple[Element, ...]
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A sequence that llguidance's lexer reads as one. `lexemes` makes them, not the parser."""

    items: tuple[Element, ...]


Element = Characters | TokenMatch | Reference | Repeat | Lexeme
Alternatives = list[tuple[Element, ...]]


@dataclass(frozen=True)
class TokenTable:
    """What token terminals need of a vocabulary.

    ids: the tokens that `<…>` may name, by their text with the brackets. unusable: tokens that no grammar
    can match, since they end an answer or have no text.
    """

    size: int = 0
    ids: Mapping[str, int] = field(default_factory=dict)
    unusable: Collection[int] = ()


NO_TOKENS = TokenTable()


@dataclass(frozen=True)
class Grammar:
    """A parsed grammar. A group is a rule of its own, as in llama.cpp."""

    rules: dict[int, Alternatives]
    root: int


def parse_gbnf(source: str, tokens: TokenTable) -> Grammar:
    """Parse a GBNF source.

    Raises:
        GrammarSyntaxError: llama.cpp refuses the source, or it exceeds a limit of this module.
    """
    return _Parser(source, tokens).parse()


# ------------------------------------------------------------------ reading


@dataclass
class _Body:
    """The body of a rule or group that is being read.

    space: what may stand between elements; newlines only in a group. last: where the last element begins in
    the sequence; a quantifier holds for all from there on. weight: how many rules llama.cpp would repeat
    with it, for its limit. quantifiers: how many it has.
    """

    symbol: int
    symbols_before: int
    space: re.Pattern[str]
    alternatives: Alternatives = field(default_factory=list)
    sequence: list[Element] = field(default_factory=list)
    last: int = 0
    weight: int = 1
    quantifiers: int = 0

    def begin_element(self, weight: int = 1) -> None:
        self.last = len(self.sequence)
        self.weight = weight
        self.quantifiers = 0

    def end_alternative(self) -> None:
        self.alternatives.append(tuple(self.sequence))
        self.sequence = []
        self.begin_element()


class _Parser:
    """Reads one source.

    Symbols are numbered as in llama.cpp, whose verdict on undefined rules and on repetitions depends on
    their numbers.
    """

    def __init__(self, source: str, tokens: TokenTable) -> None:
        self._source = source
        self._tokens = tokens
        self._at = 0
        self._symbols = 0
        self._names: dict[str, int] = {}
        self._used_at: dict[int, int] = {}  # symbol: where its name stands first
        self._rules: dict[int, Alternatives] = {}
        self._repeats: list[Repeat] = []  # those that are rules of their own in llama.cpp
        self._last_defined = -1  # the highest symbol that has a definition

    def parse(self) -> Grammar:
        source = self._source
        if "\0" in source:
            self._at = source.index("\0")
            raise self._error("GBNF, which has no NUL characters")
        self._skip(_SPACE_OR_NEWLINE)
        while self._at < len(source):
            self._read_rule()
        self._check_definitions()
        self._check_left_recursion()
        return _without_dead_ends(Grammar(self._rules, self._names["root"]))

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Pass over what the pattern matches here, which may be nothing, and return it."""
        found = pattern.match(self._source, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found.group()

    def _error(self, expected: str, at: int | None = None) -> GrammarSyntaxError:
        at = self._at if at is None else at
        lines = list(_NEWLINE.finditer(self._source, 0, at))
        column = at - (lines[-1].end() if lines else 0) + 1
        char = self._source[at : at + 1]
        if not char:
            found = "the end"
        elif char in "\r\n":
            found = "the end of the line"
        else:
            found = f"'{char}'" if char.isprintable() else f"U+{ord(char):04X}"
        return GrammarSyntaxError(
            f"line {len(lines) + 1}, column {column}: found {found}, expected {expected}."
        )

    def _new_symbol(self, count: int = 1) -> int:
        self._symbols += count
        return self._symbols - 1

    def _named(self, name: str, at: int) -> int:
        if name not in self._names:
            self._names[name] = symbol = self._new_symbol()
            self._used_at[symbol] = at
        return self._names[name]

    # -------------------------------------------------------------- rules

    def _define(self, symbol: int, alternatives: Alternatives) -> None:
        """Define a rule; the last definition of a name counts."""
        self._rules[symbol] = alternatives
        self._last_defined = max(self._last_defined, symbol)

    def _read_rule(self) -> None:
        start = self._at
        name = self._skip(_NAME)
        if not name:
            raise self._error("the name of a rule")
        self._skip(_SPACE)
        symbol = self._named(name, start)
        if not self._source.startswith("::=", self._at):
            raise self._error("'::='")
        self._at += 3
        self._skip(_SPACE_OR_NEWLINE)
        self._define(symbol, self._read_body(symbol))
        if self._at < len(self._source) and not self._skip(_NEWLINE):
            raise self._error("an element, '|' or the end of the rule")
        self._skip(_SPACE_OR_NEWLINE)

    def _read_body(self, symbol: int) -> Alternatives:
        """Read alternatives up to the end of a rule. The groups within each other are a stack."""
        stack = [_Body(symbol, self._symbols, _SPACE)]
        while True:
            body, nested = stack[-1], len(stack) > 1
            char = self._peek()
            if char == "(":
                self._at += 1
                self._skip(_SPACE_OR_NEWLINE)
                before = self._symbols
                stack.append(_Body(self._new_symbol(), before, _SPACE_OR_NEWLINE))
            elif char == "|":
                self._at += 1
                self._skip(_SPACE_OR_NEWLINE)
                body.end_alternative()
            elif char == ")" and nested:
                self._at += 1
                body.end_alternative()
                self._define(body.symbol, body.alternatives)
                stack.pop()
                stack[-1].begin_element(max(1, self._symbols - body.symbols_before))
                stack[-1].sequence.append(Reference(body.symbol))
                self._skip(stack[-1].space)
            elif self._read_element(body, char):
                self._skip(body.space)
            elif nested:
                raise self._error("an element, '|' or ')'")
            else:
                body.end_alternative()
                return body.alternatives

    def _read_element(self, body: _Body, char: str) -> bool:
        """Read one element, or a quantifier of the last one. Returns False where neither begins here."""
        if char and char in "*+?{":
            self._read_quantifier(body, char)
            return True
        if char == '"':
            body.begin_element()
            body.sequence += self._read_literal()
        elif char == "[":
            body.begin_element()
            body.sequence += self._read_class()
        elif char == ".":
            self._at += 1
            body.begin_element()
            body.sequence.append(Characters(_UNIVERSE))
        elif char and char in "<!":
            body.begin_element()
            body.sequence.append(self._read_token())
        else:
            start = self._at
            name = self._skip(_NAME)
            if not name:
                return False
            body.begin_element()
            body.sequence.append(Reference(self._named(name, start)))
        return True

    # -------------------------------------------------------------- characters

    def _read_literal(self) -> Iterator[Characters]:
        self._at += 1
        while self._peek() != '"':
            char = self._read_char("'\"' at the end of the text")
            yield characters([(char, char)], negated=False)
        self._at += 1

    def _read_class(self) -> list[Characters]:
        """Read a class. One without characters, `[]` or `[^]`, is no element in llama.cpp."""
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            low = high = self._read_char("']' at the end of the class")
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._read_char("the end of the range")
            ranges.append((low, high))
        self._at += 1
        return [characters(ranges, negated)] if ranges else []

    def _read_char(self, expected: str) -> int:
        """Read one character or escape of a text or class, and return its code point."""
        char = self._peek()
        if not char:
            raise self._error(expected)
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        if kind in _HEX:
            digits = self._source[self._at + 1 : self._at + 1 + _HEX[kind]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
                wrong = re.match("[0-9a-fA-F]*", digits)
                self._at += 1 + (wrong.end() if wrong else 0)
                raise self._error(f"{_HEX[kind]} hexadecimal digits after '\\{kind}'")
            self._at += 1 + len(digits)
            return int(digits, 16)
        if not kind or kind not in _ESCAPES:
            raise self._error('one of x u U t r n \\ " [ ] - after the backslash')
        self._at += 1
        return ord(_ESCAPES[kind])

    # -------------------------------------------------------------- tokens

    def _read_token(self) -> Element:
        negated = self._peek() == "!"
        self._at += negated
        start = self._at
        if self._peek() != "<":
            raise self._error("'<' after '!'")
        self._at += 1
        if self._peek() == "[":
            self._at += 1
            token = self._read_int("a token id")
            if token > _MAX_TOKEN:
                raise self._error(f"a token id of at most {_MAX_TOKEN}", start + 2)
            for closing in "]>":
                if self._peek() != closing:
                    raise self._error("']>' after the token id")
                self._at += 1
            return self._token(token, negated)
        end = self._source.find(">", self._at)
        if end < 0:
            self._at = len(self._source)
            raise self._error("'>' at the end of the token")
        text = self._source[start : end + 1]
        if text not in self._tokens.ids:
            raise self._error(f"a token of the model, which '{text[:40]}' is not", start)
        self._at = end + 1
        return self._token(self._tokens.ids[text], negated)

    def _token(self, token: int, negated: bool) -> Element:
        usable = token < self._tokens.size and token not in self._tokens.unusable
        return TokenMatch(token, negated) if usable or negated else Characters(())

    def _read_int(self, expected: str) -> int:
        start = self._at
        digits = self._skip(_DIGITS)
        if not digits:
            raise self._error(expected)
        if len(digits.lstrip("0")) > 20 or int(digits) > _UNLIMITED:
            raise self._error("a number below 2^64", start)
        return int(digits)

    # -------------------------------------------------------------- quantifiers

    def _read_quantifier(self, body: _Body, char: str) -> None:
        start = self._at
        self._at += 1
        if char == "{":
            low, high = self._read_bounds(start, body.space)
        else:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        if body.last == len(body.sequence):
            raise self._error("something to repeat before it", start)
        times = high or low or 1
        body.weight *= times
        if body.weight > MAX_REPETITIONS:
            raise self._error(f"at most {MAX_REPETITIONS} repetitions of rules", start)
        body.quantifiers += 1
        if body.quantifiers > MAX_QUANTIFIERS:
            raise self._error(f"at most {MAX_QUANTIFIERS} quantifiers on one element", start)
        items = tuple(body.sequence[body.last :])
        optional = 1 if high is None else high - low  # rules that llama.cpp makes of it
        del body.sequence[body.last :]
        if high != 0:
            body.sequence.append(Repeat(items, low, high))
        if optional:
            self._last_defined = max(self._last_defined, self._new_symbol(optional))
            self._repeats.append(Repeat(items, low, high))

    def _read_bounds(self, start: int, space: re.Pattern[str]) -> tuple[int, int | None]:
        self._skip(space)
        low = self._read_int("a number of repetitions")
        high: int | None = low
        self._skip(space)
        if self._peek() == ",":
            self._at += 1
            self._skip(space)
            high = self._read_int("") if _DIGITS.match(self._source, self._at) else None
            self._skip(space)
            if self._peek() != "}":
                raise self._error("'}' or a number of repetitions")
        elif self._peek() != "}":
            raise self._error("',' or '}'")
        self._at += 1
        if low > MAX_REPETITIONS:
            raise self._error(f"at most {MAX_REPETITIONS} repetitions", start)
        if high is not None and high > MAX_REPETITIONS:
            high = None
        if high is not None and high < low:
            raise self._error("a second bound that is not below the first", start)
        return low, high

    # -------------------------------------------------------------- what llama.cpp checks in the end

    def _check_definitions(self) -> None:
        if "root" not in self._names:
            raise GrammarSyntaxError("there is no rule named 'root'.")
        live = [items for rule in self._rules.values() for items in rule]
        live += [repeat.items for repeat in self._repeats]
        used = set(references(live))
        # A name that only an element with {0} uses, or a definition that another one replaced, may be
        # undefined if no rule has a higher number: llama.cpp looks at a list with gaps.
        used |= {symbol for symbol in self._used_at if symbol <= self._last_defined}
        undefined = [symbol for symbol in used if symbol not in self._rules]
        if undefined:
            first = min(undefined, key=lambda symbol: self._used_at[symbol])
            name = next(name for name, symbol in self._names.items() if symbol == first)
            raise self._error(
                f"a rule that is defined, which '{name}' is not", self._used_at[first]
            )

    def _check_left_recursion(self) -> None:
        """Refuse what may begin with itself.

        llguidance would accept it, but a grammar should not work here and nowhere else. llama.cpp takes a
        rule for one that may be empty only if one of its alternatives has no element; so does this.
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
        cycle = _find_cycle(edges)
        if cycle is not None:
            names = {symbol: name for name, symbol in self._names.items()}
            named = next((names[symbol] for symbol in cycle if symbol in names), "")
            raise GrammarSyntaxError(
                f"the rule '{named}' begins with itself (left recursion); write it as a repetition."
            )

    def _leftmost(self, items: Sequence[Element]) -> tuple[set[int], bool]:
        """Return the rules that a sequence may begin with, and whether it has no element that stops them."""
        symbols: set[int] = set()
        for item in items:
            if isinstance(item, Reference):
                symbols.add(item.symbol)
                passes = item.symbol in self._empty
            elif isinstance(item, Repeat):
                inner, passes = self._leftmost(item.items)
                symbols |= inner
                passes = passes or item.low == 0
            else:
                passes = False
            if not passes:
                return symbols, False
        return symbols, True


def characters(ranges: Iterable[tuple[int, int]], negated: bool) -> Characters:
    """Return the characters that the ranges contain, or all others. A range that runs backwards is empty."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted((low, high) for low, high in ranges if low <= high):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    if negated:
        edges = [(-1, -1), *merged, (_MAX_TOKEN + 1, _MAX_TOKEN + 1)]
        merged = [(before[1] + 1, after[0] - 1) for before, after in pairwise(edges)]
    within = (
        (max(low, first), min(high, last)) for low, high in merged for first, last in _UNIVERSE
    )
    return Characters(tuple((low, high) for low, high in within if low <= high))


def references(sequences: Iterable[Iterable[Element]]) -> Iterator[int]:
    """Yield the rules that sequences refer to, apart from what is within lexemes."""
    for items in sequences:
        for item in items:
            if isinstance(item, Reference):
                yield item.symbol
            elif isinstance(item, Repeat):
                yield from references([item.items])


def _find_cycle(edges: Mapping[int, Iterable[int]]) -> list[int] | None:
    """Return the nodes of one cycle, or None. No recursion: a chain may be as long as the source."""
    done: set[int] = set()
    for start in edges:
        path: dict[int, Iterator[int]] = {}  # in the order of the path
        if start not in done:
            path[start] = iter(edges[start])
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
    return None


def _without_dead_ends(grammar: Grammar) -> Grammar:
    """Leave out alternatives that need a character or token which nothing matches."""
    dead: set[int] = set()

    def is_dead(items: Iterable[Element]) -> bool:
        for item in items:
            match item:
                case Characters(ranges=()):
                    return True
                case Reference() if item.symbol in dead:
                    return True
                case Repeat() if item.low > 0 and is_dead(item.items):
                    return True
        return False

    def pruned(items: Iterable[Element]) -> tuple[Element, ...]:
        kept = (item for item in items if not (isinstance(item, Repeat) and is_dead(item.items)))
        return tuple(
            Repeat(pruned(item.items), item.low, item.high) if isinstance(item, Repeat) else item
            for item in kept
        )

    users: dict[int, set[int]] = {}
    for symbol, rule in grammar.rules.items():
        for used in references(rule):
            users.setdefault(used, set()).add(symbol)
    pending = list(grammar.rules)
    for symbol in pending:  # which grows meanwhile
        if symbol not in dead and all(map(is_dead, grammar.rules[symbol])):
            dead.add(symbol)
            pending += users.get(symbol, ())
    if grammar.root in dead:
        raise GrammarSyntaxError("no text matches it.")
    rules = {
        symbol: [pruned(items) for items in rule if not is_dead(items)]
        for symbol, rule in grammar.rules.items()
        if symbol not in dead
    }
    return Grammar(rules, grammar.root)
