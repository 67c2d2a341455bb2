"""An editor's completion ends by llama-server's rules for `n_indent` and `t_max_predict_ms`."""

from __future__ import annotations

import pytest

from localspec.engine.text_stream import LineRules


def cut_text(rules: LineRules, text: str, size: int, spent_ms: float = 0.0) -> str:
    """Return the part of `text` that is sent when it arrives in pieces of `size` characters."""
    output = ""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        end = rules.cut(piece, spent_ms)
        output += piece[:end]
        if end is not None:
            break
    return output


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("indent", "text", "expected"),
    [
        (4, "return 1\n    x = 2\ndef g():\n", "return 1\n    x = 2\n"),
        (4, "a\n  b\n", "a\n  "),  # its blanks remain, as in llama-server
        (4, "a\n\n    b", "a\n"),  # an empty line is not indented
        (2, "a\n\tb\n\t\tc\n", "a\n\t"),
        (2, "a\n  b\n\t\tc\n", "a\n  b\n\t\tc\n"),
        (0, "a\nb\nc", "a\nb\nc"),
        (4, "only one line", "only one line"),
        (4, "a\n    ", "a\n    "),  # the indent is not known yet
    ],
)
def test_a_line_indented_less_ends_it(size: int, indent: int, text: str, expected: str) -> None:
    assert cut_text(LineRules(indent, None), text, size) == expected


@pytest.mark.parametrize("size", [1, 2, 100])
def test_after_the_time_limit_only_the_line_is_finished(size: int) -> None:
    assert cut_text(LineRules(None, 250), "one\ntwo\n", size, spent_ms=249) == "one\ntwo\n"
    assert cut_text(LineRules(None, 250), "one\ntwo\n", size, spent_ms=251) == "one\n"
    assert cut_text(LineRules(None, 250), "no end of line", size, spent_ms=9e9) == "no end of line"


def test_rules_without_limits_are_inactive() -> None:
    assert not LineRules(None, None).active
    assert not LineRules(0, 0).active
