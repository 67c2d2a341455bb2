"""Statistics of stored answers by day, pair and purpose."""

from __future__ import annotations

import datetime
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.daemon.history.statistics import TABLE, statistics
from tests.support.daemons import Home, RunningDaemon, wait_for

NOW = time.time()
DAY = 86_400.0


def get_statistics(home: Home, query: str = "") -> Any:
    answer = home.request("GET", f"/localspec/statistics{query}")
    assert answer.status == 200, answer.body
    return answer.json


def count_by_name(groups: list[dict[str, Any]]) -> dict[str, int]:
    return {group["name"]: group["answers"] for group in groups}


def test_there_are_no_statistics_without_answers(home: Home, daemon: RunningDaemon) -> None:
    empty = get_statistics(home)
    assert (empty["total"]["answers"], empty["by_day"], empty["days"]) == (0, [], 30)
    assert empty["total"]["speed_up"] is None
    assert not (home.root / "data" / "conversations.sqlite").exists()


def test_answers_count_by_pair_day_and_purpose(home: Home, daemon: RunningDaemon) -> None:
    schema = {"type": "object"}
    for ours, more in (
        ({"conversation": "new", "kind": "ask"}, {}),
        ({"conversation": "last", "kind": "chat"}, {}),
        ({"conversation": "new", "kind": "ask"}, {"json_schema": schema}),
        ({"conversation": "new"}, {"prediction": {"type": "content", "content": "a"}}),
        ({"kind": "commit"}, {}),
        ({}, {}),  # not stored
    ):
        assert home.chat("say one two", localspec=ours, **more).status == 200
    infill = {"prompt": "!say three", "localspec": {"kind": "complete"}}
    assert home.request("POST", "/infill", infill).status == 200
    assert home.request("POST", "/infill", {"prompt": "!say four"}).status == 200
    sums = get_statistics(home)
    kinds = {"ask": 1, "chat": 1, "json": 1, "edit": 1, "commit": 1, "complete": 1}
    assert count_by_name(sums["by_kind"]) == kinds
    assert count_by_name(sums["by_pair"]) == {str(home.model): 6}
    assert count_by_name(sums["by_day"]) == {
        datetime.datetime.now().astimezone().date().isoformat(): 6
    }
    total = sums["total"]
    assert (total["answers"], total["drafted"], total["accepted"]) == (6, 24, 18)
    assert total["acceptance"] == pytest.approx(0.75)
    assert total["speed_up"] == pytest.approx(1.8)
    assert total["saved_seconds"] == pytest.approx(0.8 * total["seconds"])
    assert get_statistics(home, f"?pair={home.model}")["total"] == total
    assert get_statistics(home, "?pair=other")["total"]["answers"] == 0


def test_deleted_answers_are_not_counted(home: Home, daemon: RunningDaemon) -> None:
    home.chat("say one", localspec={"conversation": "new", "kind": "ask"})
    home.chat("say two", localspec={"kind": "cmd"})
    assert count_by_name(get_statistics(home)["by_kind"]) == {"ask": 1, "cmd": 1}
    home.request("DELETE", "/localspec/conversations/last")
    assert count_by_name(get_statistics(home)["by_kind"]) == {"cmd": 1}
    home.request("DELETE", "/localspec/conversations")
    assert get_statistics(home)["total"]["answers"] == 0


def test_answers_that_were_cut_off_are_counted_separately(
    home: Home, daemon: RunningDaemon
) -> None:
    with home.streaming("forever", localspec={"conversation": "new", "kind": "ask"}) as stream:
        for _ in range(5):
            stream.readline()
    sums = wait_for(
        lambda: (s := get_statistics(home))["unfinished"] and s, "the interrupted answer"
    )
    assert (sums["total"]["answers"], sums["unfinished"]) == (0, 1)


def test_invalid_queries_are_refused(api: Home) -> None:
    for query in ("?days=0", "?days=10001", "?days=x", "?days=1e3"):
        refused = api.request("GET", f"/localspec/statistics{query}")
        assert (refused.status, refused.error["param"]) == (400, "days")
    wrong = api.chat("say one", localspec={"kind": "spying"})
    assert (wrong.status, wrong.error["param"]) == (400, "localspec.kind")


