"""`localspec stats`: what was measured, what was not, as a table, plots, JSON and a page."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.cli.terminal import figures
from localspec.extras.stats import figures as said
from localspec.extras.stats import page
from localspec.extras.stats import page as text
from tests.support.daemons import Home, scripted_home
from tests.support.many import in_a_terminal, in_pipes

DAY = 86_400.0


@pytest.fixture(scope="module")
def counted() -> Iterator[Home]:
    """A home with answers of today, three days ago and a year ago."""
    with scripted_home() as home:
        assert "No answers were saved in the last 30 days." in home.run("stats").stdout
        home.chat("say hello", localspec={"kind": "other"})  # makes the file
        home.run("stats")  # which is there then
        now = time.time()
        rows = [
            (now, "coder-7b", "ask", 500, 10.0, 400, 300, 2.0),
            (now, "coder-7b", "complete", 100, 2.0, 80, 20, 1.5),
            (now, "plain", "chat", 300, 10.0, 0, 0, None),
            (now - 3 * DAY, "coder-7b", "json", 40, 1.0, 30, 30, 3.0),
            (now - 3 * DAY, "tiny", "cmd", 4, 0.001, 3, 1, None),
            (now - 300 * DAY, "old", "chat", 1000, 50.0, 0, 0, None),
        ]
        with sqlite3.connect(home.root / "data" / "conversations.sqlite") as db:
            db.execute("DELETE FROM figures")
            db.executemany("INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        db.close()
        yield home


def row(shown: str, name: str) -> list[str]:
    (found,) = [line for line in shown.splitlines() if line.startswith(name)]
    return re.split(r" {2,}", found.strip())


def test_tables_by_pair_kind_and_day_say_what_was_measured(counted: Home) -> None:
    shown = counted.run("stats").stdout
    assert "5 answers in the last 30 days: 944 tokens in 23 s" in shown
    assert "2.00× the speed of plain decoding, which saved 13 s; 68% of drafted tokens" in shown
    assert row(shown, "coder-7b")[1:] == ["3", "640", "13 s", "49.0", "69%", "2.00×", "13 s"]
    assert row(shown, "plain")[1:] == ["1", "300", "10 s", "29.9", "no drafts", "not measured"]
    assert row(shown, "tiny") == ["tiny", "1", "4", "under 0.01 s", "33%", "not measured"]
    assert row(shown, "complete (FIM)")[1] == "1"
    assert row(shown, "JSON by schema")[1] == "1"
    assert "The speed-up was measured for 57% of the time" in shown
    assert "Not included: answers with --no-log" in shown
    assert "old" not in shown
    assert "old" in counted.run("stats", "-d", "400").stdout
    assert "1 answer by tiny" in counted.run("stats", "--pair", "tiny").stdout


def test_plots_are_blocks_where_they_can_be_shown_and_ascii_elsewhere(counted: Home) -> None:
    def plot(terminal: str) -> str:
        environment = {**counted.environment, "TERM_": terminal}
        shown = in_a_terminal(environment, [(["stats"], {"COLUMNS": "80"})], columns=80)[0]
        assert "\x1b" not in shown
        return marks(shown)

    def marks(shown: str) -> str:
        (found,) = re.findall(r"^tokens    (.*?)  \d", shown, re.M)
        return str(found)

    assert plot("xterm-256color") == "▁  █"
    assert plot("dumb") == ".  @"
    environment = {**counted.environment, "PYTHONIOENCODING": "ascii"}
    assert marks(in_pipes(environment, [(["stats"], {})])[0].out) == ".  @"


def test_one_day_is_not_drawn_for_one_bar_says_nothing(counted: Home) -> None:
    for days, drawn in (("1", False), ("4", True)):
        assert ("speed-up  " in counted.run("stats", "--days", days).stdout) is drawn
        page = counted.run("stats", "--days", days, "--html", "-").stdout
        assert ("<figure>" in page) is drawn
        assert "<h2>By day</h2>" in page


def test_json_is_what_the_daemon_says(counted: Home) -> None:
    found = json.loads(counted.run("stats", "--json", "--days", "4").stdout)
    assert (found["days"], found["total"]["answers"]) == (4, 5)
    assert [each["answers"] for each in found["by_day"]] == [2, 0, 0, 3]
    plain = next(each for each in found["by_pair"] if each["name"] == "plain")
    assert plain["speed_up"] is None
    assert plain["saved_seconds"] is None
    assert counted.run("stats", "--json", "--html", "x").returncode == 2
    assert counted.run("stats", "--days", "0").returncode == 2


class Page(HTMLParser):
    """Notes what is open, what is asked of elsewhere, and the texts."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [name for name, _ in attrs if name in ("src", "href", "onload", "onclick")]
        assert tag not in ("script", "link", "img", "iframe")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(document: str) -> Page:
    found = Page()
    found.feed(document)
    assert found.open == []
    assert found.asked == []
    assert "url(" not in document
    assert "://" not in document
    return found


