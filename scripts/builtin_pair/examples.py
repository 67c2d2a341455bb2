"""Code that shows how a documented object is used.

The documentation's own example where it is short and compiles; else the call that its signature
spells.  Sessions of the interpreter become plain code, with what it printed in comments, so that
what ``localspec ask -x`` takes out of an answer can be run.
"""

from __future__ import annotations

import re
import warnings

from .docs import Entry

LONGEST = 200  # characters: more would not be remembered word for word
INSTANCES = {"str": "text", "bytes": "data", "list": "items", "dict": "table", "set": "items"}
"""What an instance is called where its class's name in lower case is the class itself."""


def example(entry: Entry) -> str | None:
    """Code that uses `entry`, or None where neither examples nor signature say how."""
    named = re.compile(rf"\b{re.escape(entry.name.rpartition('.')[2])}\b")
    for text in entry.examples:
        code = plain(text)
        if len(code) <= LONGEST and named.search(code) and compiles(code):
            return code
    return call(entry)


def plain(text: str) -> str:
    """`text` without the prompts of the interpreter, what it printed in comments.

    >>> plain(">>> bin(3)\\n'0b11'")
    "bin(3)\\n# '0b11'"
    """
    if not text.startswith(">>> "):
        return text
    lines = []
    for line in text.rstrip().split("\n"):
        if line.startswith((">>> ", "... ")):
            lines.append(line[4:].rstrip())
        elif line not in {"", "...", ">>>"}:
            lines.append(f"# {line}")
    return "\n".join(lines)


def call(entry: Entry) -> str | None:
    """Return the call of a function, method or class with the parameters that it must be given."""
    if entry.kind not in {"function", "method", "class"} or not entry.signature:
        return None
    owner = entry.name.rpartition(".")[0]
    called = f"{entry.name}({', '.join(required(entry.signature))})"
    if entry.kind == "method":
        cls = owner.rpartition(".")[2]
        called = f"{INSTANCES.get(cls, cls.lower())}.{called.removeprefix(owner + '.')}"
    elif owner:
        called = f"import {owner}\n\n{called}"
    return called if compiles(called) else None


def required(signature: str) -> list[str]:
    """Return the parameters of `signature` without a default, in order.

    >>> required("(path, *paths, mode=1)"), required("(s[, prefix])"), required("(a, /, *, b=2)")
    (['path', '*paths'], ['s'], ['a'])
    """
    names = []
    for part in signature.strip("()").partition("[")[0].split(","):
        name = part.strip()
        if name == "*" or name.startswith("**") or "=" in name:
            break
        if name not in {"", "/", "self"}:
            names.append(name)
    return names


def compiles(code: str) -> bool:
    """Whether `code` is Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the examples' strings
        try:
            compile(code, "example", "exec")
        except (SyntaxError, ValueError):
            return False
    return True
