"""What is drawn beside the answer: tint, reasoning, hints, the spinner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localspec.cli import ask, inputs
from localspec.cli.terminal import hints, render
from localspec.errors import ContextExceeded
from tests.support.daemons import Home, RunningDaemon
from tests.support.terminal import terminal


def test_what_the_draft_proposed_is_tinted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    printer = render.DraftPrinter()
    printer.text("The answer is", [[4, 10]])
    printer.close()
    assert capsys.readouterr().out == "The \x1b[32manswer\x1b[0m is\n"


def test_without_colours_it_is_underlined(
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


@pytest.mark.parametrize(("hidden", "thought"), [(False, "Hm.\n"), (True, "")])
def test_reasoning_is_beside_the_answer(
    capsys: pytest.CaptureFixture[str], hidden: bool, thought: str
) -> None:
    client: Any = Thinking()
    last = ask.stream(client, {}, render.printer(), hide_reasoning=hidden)
    assert capsys.readouterr() == ("Yes.\n", thought)
    assert last == {"model": "x", "said": "Yes.", "thoughts": ["Hm."]}


def entry(name: str, **fields: Any) -> dict[str, Any]:
    base = {"roles": ["chat"], "here": False, "fits": "yes", "hybrid": False, "memory": "8"}
    return {"name": name, "size": 2 << 30, **base, **fields}


@pytest.mark.parametrize(
    ("pairs", "vram", "advice"),
    [
        ([entry("a", size=1), entry("b")], 1, "this machine (2.0 GiB): localspec pull b"),
        ([entry("a", size=9 << 30), entry("b")], 0, "localspec pull b"),
        (
            [entry("a", fits="no"), entry("b", roles=["fim"])],
            1,
            "For a real one: localspec catalogue",
        ),
        ([entry("a", size=None, memory="cpu")], 0, "fits this machine: localspec pull a"),
        ([entry("a", here=True)], 0, "To use a real one: localspec use a"),
    ],
)
def test_the_hint_names_what_fits_here(pairs: list[dict[str, Any]], vram: int, advice: str) -> None:
    assert hints._advice({"pairs": [entry("builtin"), *pairs], "vram": vram}).endswith(advice)


def test_a_question_that_is_too_long_says_what_fits() -> None:
    refused = ContextExceeded("It is too long.", n_prompt_tokens=1_000_000, n_ctx=8192)
    said = inputs.describe_too_long(refused, "x" * 5_000_000, stdin_alone=True)
    assert "The question is too long: 4.8 MiB, 1000000 tokens." in said
    assert "holds 8192 tokens, about 32 KiB of such text" in said
    assert "head -c 32768" in said
    of_files = inputs.describe_too_long(refused, "x" * 5_000_000)
    assert "Ask about fewer or shorter files" in of_files
    assert "head" not in of_files
    for stdin_alone in (True, False):
        told = inputs.describe_too_long(refused, "x", stdin_alone=stdin_alone, longer="real")
        assert told.endswith("Use a pair with a longer context: -m real")
        assert "head" not in told
    assert inputs.describe_too_long(ContextExceeded("something else"), "x") == "something else"


def test_the_spinner_says_what_is_waited_for(
    home: Home, start_daemon: Callable[..., RunningDaemon]
) -> None:
    start_daemon("--load-delay", "1.5")
    with terminal(home.environment, "ask", "say hello") as shown:
        shown.expect("loading")
        shown.expect("hello")
        assert shown.wait() == 0
        assert shown.raw.index("\x1b[K") < shown.raw.index("hello")


def test_a_near_miss_of_a_command_is_told(home: Home) -> None:
    run = home.run("histroy")
    assert run.returncode == 2
    assert "did you mean history?" in run.stderr
