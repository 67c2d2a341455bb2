"""Examples of documented objects: from the documentation, or a call made from the signature."""

from __future__ import annotations

import doctest

import pytest

from builtin_pair import examples
from builtin_pair.docs import Entry, entries_from_docstrings


def entry(name: str, kind: str, signature: str, *examples_: str) -> Entry:
    return Entry(name, kind, signature, "page", ("Something.",), examples_)


@pytest.mark.parametrize(
    ("documented", "expected"),
    [
        (entry("math.sqrt", "function", "(x, /)"), "import math\n\nmath.sqrt(x)"),
        (entry("zip", "function", "(*iterables, strict=False)"), "zip(*iterables)"),
        (entry("str.join", "method", "(iterable)"), "text.join(iterable)"),
        (entry("str.find", "method", "(sub[, start[, end]])"), "text.find(sub)"),
        (entry("a.Thread.join", "method", "(timeout=None)"), "thread.join()"),
        (entry("bin", "function", "(x)", ">>> bin(3)\n'0b11'"), "bin(3)\n# '0b11'"),
        (entry("f", "function", "(x)", "usage: f ..."), "f(x)"),
        (entry("f", "function", "(x)", "f(1)\n" * 99), "f(x)"),
        (entry("f", "function", "(x)", "if x: g(x)", "f(7)"), "f(7)"),
        (entry("add", "method", "(name or flags...)"), None),
        (entry("KeyError", "exception", ""), None),
    ],
)
def test_an_example_is_short_and_names_the_object(documented: Entry, expected: str | None) -> None:
    assert examples.example(documented) == expected


def test_every_example_of_the_standard_library_compiles() -> None:
    codes = [examples.example(e) for e in entries_from_docstrings(("os", "shutil", "json", "math"))]
    existing = [code for code in codes if code is not None]
    assert len(existing) > len(codes) / 2
    for code in existing:
        compile(code, "example", "exec")


def test_the_docstrings_examples_hold() -> None:
    outcome = doctest.testmod(examples)
    assert outcome.attempted > 1
    assert outcome.failed == 0
