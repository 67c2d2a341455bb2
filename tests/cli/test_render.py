"""Test the output beside the answer: tint, reasoning, hints and the spinner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localspec.cli import ask, inputs
from localspec.cli.terminal import hints, render
from localspec.errors import ContextExceeded
from tests.support.daemons import Home
from tests.support.terminal import terminal


def test_drafted_text_is_tinted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    printer = render.DraftPrinter()
    printer.text("The answer is", [[4, 10]])
    printer.close()
    assert capsys.readouterr().out == "The \x1b[32manswer\x1b[0m is\n"


def test_drafted_text_is_underlined_without_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    printer = render.DraftPrinter()
    printer.text("ab", [[0, 1]])
    printer.close()
    assert capsys.readouterr().out == "\x1b[4ma\x1b[0mb\n"


class Thinking:
    """A client whose model thinks before it answers."""

    def stream_chat(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        del request
        for delta in ({"role": "assistant"}, {"reasoning_content": "Hm."}, {"content": "Yes."}):
            yield {"model": "x", "choices": [{"delta": delta}]}


@pytest.mark.parametrize(("hide", "thought"), [(False, "Hm.\n"), (True, "")])
def test_reasoning_goes_to_stderr(
    capsys: pytest.CaptureFixture[str], hide: bool, thought: str
) -> None:
    client: Any = Thinking()
    result = ask.stream(client, {}, render.printer(), hide_reasoning=hide)
    assert capsys.readouterr() == ("Yes.\n", thought)
    assert result == {"model": "x", "said": "Yes.", "thoughts": ["Hm."]}


def make_entry(name: str, **fields: Any) -> dict[str, Any]:
    base = {"roles": ["chat"], "here": False, "fits": "yes", "hybrid": False, "memory": "8"}
    return {"name": name, "size": 2 << 30, **base, **fields}


@pytest.mark.parametrize(
    ("pairs", "vram", "advice"),
    [
        ([make_entry("a", size=1), make_entry("b")], 1, "(2.0 GiB to download): localspec pull b"),
        ([make_entry("a", size=9 << 30), make_entry("b")], 0, "localspec pull b"),
        (
            [make_entry("a", fits="no"), make_entry("b", roles=["fim"])],
            1,
            "For a real one: localspec catalogue",
        ),
        ([make_entry("a", size=None, memory="cpu")], 0, "fits this machine: localspec pull a"),
        ([make_entry("a", here=True)], 0, "To use a real one: localspec use a"),
    ],
)
def test_the_hint_names_a_pair_that_fits(
    pairs: list[dict[str, Any]], vram: int, advice: str
) -> None:
    assert hints._advice({"pairs": [make_entry("builtin"), *pairs], "vram": vram}).endswith(advice)


def test_a_question_that_is_too_long_says_what_fits() -> None:
    refused = ContextExceeded("It is too long.", n_prompt_tokens=1_000_000, n_ctx=8192)
    message = inputs.describe_too_long(refused, "x" * 5_000_000, stdin_alone=True)
    assert "The question is too long: 4.8 MiB, 1000000 tokens." in message
    assert "holds 8192 tokens, about 32 KiB of such text" in message
    assert "head -c 32768" in message
    message_for_files = inputs.describe_too_long(refused, "x" * 5_000_000)
    assert "Ask about fewer or shorter files" in message_for_files
    assert "head" not in message_for_files
    for stdin_alone in (True, False):
        message_with_pair = inputs.describe_too_long(
            refused, "x", stdin_alone=stdin_alone, longer="real"
        )
        assert message_with_pair.endswith("Use a pair with a longer context: -m real")
        assert "head" not in message_with_pair
    assert inputs.describe_too_long(ContextExceeded("something else"), "x") == "something else"


def test_the_spinner_shows_the_current_stage(home: Home) -> None:
    home.start("--load-delay", "1.5")
    with terminal(home.environment, "ask", "say hello") as session:
        session.expect("loading")
        session.expect("hello")
        assert session.wait() == 0
        assert session.raw.index("\x1b[K") < session.raw.index("hello")
