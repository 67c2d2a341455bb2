"""Write a GBNF grammar in llguidance's Lark."""

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
