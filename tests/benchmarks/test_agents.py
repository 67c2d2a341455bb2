"""`scripts/bench agents`: recorded requests reach a real daemon, and what it read is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.agents import command, sessions
from benchmarks.agents.ledger import Ledger, ratio
from benchmarks.agents.prompts import as_chat
from benchmarks.agents.sessions import Event

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


@given(texts)
def test_new_tokens_are_those_that_no_earlier_text_begins_with(prompts: list[list[int]]) -> None:
    ledger = Ledger()
    for at, prompt in enumerate(prompts):
        row = ledger.add("agent", Event.TURN, prompt, [9], len(prompt))
        starts = {tuple(text[:n]) for text in prompts[:at] for n in range(len(text) + 1)}
        known = max((n for n in range(len(prompt)) if tuple(prompt[:n]) in starts), default=0)
        assert row.new == len(prompt) - known
    assert ratio(ledger.rows) >= 1


def test_recordings_hold_the_events_that_are_measured() -> None:
    recorded = sessions.recorded()
    assert set(recorded) == {"claude", "codex", "opencode", "pi"}
    events = {request.event for session in recorded.values() for request in session}
    assert events == {*Event} - {Event.EDIT}
    for session in recorded.values():
        for request in session:
            assert as_chat(request).messages


def test_derived_sessions_change_what_they_say() -> None:
    first, *others = sessions.moving_reminder()
    assert first.event is Event.START
    for request in others:
        assert "system-reminder" in json.dumps(request.body["messages"][-1])
        assert "system-reminder" not in json.dumps(request.body["messages"][:-1])
    bodies = [json.dumps(r.body) for r in sessions.edited_first_message()]
    assert len(set(bodies)) == len(bodies)
    helpers = [r for r in sessions.returning_helpers("opencode", 3) if r.event is Event.HELPER]
    assert len({json.dumps(request.body) for request in helpers}) == len(helpers) == 18


@pytest.mark.slow
def test_a_daemon_reads_no_token_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        command.SCENARIOS, "short", lambda: [[*sessions.moving_reminder()[:3], command.UNLOAD]]
    )
    facts = tmp_path / "facts.json"
    code = command.main(
        ["short", "--kinds", "dense", "--work", str(tmp_path), "--json", str(facts),
         "--context", "8192"]
    )  # fmt: skip
    output = capsys.readouterr().out
    assert code == 0, output
    assert "tokens read / new, dense, short: 1.0" in output
    [[rows]] = json.loads(facts.read_text()).values()
    assert [row["event"] for row in rows] == ["session begins", *["reminder moves"] * 2]
    assert rows[0]["read"] == rows[0]["prompt"]
    assert all(row["read"] < row["prompt"] / 2 for row in rows[1:])


def test_unknown_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nothing"]) == 1
    assert "There is no scenario 'nothing'" in capsys.readouterr().err
