"""Random tools, and calls of them that fit their schemas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Texts that readers of calls stumble over. The markers of the notation under test are added to them.
PIECES = [
    "a", "it's", '"', "'", "\\", "\n", "\n\n", "\t", " ", "{", "}", "[", "]", ",", ":", ", b=", "(", ")",
    "é", "日本", "😀", "\u2028", "\x7f", "<", ">", "</", "&amp;", "<b>", "null", "True", "7", "-1.5e3", "```",
    "\\n", "\\u0041", "// x", "<think>", "</think>", "END", "{{ x }}", "%}", '{"name": "now"}',
]  # fmt: skip
KEYS = [
    "a",
    "b",
    "name",
    "arguments",
    "x_1",
    "to-do",
    "key.with.dots",
    "Straße",
    "名前",
    "type",
    "item",
]
NUMBERS = (0, 1, -1, 2**31, -(2**53), 2**63, 0.5, -2.5e-7, 1.7976931348623157e308, 12345.678)
Schema = dict[str, Any]


@dataclass(frozen=True)
class RandomCalls:
    """A source of schemas and values; `pieces` are the texts of which strings are made.

    nulls: whether values may be null where their schema allows it. numbers: the numbers to draw from.
    """

    rng: random.Random
    pieces: list[str]
    nulls: bool = True
    numbers: Sequence[float] = NUMBERS

    def schema(self, depth: int = 0) -> Schema:
        """Return the schema of one value."""
        kinds = ["string", "string", "integer", "number", "boolean", "enum", "null or text"]
        kind = self.rng.choice([*kinds, *(["array", "object", "any"] if depth < 3 else [])])
        match kind:
            case "enum":
                return {"enum": self.rng.sample(["a", "b c", "é", "x\ny", "-"], 2)}
            case "null or text":
                return {"type": ["string", "null"]}
            case "array":
                return {"type": "array", "items": self.schema(depth + 1)}
            case "object":
                return self.parameters(depth + 1)
            case "any":
                return {"description": "anything"}
        return {"type": kind}

    def parameters(self, depth: int = 0) -> Schema:
        """Return the schema of an object."""
        keys = self.rng.sample(KEYS, self.rng.choice([0, 1, 2, 4]))
        return {
            "type": "object",
            "properties": {key: self.schema(depth) for key in keys},
            "required": self.rng.sample(keys, self.rng.randint(0, len(keys))),
            "additionalProperties": False,
        }

    def value(self, schema: Schema) -> Any:
        """Return a value that fits the schema."""
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        match schema.get("type"):
            case "integer":
                return self.rng.choice([n for n in self.numbers if isinstance(n, int)])
            case "number":
                return self.rng.choice(self.numbers)
            case "boolean":
                return self.rng.choice([True, False])
            case "array":
                return [self.value(schema["items"]) for _ in range(self.rng.randint(0, 3))]
            case "object":
                return self.arguments(schema)
            case ["string", "null"] if self.nulls and self.rng.random() < 0.3:
                return None
        return self.text()

    def arguments(self, schema: Schema) -> dict[str, Any]:
        """Return an object that fits the schema, with some of its optional keys, in any order."""
        keys = [
            key
            for key in schema["properties"]
            if key in schema["required"] or self.rng.random() < 0.6
        ]
        self.rng.shuffle(keys)
        return {key: self.value(schema["properties"][key]) for key in keys}

    def text(self) -> str:
        """Return a text of up to six pieces."""
        return "".join(self.rng.choices(self.pieces, k=self.rng.randint(0, 6)))

    def split(self, text: str) -> list[str]:
        """Return a text in random pieces."""
        sizes, at, pieces = self.rng.choice([[1], [1, 2, 3], [1, 7, 40], [len(text) or 1]]), 0, []
        while at < len(text):
            size = self.rng.choice(sizes)
            pieces.append(text[at : at + size])
            at += size
        return pieces
