"""Test `localspec stats` as a table, plots, JSON and an HTML page."""

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
def home_with_answers() -> Iterator[Home]:
    """Yield a home with answers of today, three days ago and 300 days ago."""
    with scripted_home() as home:
        assert "No answers were saved in the last 30 days." in home.run("stats").stdout
        home.chat("say hello", localspec={"kind": "other"})  # This creates the database.
        home.run("stats")  # The database exists now.
        current_time = time.time()
        rows = [
            (current_time, "coder-7b", "ask", 500, 10.0, 400, 300, 2.0),
            (current_time, "coder-7b", "complete", 100, 2.0, 80, 20, 1.5),
            (current_time, "plain", "chat", 300, 10.0, 0, 0, None),
            (current_time - 3 * DAY, "coder-7b", "json", 40, 1.0, 30, 30, 3.0),
            (current_time - 3 * DAY, "tiny", "cmd", 4, 0.001, 3, 1, None),
            (current_time - 300 * DAY, "old", "chat", 1000, 50.0, 0, 0, None),
        ]
        with sqlite3.connect(home.root / "data" / "conversations.sqlite") as db:
            db.execute("DELETE FROM figures")
            db.executemany("INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        db.close()
        yield home


def table_row(table: str, name: str) -> list[str]:
    (row_line,) = [line for line in table.splitlines() if line.startswith(name)]
    return re.split(r" {2,}", row_line.strip())


def test_tables_by_pair_kind_and_day(home_with_answers: Home) -> None:
    table = home_with_answers.run("stats").stdout
    assert "5 answers in the last 30 days: 944 tokens in 23 s" in table
    assert "2.00× the speed of plain decoding, which saved 13 s; 68% of drafted tokens" in table
    assert table_row(table, "coder-7b")[1:] == ["3", "640", "13 s", "49.0", "69%", "2.00×", "13 s"]
    assert table_row(table, "plain")[1:] == [
        "1",
        "300",
        "10 s",
        "29.9",
        "no drafts",
        "not measured",
    ]
    assert table_row(table, "tiny") == ["tiny", "1", "4", "under 0.01 s", "33%", "not measured"]
    assert table_row(table, "complete (FIM)")[1] == "1"
    assert table_row(table, "JSON by schema")[1] == "1"
    assert "The speed-up was measured for 57% of the time" in table
    assert "Not included: answers with --no-log" in table
    assert "old" not in table
    assert "old" in home_with_answers.run("stats", "-d", "400").stdout
    assert "1 answer by tiny" in home_with_answers.run("stats", "--pair", "tiny").stdout


def test_plots_are_blocks_or_ascii_by_the_terminal(home_with_answers: Home) -> None:
    def plot(terminal: str) -> str:
        environment = {**home_with_answers.environment, "TERM_": terminal}
        output = in_a_terminal(environment, [(["stats"], {"COLUMNS": "80"})], columns=80)[0]
        assert "\x1b" not in output
        return marks(output)

    def marks(output: str) -> str:
        (plot_marks,) = re.findall(r"^tokens    (.*?)  \d", output, re.M)
        return str(plot_marks)

    assert plot("xterm-256color") == "▁  █"
    assert plot("dumb") == ".  @"
    environment = {**home_with_answers.environment, "PYTHONIOENCODING": "ascii"}
    assert marks(in_pipes(environment, [(["stats"], {})])[0].out) == ".  @"


def test_a_single_day_is_not_plotted(home_with_answers: Home) -> None:
    for days, drawn in (("1", False), ("4", True)):
        assert ("speed-up  " in home_with_answers.run("stats", "--days", days).stdout) is drawn
        page = home_with_answers.run("stats", "--days", days, "--html", "-").stdout
        assert ("<figure>" in page) is drawn
        assert "<h2>By day</h2>" in page


def test_json_output(home_with_answers: Home) -> None:
    report = json.loads(home_with_answers.run("stats", "--json", "--days", "4").stdout)
    assert (report["days"], report["total"]["answers"]) == (4, 5)
    assert [entry["answers"] for entry in report["by_day"]] == [2, 0, 0, 3]
    plain = next(entry for entry in report["by_pair"] if entry["name"] == "plain")
    assert plain["speed_up"] is None
    assert plain["saved_seconds"] is None
    assert home_with_answers.run("stats", "--json", "--html", "x").returncode == 2
    assert home_with_answers.run("stats", "--days", "0").returncode == 2


class PageParser(HTMLParser):
    """Collects the open tags, the attributes that load external content, and the texts."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.external_attributes: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.external_attributes += [
            name for name, _ in attrs if name in ("src", "href", "onload", "onclick")
        ]
        assert tag not in ("script", "link", "img", "iframe")
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parse_page(document: str) -> PageParser:
    parser = PageParser()
    parser.feed(document)
    assert parser.open_tags == []
    assert parser.external_attributes == []
    assert "url(" not in document
    assert "://" not in document
    return parser


def test_the_page_is_self_contained_and_has_the_figures(
    home_with_answers: Home, tmp_path: Path
) -> None:
    file = tmp_path / "stats.html"
    assert home_with_answers.run("stats", "--html", str(file)).stdout == f"Saved {file}.\n"
    document = file.read_text(encoding="utf-8")
    texts = parse_page(document).texts
    for expected in ("coder-7b", "2.00×", "not measured", "complete (FIM)", "no drafts"):
        assert expected in texts
    for expected in ("prefers-color-scheme: dark", "@media print", "max-width: 40rem", "viewport"):
        assert expected in document
    printed = home_with_answers.run("stats", "--html", "-").stdout
    assert "coder-7b" in parse_page(printed).texts
    assert "No such file" in home_with_answers.refused(
        "stats", "--html", str(tmp_path / "none" / "x.html")
    )


def test_a_pair_with_a_strange_name_is_text_on_the_page(home_with_answers: Home) -> None:
    report = json.loads(home_with_answers.run("stats", "--json").stdout)
    report["pair"] = report["by_pair"][0]["name"] = "<script>\x1b[2J&amp;\u202e</script>"
    assert "<script>␛[2J&amp;" in "".join(parse_page(page.render_page(report)).texts).replace(
        "&amp;amp;", "&amp;"
    )


def test_answers_with_no_log_are_not_counted(home_with_answers: Home, tmp_path: Path) -> None:
    def count_answers() -> int:
        total: int = json.loads(home_with_answers.run("stats", "--json").stdout)["total"]["answers"]
        return total

    old_count = count_answers()
    (tmp_path / "hole.py").write_text("!say\n")
    assert home_with_answers.run("ask", "--no-log", "say hello").returncode == 0
    assert home_with_answers.run("complete", "--no-log", f"{tmp_path}/hole.py:1").returncode == 0
    assert count_answers() == old_count
    assert home_with_answers.run("complete", f"{tmp_path}/hole.py:1").returncode == 0
    assert home_with_answers.run("ask", "say hello").returncode == 0
    assert count_answers() == old_count + 2


@given(
    tokens=st.integers(0, 40), seconds=st.floats(0, 0.2), per_second=st.none() | st.floats(0, 1e6)
)
def test_short_answers_have_no_rate(tokens: int, seconds: float, per_second: float | None) -> None:
    rate = figures.format_rate(tokens, seconds, per_second)
    assert not rate or (tokens >= 10 and seconds >= 0.05)


def test_the_usage_of_a_short_answer_has_no_rate(home_with_answers: Home) -> None:
    stderr = home_with_answers.run("ask", "-u", "say hello").stderr
    assert "tokens/s" not in stderr
    assert re.search(r"^\d+ tokens? in ", stderr, re.M)


GROUPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 99), st.floats(0, 9), st.none() | st.floats(1, 3)),
    min_size=1,
    max_size=80,
)


@given(groups=GROUPS, max_marks=st.integers(1, 60))
def test_days_that_share_a_mark_are_added_up(groups: list[Any], max_marks: int) -> None:
    days = [
        {
            "name": f"day {number}",
            "answers": answers,
            "tokens": tokens,
            "drafted": tokens,
            "accepted": tokens // 2,
            "seconds": duration,
            "measured_seconds": duration if speed_up else 0.0,
            "speed_up": speed_up if duration else None,
        }
        for number, (answers, tokens, duration, speed_up) in enumerate(groups)
    ]
    merged, days_per_mark = said.merge_days(days, max_marks)
    assert len(merged) <= max_marks
    assert len(merged) == -(-len(days) // days_per_mark)
    assert sum(day["tokens"] for day in merged) == sum(day["tokens"] for day in days)
    for series in said.make_series(merged):
        assert len(text.sparkline(series, "01234567")) == len(merged)


@pytest.mark.parametrize(
    ("seconds", "expected"),
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
def test_durations(seconds: float, expected: str) -> None:
    assert figures.format_duration(seconds) == expected


@given(st.floats(-1e7, 1e7))
def test_negative_durations_round_to_zero(seconds: float) -> None:
    duration = figures.format_duration(seconds)
    assert not duration.startswith("-under")
    assert duration.startswith("-") == (seconds <= -0.005)


@given(st.floats(0.5, 2.0), st.floats(-5, 5))
def test_a_speed_up_near_one_is_called_no_difference(ratio: float, saved: float) -> None:
    total = {"speed_up": ratio, "acceptance": None, "saved_seconds": saved, "tokens": 5000}
    total |= {"seconds": 10.0, "measured_seconds": 10.0}
    sentence = said._describe_speculation(total)
    assert ("no clear difference" in sentence) == (abs(ratio - 1) < 0.03)
    assert ("lost" in sentence or "saved" in sentence) == (abs(ratio - 1) >= 0.03)


def test_what_was_read_ahead_is_shown_by_client() -> None:
    with scripted_home() as home:
        assert "READ AHEAD" not in home.run("stats").stdout
        home.run("stop")
        client = {
            "form": "bare",
            "right": 3,
            "wrong": 1,
            "saved_ms": 90_000.0,
            "wasted_ms": 2_000.0,
        }
        (home.root / "state" / "clients.json").write_text(
            json.dumps({"some-agent /v1/messages": client})
        )
        row = table_row(home.run("stats").stdout, "some-agent /v1/messages")
        assert row == ["some-agent /v1/messages", "3 (75%)", "1", "90 s", "2.00 s"]
        assert "some-agent /v1/messages" in home.run("stats", "--html", "-").stdout
