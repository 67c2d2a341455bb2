"""Translate the regular expressions of JSON Schemas to llguidance's dialect.

Schemas are written for the dialects of JavaScript or Python. llguidance reads Rust's, without look-around. A
leading look-ahead is equivalent to a second expression that must match as well. Any other assertion can
only be removed, which allows more texts and never fewer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher

# Expressions with look-around that widely used libraries write for their types, and their equivalents.
_EQUIVALENT = {
    # Zod 4: z.iso.duration()
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(\d{1,9}W|\d{1,9}Y(\d{1,9}M)?(\d{1,9}D)?T_|\d{1,9}M(\d{1,9}D)?T_|\d{1,9}DT_|T!)$".replace(
            "T_", "(T!)?"
        ).replace(
            "T!",
            r"T(\d{1,9}H(\d{1,9}M)?(S!)?|\d{1,9}M(S!)?|S!)".replace(
                "S!", r"\d{1,9}([.,]\d{1,9})?S"
            ),
        )
    ),
    # Zod 3 and early Zod 4: z.email()
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    # pydantic 2: Decimal as text
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})$",
}
_ANCHORS = {r"\A": "^", r"\Z": "$", r"\z": "$"}  # Python's anchors.
_LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The expressions that a text must all match. exact: whether they are equivalent to the original."""

    expressions: tuple[str, ...]
    exact: bool = True


@lru_cache(maxsize=1024)
def translate_pattern(pattern: str) -> Pattern:
    """Translate a schema's expression. The result has no expressions if none can be enforced."""
    parts = _split_lookaheads(_EQUIVALENT.get(pattern, pattern))
    if all(map(_compiles, parts)):
        return Pattern(tuple(parts))
    relaxed = [part for part in map(_without_assertions, parts) if _compiles(part)]
    return Pattern(tuple(relaxed), exact=False)


def _compiles(pattern: str) -> bool:
    source = LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "string", "pattern": pattern}), overrides={}
    )
    return not LLMatcher.validate_grammar(source)


def _split_lookaheads(pattern: str) -> list[str]:
    """Split `^(?=A)B` into `^A` and `^B`, in Rust's dialect."""
    tokens = _tokens(pattern)
    lookaheads: list[str] = []
    alternatives = _at_top_level(tokens, "|")
    while tokens[:1] == ["^"] and tokens[1:2] == ["(?="] and not alternatives:
        end = _find_closing(tokens, 1)
        lookaheads.append("^(" + "".join(tokens[2:end]) + ")")
        tokens = ["^", *tokens[end + 1 :]]
    return [*lookaheads, "".join(tokens)]


def _without_assertions(pattern: str) -> str:
    tokens, remaining, index = _tokens(pattern), [], 0
    while index < len(tokens):
        if tokens[index] in _LOOKAROUND:
            index = _find_closing(tokens, index)
        elif tokens[index] not in (r"\b", r"\B"):
            remaining.append(tokens[index])
        index += 1
    return "".join(remaining)


def _at_top_level(tokens: list[str], symbol: str) -> bool:
    """Return whether `symbol` occurs outside of all groups."""
    depth = 0
    for token in tokens:
        depth += token.startswith("(") - (token == ")")
        if token == symbol and not depth:
            return True
    return False


def _find_closing(tokens: list[str], start: int) -> int:
    """Return the index at which the group that opens at `start` closes, or the end if it does not."""
    depth = 0
    for index in range(start, len(tokens)):
        depth += tokens[index].startswith("(") - (tokens[index] == ")")
        if not depth:
            return index
    return len(tokens)


_TOKEN = re.compile(r"\\.|\(\?(?:<?[=!]|:)|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _tokens(pattern: str) -> list[str]:
    """Split an expression into escapes, classes, openings of groups and characters, in Rust's dialect."""
    return [_in_rust(token) for token in _TOKEN.findall(pattern)]


def _in_rust(token: str) -> str:
    if token in ("[^]", "[^]]"):
        return r"[\s\S]" + token[3:]
    if len(token) > 2 and token[0] == "[":
        # Rust has nested classes, intersections and differences. JavaScript takes their signs literally.
        head = "[^" if token[1] == "^" else "["
        members = re.findall(r"\\.|.", token[len(head) : -1], re.DOTALL)
        return head + "".join("\\" + char if char in "[&~" else char for char in members) + "]"
    return _ANCHORS.get(token, token)