def test_a_file_of_the_previous_version_has_no_purposes(home: Home, daemon: RunningDaemon) -> None:
    file = home.root / "data" / "conversations.sqlite"
    file.parent.mkdir(exist_ok=True)
    with sqlite3.connect(file) as db:
        db.executescript(VERSION_2.replace("NOW", str(NOW)))
    db.close()
    sums = get_statistics(home)
    assert count_by_name(sums["by_kind"]) == {"unknown": 1}
    assert sums["total"]["seconds"] == pytest.approx(2.0)
    assert sums["total"]["tokens_per_second"] == pytest.approx(10.0)


VERSION_2 = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, created REAL NOT NULL, updated REAL NOT NULL,
    model TEXT NOT NULL, title TEXT NOT NULL
) STRICT;
CREATE INDEX conversations_updated ON conversations (updated);
CREATE TABLE messages (
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    position INTEGER NOT NULL, role TEXT NOT NULL, content TEXT NOT NULL, created REAL NOT NULL,
    finish TEXT, model TEXT, tokens INTEGER, tokens_per_second REAL, drafted INTEGER,
    accepted INTEGER, speed_up REAL, reasoning_content TEXT, tool_calls TEXT, tool_call_id TEXT,
    name TEXT,
    PRIMARY KEY (conversation, position)
) STRICT;
INSERT INTO conversations VALUES ('0a1b2c3d', NOW, NOW, 'm', 'Why?');
INSERT INTO messages (conversation, position, role, content, created, finish, tokens,
    tokens_per_second, drafted, accepted) VALUES
    ('0a1b2c3d', 1, 'user', 'Why?', NOW, NULL, NULL, NULL, NULL, NULL),
    ('0a1b2c3d', 2, 'assistant', 'Because.', NOW, 'stop', 21, 10.0, 0, 0);
PRAGMA user_version = 2;
"""

ANSWERS = st.lists(
    st.tuples(
        st.floats(0, 40),  # days ago
        st.sampled_from(["a", "b"]),
        st.sampled_from(["ask", "chat"]),
        st.integers(1, 1000),  # tokens
        st.sampled_from([0.0, 0.5, 60.0]),  # seconds
        st.integers(0, 100),  # drafted
        st.none() | st.floats(0.5, 5.0),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(answers=ANSWERS, days=st.integers(1, 45), pair=st.sampled_from(["", "a"]))
def test_every_answer_of_the_period_is_in_each_sum_once(
    answers: list[Any], days: int, pair: str
) -> None:
    db = sqlite3.connect(":memory:")
    db.execute(
        "CREATE TABLE messages (created, model, kind, tokens, seconds, drafted, accepted, speed_up,"
        " role, finish)"
    )
    db.executescript(TABLE)
    for ago, model, kind, tokens, seconds, drafted, speed_up in answers:
        row = (NOW - ago * DAY, model, kind, tokens, seconds, drafted, drafted // 2, speed_up)
        db.execute("INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    sums = statistics(db, days, pair)
    db.close()
    first_day = datetime.date.fromisoformat(sums.since)
    counted = [
        answer
        for answer in answers
        if datetime.datetime.fromtimestamp(NOW - answer[0] * DAY).date() >= first_day
        and pair in ("", answer[1])
    ]
    for groups in ([sums.total], sums.by_day, sums.by_pair, sums.by_kind):
        assert sum(group.answers for group in groups) == len(counted)
        assert sum(group.tokens for group in groups) == sum(answer[3] for answer in counted)
        assert sum(group.seconds for group in groups) == pytest.approx(sum(e[4] for e in counted))
    measured = [(answer[4], answer[6]) for answer in counted if answer[6] and answer[4]]
    saved = sum(duration_s * speed_up - duration_s for duration_s, speed_up in measured)
    assert (sums.total.saved_seconds is None) == (not measured)
    assert sums.total.saved_seconds is None or sums.total.saved_seconds == pytest.approx(saved)
    names = [day.name for day in sums.by_day]
    assert names == sorted(names)
    assert not names or names[-1] == sums.until
    assert len(names) <= days


def test_statistics_contain_no_text(home: Home, daemon: RunningDaemon) -> None:
    home.chat("say a-secret", localspec={"kind": "cmd"})
    assert get_statistics(home)["total"]["answers"] == 1
    daemon.stop()
    for file in Path(home.root / "data").rglob("*"):
        assert not file.is_file() or b"a-secret" not in file.read_bytes()
