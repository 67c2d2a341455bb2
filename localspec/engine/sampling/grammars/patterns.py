"""Regular expressions of JSON Schemas, in the dialect of the grammar library.

Schemas are written with JavaScript's or Python's expressions in mind. The grammar library reads Rust's and
has no look-around. A leading look-ahead is the same as a second expression that must match as well. Any
other assertion can only be left out, which lets more texts match and never fewer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher

# Expressions with look-around that widely used libraries write for their own types, and what they mean.
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
_ANCHORS = {r"\A": "^", r"\Z": "$", r"\z": "$"}  # Python's
_LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The expressions that a text must match, all of them. `exact`: they say what the schema's says."""

    expressions: tuple[str, ...]
    exact: bool = True


@lru_cache(maxsize=1024)
def translate_pattern(pattern: str) -> Pattern:
    """Return a schema's expression as the library reads it. Without expressions, it cannot."""
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
    """Return `^(?=A)B` as `^A` and `^B`, and the parts in Rust's notation."""
    tokens = _tokens(pattern)
    found: list[str] = []
    alternatives = _at_top_level(tokens, "|")
    while tokens[:1] == ["^"] and tokens[1:2] == ["(?="] and not alternatives:
        end = _closing(tokens, 1)
        found.append("^(" + "".join(tokens[2:end]) + ")")
        tokens = ["^", *tokens[end + 1 :]]
    return [*found, "".join(tokens)]


def _without_assertions(pattern: str) -> str:
    tokens, kept, at = _tokens(pattern), [], 0
    while at < len(tokens):
        if tokens[at] in _LOOKAROUND:
            at = _closing(tokens, at)
        elif tokens[at] not in (r"\b", r"\B"):
            kept.append(tokens[at])
        at += 1
    return "".join(kept)


def _at_top_level(tokens: list[str], wanted: str) -> bool:
    depth = 0
    for token in tokens:
        depth += token.startswith("(") - (token == ")")
        if token == wanted and not depth:
            return True
    return False


def _closing(tokens: list[str], at: int) -> int:
    """Return where the group that opens at `at` closes; the end, if it does not."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += tokens[index].startswith("(") - (tokens[index] == ")")
        if not depth:
            return index
    return len(tokens)


_TOKEN = re.compile(r"\\.|\(\?(?:<?[=!]|:)|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _tokens(pattern: str) -> list[str]:
    """Split an expression into escapes, classes, openings of groups, and single characters."""
    return [_in_rust(token) for token in _TOKEN.findall(pattern)]


def _in_rust(token: str) -> str:
    if token in ("[^]", "[^]]"):
        return r"[\s\S]" + token[3:]
    if len(token) > 2 and token[0] == "[":
        # Rust has classes in classes, intersections and differences. JavaScript takes them literally.
        head = "[^" if token[1] == "^" else "["
        inside = re.findall(r"\\.|.", token[len(head) : -1], re.DOTALL)
        return head + "".join("\\" + each if each in "[&~" else each for each in inside) + "]"
    return _ANCHORS.get(token, token)
