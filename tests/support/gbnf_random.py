"""Random grammars in GBNF, in every spelling that llama.cpp reads, and broken ones."""

from __future__ import annotations

import random

# Few characters, so that classes overlap and grammars are ambiguous; of one to four bytes.
LETTERS = 'abcab01 \n"\\-]^é語🦊'
NAMES = ("root", "x", "item-2", "Y", "0z")
# Tokens of the vocabulary beside those of one byte.
PIECES = [
    "ab",
    "ba",
    "aa",
    "abc",
    "bb",
    "01",
    "a b",
    "b\n",
    '"a',
    "é",
    "語",
    "🦊",
    "éa",
    "a語",
    "cab",
]


class RandomGrammar:
    """One random grammar.

    tokens: what token terminals may be used. dead_ends: whether classes that match nothing are. blind: no
    `.` and no negated classes, which would match the text of special tokens in llama.cpp. recursion: how
    often a group contains a rule again.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        tokens: list[str] | None = None,
        characters: bool = True,
        dead_ends: bool = False,
        blind: bool = False,
        letters: str = LETTERS,
        recursion: float = 0.15,
    ) -> None:
        self._rng = rng
        self._tokens = tokens or []
        self._characters = characters
        self._dead_ends = dead_ends
        self._blind = blind
        self._letters = letters
        self._recursion = recursion
        self._names = list(NAMES[: rng.randint(1, len(NAMES))])

    def source(self) -> str:
        rng = self._rng
        rules = [self._rule(name) for name in self._names]
        if rng.random() < 0.3:
            rng.shuffle(rules)
        if rng.random() < 0.03:
            rules.append(self._rule(rng.choice(self._names)))
        end = rng.choice(["\n", "\n", "\n\n", "\r\n", '\n# note: "(\n'])
        return rng.choice(["", "", "\n", "# first\n"]) + end.join(rules) + rng.choice(["", end])

    def _rule(self, name: str) -> str:
        self._within = self._names.index(name)
        start = self._rng.choice([" ::= ", "::=", " ::=\n  ", " ::= # why\n "])
        return f"{name}{start}{self._alternatives(0)}"

    def _alternatives(self, depth: int) -> str:
        count = self._rng.choice([1, 1, 1, 2, 2, 3])
        bar = self._rng.choice([" | ", "|", " |\n "])
        return bar.join(self._sequence(depth) for _ in range(count))

    def _sequence(self, depth: int) -> str:
        count = self._rng.choice([0, 1, 1, 2, 2, 3, 4] if depth else [1, 1, 2, 2, 3, 4])
        if depth and self._rng.random() < 0.1:
            return self._rng.choice(["\n", " # group\n "]).join(self._items(count, depth))
        return " ".join(self._items(count, depth))

    def _items(self, count: int, depth: int) -> list[str]:
        items = [self._item(depth) + self._quantifier() for _ in range(count)]
        if (
            depth and self._characters and self._rng.random() < self._recursion
        ):  # recursion, but not on the left
            return [f'"{self._char(in_class=False)}"', *items, self._rng.choice(self._names)]
        return items

    def _item(self, depth: int) -> str:
        rng = self._rng
        kind = rng.random()
        if self._tokens and (kind < 0.5 or not self._characters):
            if not self._characters and depth < 3 and kind > 0.75:
                return f"({self._alternatives(depth + 1)})"
            return rng.choice(self._tokens)
        if kind < 0.3:
            count = rng.choice([1, 1, 2, 3, 4])
            return f'"{"".join(self._char(in_class=False) for _ in range(count))}"'
        if kind < 0.65:
            return self._class()
        if kind < 0.7 and not self._blind:
            return "."
        if kind < 0.85 and depth < 3:
            inner = self._alternatives(depth + 1)
            return f"({inner})" if rng.random() < 0.8 else f"(\n  {inner} # end\n)"
        return self._name()

    def _name(self) -> str:
        """Name a rule. Mostly a later one, since most others would be left recursion, which is refused."""
        later = self._names[self._within + 1 :]
        return self._rng.choice(later if later and self._rng.random() < 0.7 else self._names)

    def _class(self) -> str:
        rng = self._rng
        parts = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            low = self._char(in_class=True)
            parts.append(low)
            if rng.random() < 0.4:
                high = rng.choice(["b", "z", "9", "é", "\\xff", "\\u8a9f", "\\U0010FFFF", "~"])
                if self._dead_ends or ord_of(low) <= ord_of(high):
                    parts.append("-" + high)
        if rng.random() < 0.1:
            parts.append("-")
        negated = "^" if rng.random() < 0.25 and not self._blind else ""
        if not negated and parts[0] == "^":
            parts.reverse()
        if self._dead_ends and rng.random() < 0.2:
            parts = rng.choice([["b-a"], ["\\x00"], ["\\uD800"], ["\\U00110000"], []])
        text = "".join(parts)
        return f"[{negated}{text}]" if not text.startswith("^") else f"[a{text}]"

    def _char(self, *, in_class: bool) -> str:
        """One character, or an escape of it. Special ones are always escaped."""
        rng = self._rng
        char = rng.choice(self._letters)
        code = ord(char)
        escapes = [f"\\u{code:04x}"] if code < 0x10000 else []
        escapes += [f"\\x{code:02X}"] if code < 0x100 else []
        escapes += [f"\\U{code:08x}"]
        short = {"\n": "\\n", '"': '\\"', "\\": "\\\\", "]": "\\]", "-": "\\-"}.get(char)
        if short is not None:
            escapes += [short] * 4
        if rng.random() < 0.25 or (char in '"\\]-^' and (in_class or char in '"\\')):
            return rng.choice(escapes)
        return char

    def _quantifier(self) -> str:
        rng = self._rng
        if rng.random() < 0.6:
            return ""
        low = rng.choice([0, 1, 1, 2, 3])
        bounds = [f"{{{low}}}", f"{{{low},}}", f"{{{low},{low + rng.randint(0, 3)}}}", "{ 1 , 2 }"]
        quantifier = rng.choice(["*", "+", "?", "*", "+", "?", rng.choice(bounds)])
        return quantifier + (self._quantifier() if rng.random() < 0.2 else "")


def ord_of(char: str) -> int:
    """Return the code point of a character or escape as `RandomGrammar` writes it."""
    if char[:1] != "\\":
        return ord(char)
    if char[1] in "xuU":
        return int(char[2:], 16)
    return ord({"n": "\n"}.get(char[1], char[1]))


def broken(source: str, rng: random.Random) -> str:
    """Change a source in one to three places."""
    for _ in range(rng.randint(1, 3)):
        index = rng.randrange(len(source) + 1)
        replacement = rng.choice('()[]{}|*+?"\\<>!.,:=^-#\n\r\t 09axuU_é')
        source = (
            source[:index]
            + rng.choice(["", replacement, replacement])
            + source[index + rng.randint(0, 1) :]
        )
    return source