def test_the_page_needs_nothing_else_and_says_the_same(counted: Home, tmp_path: Path) -> None:
    file = tmp_path / "stats.html"
    assert counted.run("stats", "--html", str(file)).stdout == f"Saved {file}.\n"
    document = file.read_text(encoding="utf-8")
    shown = read(document).texts
    for wanted in ("coder-7b", "2.00×", "not measured", "complete (FIM)", "no drafts"):
        assert wanted in shown
    for wanted in ("prefers-color-scheme: dark", "@media print", "max-width: 40rem", "viewport"):
        assert wanted in document
    printed = counted.run("stats", "--html", "-").stdout
    assert "coder-7b" in read(printed).texts
    refused = counted.run("stats", "--html", str(tmp_path / "none" / "x.html"))
    assert (refused.returncode, "No such file" in refused.stderr) == (1, True)


def test_a_pair_with_a_strange_name_is_text_on_the_page(counted: Home) -> None:
    found = json.loads(counted.run("stats", "--json").stdout)
    found["pair"] = found["by_pair"][0]["name"] = "<script>\x1b[2J&amp;\u202e</script>"
    assert "<script>␛[2J&amp;" in "".join(read(page.render_page(found)).texts).replace(
        "&amp;amp;", "&amp;"
    )


def test_what_is_not_to_be_kept_is_in_no_sum(counted: Home, tmp_path: Path) -> None:
    def answers() -> int:
        total: int = json.loads(counted.run("stats", "--json").stdout)["total"]["answers"]
        return total

    before = answers()
    (tmp_path / "hole.py").write_text("!say\n")
    assert counted.run("ask", "--no-log", "say hello").returncode == 0
    assert counted.run("complete", "--no-log", f"{tmp_path}/hole.py:1").returncode == 0
    assert answers() == before
    assert counted.run("complete", f"{tmp_path}/hole.py:1").returncode == 0
    assert counted.run("ask", "say hello").returncode == 0
    assert answers() == before + 2


# ------------------------------------------------------------------ figures


@given(
    tokens=st.integers(0, 40), seconds=st.floats(0, 0.2), per_second=st.none() | st.floats(0, 1e6)
)
def test_no_rate_is_told_of_fewer_than_ten_tokens_or_within_50_ms(
    tokens: int, seconds: float, per_second: float | None
) -> None:
    told = figures.format_rate(tokens, seconds, per_second)
    assert not told or (tokens >= 10 and seconds >= 0.05)


def test_a_short_answer_has_no_rate_anywhere(counted: Home) -> None:
    shown = counted.run("ask", "-u", "say hello").stderr
    assert "tokens/s" not in shown
    assert re.search(r"^\d+ tokens? in ", shown, re.M)


GROUPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 99), st.floats(0, 9), st.none() | st.floats(1, 3)),
    min_size=1,
    max_size=80,
)


@given(groups=GROUPS, room=st.integers(1, 60))
def test_days_that_share_a_mark_are_added_up(groups: list[Any], room: int) -> None:
    days = [
        {
            "name": f"day {at}",
            "answers": answers,
            "tokens": tokens,
            "drafted": tokens,
            "accepted": tokens // 2,
            "seconds": taken,
            "measured_seconds": taken if speed_up else 0.0,
            "speed_up": speed_up if taken else None,
        }
        for at, (answers, tokens, taken, speed_up) in enumerate(groups)
    ]
    found, each = said.merge_days(days, room)
    assert len(found) <= room
    assert len(found) == -(-len(days) // each)
    assert sum(one["tokens"] for one in found) == sum(one["tokens"] for one in days)
    for one in said.make_series(found):
        assert len(text.sparkline(one, "01234567")) == len(found)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.00 s"),
        (0.001, "under 0.01 s"),
        (9.99, "9.99 s"),
        (99, "99 s"),
        (150, "2 min"),
        (7000, "1 h 57 min"),
        (-30, "-30 s"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert figures.format_duration(seconds) == shown


@given(st.floats(-1e7, 1e7))
def test_no_duration_is_negative_and_next_to_nothing(seconds: float) -> None:
    shown = figures.format_duration(seconds)
    assert not shown.startswith("-under")
    assert shown.startswith("-") == (seconds <= -0.005)


@given(st.floats(0.5, 2.0), st.floats(-5, 5))
def test_a_speed_up_near_one_is_called_no_difference(ratio: float, saved: float) -> None:
    total = {"speed_up": ratio, "acceptance": None, "saved_seconds": saved, "tokens": 5000}
    total |= {"seconds": 10.0, "measured_seconds": 10.0}
    sentence = said._describe_speculation(total)
    assert ("no clear difference" in sentence) == (abs(ratio - 1) < 0.03)
    assert ("lost" in sentence or "saved" in sentence) == (abs(ratio - 1) >= 0.03)
