"""Test that a speed-up is shown only if enough tokens were measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.cli.chat.talk import Conversation
from localspec.cli.options import AskOptions
from localspec.cli.terminal import figures, render
from localspec.extras.stats.figures import group_row, summary_sentences
from localspec.protocol.answers import Counts, Figures, PairStatus, Status

MIN_TOKENS = figures.MIN_SPEED_UP_TOKENS
TOKENS = st.one_of(st.integers(0, 10_000), st.integers(MIN_TOKENS - 2, MIN_TOKENS + 2))
RATIOS = st.floats(0.01, 20)


def make_status(ratio: float, tokens: int) -> dict[str, Any]:
    import msgspec

    status_ = Status(
        version="1", api_version=1, pid=1, uptime=1.0, running=0, waiting=0,
        pair=PairStatus("a", "unloaded", figures=Figures(speed_up=ratio, measured_tokens=tokens)),
        queue_limit=1, worker_pid=None, safe_mode=False, draining=False, counts=Counts(),
        socket="/s", log="/l", figures=Figures(speed_up=7.0, measured_tokens=9000),
    )  # fmt: skip
    value: dict[str, Any] = msgspec.to_builtins(status_)
    return value


@given(ratio=RATIOS, tokens=TOKENS, verbose=st.booleans())
def test_status_shows_a_speed_up_of_enough_tokens(ratio: float, tokens: int, verbose: bool) -> None:
    rows = dict(figures.rows(make_status(ratio, tokens), verbose=verbose))
    assert rows.get("speed-up") == (f"{ratio:.2f}×" if tokens >= MIN_TOKENS else None)
    assert "×" not in "".join(text for name, text in rows.items() if name != "speed-up")


@given(ratio=RATIOS, tokens=TOKENS)
def test_statistics_and_chat_show_a_speed_up_of_enough_tokens(ratio: float, tokens: int) -> None:
    timings = {"predicted_n": tokens, "predicted_ms": 1000.0, "predicted_per_second": tokens}
    spec = {"active": True, "drafted": 9, "accepted": 9, "speed_up": ratio}
    conversation = Conversation(AskOptions(model="a"))
    conversation.last = {"timings": timings, "localspec": {"speculation": spec}}
    with pytest.MonkeyPatch.context() as patch:
        notes: list[str] = []
        patch.setattr(render, "note", notes.append)
        figures.statistics(conversation.last)
    for text in (conversation.state(), *notes):
        assert (f"{ratio:.2f}×" in text) == (tokens >= MIN_TOKENS)
        assert ("×" in text) == (tokens >= MIN_TOKENS)


@given(ratio=RATIOS, tokens=TOKENS, part=st.floats(0, 1))
def test_a_group_shows_a_speed_up_of_enough_tokens(ratio: float, tokens: int, part: float) -> None:
    group = {
        "answers": 3, "tokens": tokens, "seconds": 10.0, "measured_seconds": 10 * part,
        "tokens_per_second": tokens / 10, "acceptance": 0.5, "speed_up": ratio, "saved_seconds": 2.0,
    }  # fmt: skip
    enough = tokens * part >= MIN_TOKENS
    cells = group_row(group)
    assert (f"{ratio:.2f}×" in cells) == enough
    assert ("not measured" in cells) == (not enough)
    assert cells[-1] == ("2.00 s" if enough else "")
    summary = " ".join(summary_sentences({"total": group, "days": 1, "pair": ""}))
    assert ("×" in summary) == enough


def test_the_short_status_omits_details(capsys: pytest.CaptureFixture[str]) -> None:
    value = make_status(1.5, 5000)
    figures.status(value)
    short = capsys.readouterr().out
    figures.status(value, verbose=True)
    long = capsys.readouterr().out
    assert "1.50×" in short
    for hidden in ("/s", "/l", "pid", "total"):
        assert hidden not in short
        assert hidden in long
