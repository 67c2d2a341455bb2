"""GBNF written as llguidance's Lark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from localspec.engine.sampling.grammars.lexemes import divide_into_lexemes


def gbnf_to_lark(source: str, tokens: TokenTable = NO_TOKENS) -> str:
    """Translate a GBNF source to llguidance's Lark. Without a table, no token has a name.

    Raises:
        GrammarSyntaxError: llama.cpp refuses the source, or it exceeds a limit of the parser.
    """
    grammar = parse_gbnf(source, tokens)
    _check_depth(grammar)
    return _Writer(divide_into_lexemes(grammar), tokens).write()


def _check_depth(grammar: Grammar) -> None:
    """Refuse rules that are nested too deeply, in the order in which llguidance will compile them."""
    seen = {grammar.root}
    path = [references(grammar.rules[grammar.root])]
    while path:
        new = next((symbol for symbol in path[-1] if symbol not in seen), None)
        if new is None:
            path.pop()
            continue
        seen.add(new)
        path.append(references(grammar.rules[new]))
        if len(path) > MAX_DEPTH:
            raise GrammarSyntaxError(f"rules and groups are more than {MAX_DEPTH} levels deep.")


class _Writer:
    """Writes a rule for each rule, and a terminal for each lexeme and for each rule within one."""

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
        self._queue.append(("start", [(Reference(self._grammar.root),)]))
        for name, alternatives in self._queue:  # which grows meanwhile
            sequences = (self._sequence(items, name.isupper()) for items in alternatives)
            self._lines.append(f"{name}: {' | '.join(dict.fromkeys(sequences))}")
        return "\n".join(self._lines)

    def _sequence(self, items: Sequence[Element], in_lexeme: bool) -> str:
        return " ".join(self._element(item, in_lexeme) for item in items) or '""'

    def _element(self, item: Element, in_lexeme: bool) -> str:
        match item:
            case Characters():
                return self._character(item)
            case Lexeme():
                return self._lexeme(item)
            case TokenMatch():
                return self._token(item)
            case Reference():
                name = f"{'R' if in_lexeme else 'r'}{item.symbol}"
                if name not in self._written:
                    self._written.add(name)
                    self._queue.append((name, self._grammar.rules[item.symbol]))
                return name
            case Repeat():
                return self._repeated(item.items, in_lexeme) + _quantifier(item)

    def _lexeme(self, lexeme: Lexeme) -> str:
        if len(lexeme.items) == 1 and isinstance(lexeme.items[0], Characters | Reference):
            return self._element(lexeme.items[0], True)
        if lexeme not in self._terminals:
            self._terminals[lexeme] = name = f"L{len(self._terminals)}"
            self._queue.append((name, [lexeme.items]))
        return self._terminals[lexeme]

    def _character(self, characters: Characters) -> str:
        if characters not in self._terminals:
            self._terminals[characters] = name = f"C{len(self._terminals)}"
            self._lines.append(f"{name}: {_pattern(characters)}")
        return self._terminals[characters]

    def _repeated(self, items: Sequence[Element], in_lexeme: bool) -> str:
        """Return one name for what is repeated; a sequence, or something repeated before, gets a rule."""
        if len(items) == 1 and not isinstance(items[0], Repeat):
            return self._element(items[0], in_lexeme)
        self._helpers += 1
        name = f"{'S' if in_lexeme else 's'}{self._helpers}"
        self._queue.append((name, [tuple(items)]))
        return name

    def _token(self, item: TokenMatch) -> str:
        """Write a token terminal.

        Terminals that share a token must be the same for llguidance, which takes the first that fits. So
        "any other token" is one terminal for each token that the grammar names, and one for the rest.
        """
        if not item.negated:
            return self._token_ids([item.token])
        name = f"t{item.token}"
        if name not in self._written:
            self._written.add(name)
            barred = {*self._tokens.unusable, *self._named}
            rest = [token for token in range(self._tokens.size) if token not in barred]
            groups = [rest, *([token] for token in self._named if token != item.token)]
            self._lines.append(f"{name}: {' | '.join(map(self._token_ids, filter(None, groups)))}")
        return name

    def _token_ids(self, tokens: Sequence[int]) -> str:
        """Write a terminal for any of the tokens, which are sorted."""
        ranges: list[list[int]] = []
        for token in tokens:
            if ranges and ranges[-1][1] == token - 1:
                ranges[-1][1] = token
            else:
                ranges.append([token, token])
        return f"<[{','.join(f'{low}-{high}' for low, high in ranges)}]>"


def _named_tokens(grammar: Grammar) -> Iterator[int]:
    """Yield the tokens that token terminals name."""
    pending: list[Element] = [
        item for rule in grammar.rules.values() for items in rule for item in items
    ]
    for item in pending:  # which grows meanwhile
        if isinstance(item, TokenMatch):
            yield item.token
        elif isinstance(item, Repeat):
            pending += item.items


def _quantifier(item: Repeat) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((item.low, item.high))
    return short or f"{{{item.low},{'' if item.high is None else item.high}}}"


def _pattern(characters: Characters) -> str:
    """Write a set of characters as a regular expression."""
    ranges = (
        f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}"
        for low, high in characters.ranges
    )
    return f"/[{''.join(ranges)}]/"
