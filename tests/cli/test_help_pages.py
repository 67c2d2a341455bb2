"""Test `localspec help TOPIC`, which shows pages of the documentation, and its `--search`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from wcwidth import wcswidth

from localspec.cli import topics
from localspec.cli.terminal import page
from localspec.cli.terminal.markdown import bare_text
from tests.support.daemons import Home
from tests.support.extras import needs
from tests.support.terminal import terminal


@pytest.mark.parametrize(
    ("words", "topic"),
    [
        ("pairs", "pairs"),  # This is also a synonym of a command.
        ("editors/vim", "editors/vim"),
        ("editors vim", "editors/vim"),
        ("vim", "editors/vim"),
        ("how it works", "how-it-works"),
        ("decisions", "decisions"),
        ("changelog", "changelog"),
    ],
)
def test_words_find_a_page(words: str, topic: str) -> None:
    assert topics.find(tuple(words.split())) == topic


@pytest.mark.parametrize("words", ["pairs", "editors vim"])
def test_a_pipe_gets_the_source_of_a_page(home: Home, words: str) -> None:
    result = home.run("help", *words.split())
    source = topics.source(words.replace(" ", "/"))
    assert (result.returncode, result.stdout) == (0, source), result.stderr


@needs("editors")
def test_commands_come_before_pages_and_pages_before_synonyms(home: Home) -> None:
    assert home.run("help", "lsp").stdout.startswith("Usage: localspec lsp")
    assert home.run("help", "search").stdout.startswith("Usage: localspec catalogue")
    assert home.run("help", "embeddings").stdout.startswith("# Embeddings")
    assert home.run("help", "--man", "embeddings").stdout.startswith('.TH "LOCALSPEC\\-EMBED"')


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("quickstrat", "did you mean quickstart?"),
        ("emcas", "editors/emacs"),
        ("daemon", "did you mean status?"),
        ("xyzzy", ""),
    ],
)
def test_an_unknown_topic_suggests_a_similar_one(home: Home, word: str, suggestion: str) -> None:
    result = home.run("help", word)
    assert result.returncode == (2 if not topics.search([word]) else 0)
    assert f"No command or page '{word}'" in result.stderr
    assert suggestion in result.stderr


def test_a_search_prints_page_heading_and_line(home: Home) -> None:
    output = home.must_run("help", "--search", "HTTPS_proxy")
    assert output.startswith("pairs: Pull from the hub\n  ")
    assert "HTTPS_PROXY" in output.splitlines()[1]
    no_match = home.run("help", "--search", "no page has xyzzy")
    assert (no_match.returncode, no_match.stdout) == (1, "")
    assert "No page contains 'no page has xyzzy'." in no_match.stderr
    assert home.run("help", "ask", "--search", "x").returncode == 2


def test_a_word_that_is_no_page_is_searched_for(home: Home) -> None:
    for words in (("projector",), ("shell", "variable"), ("proxy",)):
        result = home.run("help", *words)
        assert result.returncode == 0
        assert f"No command or page '{' '.join(words)}'" in result.stderr
        assert result.stdout == home.run("help", "--search", " ".join(words)).stdout != ""


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("emacs", "editors/emacs: Emacs"),
        ("vim", "editors/vim: Vim and Neovim"),
        ("pdf", "pairs: PDF documents"),
        ("picture", "pairs: Pictures"),
        ("export", "upstream: Export"),
        ("uninstall", "upgrade: Upgrade and uninstall"),
        ("gpu small", "pairs: A GPU that is too small"),
        ("small GPU", "pairs: A GPU that is too small"),
    ],
)
def test_titles_come_first_in_any_order_of_words(words: str, first: str) -> None:
    found = topics.search(words.split())
    assert f"{found[0].topic}: {found[0].heading}" == first
    past = [section.topic == "changelog" or "decisions" in section.topic for section in found]
    assert past == sorted(past)


def test_order_and_case_of_words_change_nothing() -> None:
    found = topics.search(["answer", "draft", "model"])
    assert found == topics.search(["draft", "MODEL", "Answer"])
    assert found == topics.search(["MODEL", "ANSWER", "DRAFT"])
    for section in found:
        text = topics.source(section.topic).lower()
        assert all(word in text for word in ("answer", "draft", "model"))


def test_help_lists_the_pages(home: Home) -> None:
    session = home.run("help").stdout
    for entries in topics.groups().values():
        assert entries
        for topic, _ in entries:
            assert f"    {topic} " in session


def test_a_comment_within_code_is_not_a_heading() -> None:
    headings = {section.heading for section in topics.search(["localspec"])}
    assert "localspec ask" in headings
    assert not {heading for heading in headings if heading.startswith("in ~/")}


@pytest.mark.parametrize("columns", [44, 80, 200])
@pytest.mark.parametrize("topic", [topic for topic in topics.pages() if topic != "commands"])
def test_rows_fit_the_terminal_and_lose_no_word(topic: str, columns: int) -> None:
    rows = [bare_text(row) for row in page.rows(topics.with_commands(topic), columns)]
    for row in rows:
        is_code = row.startswith("    ")
        assert is_code or wcswidth(row) < columns or " " not in row.strip(" •│"), row
    letters = "".join(filter(str.isalnum, "".join(rows)))
    position = 0
    for word in topics.source(topic).split():
        if word.isalpha():
            position = letters.index(word, position) + len(word)


def test_links_to_pages_are_shown_as_commands() -> None:
    session = topics.with_commands("quickstart")
    assert "The page asking (`localspec help asking`)" not in session
    assert "The page asking has all the ways to ask" in session
    assert "at the shell prompt (`localspec help shell`)" in session
    assert "](" not in session
    assert "gptel (https://github.com/karthink/gptel)" in topics.with_commands("editors/emacs")


# --- on a terminal


def test_a_short_page_is_drawn_on_the_terminal(home: Home) -> None:
    environment = {**home.environment, "PAGER": "false"}
    with terminal(environment, "help", "zed", lines=60) as session:
        session.expect("edit_predictions")
        assert session.wait() == 0
        assert "# Zed" not in session.text
        assert "\x1b[1" in session.raw


def test_a_long_page_goes_through_the_pager(home: Home, tmp_path: Path) -> None:
    copy = tmp_path / "paged"
    environment = {**home.environment, "PAGER": f"cat > {shlex.quote(str(copy))}; echo $LESS >&2"}
    with terminal(environment, "help", "pairs", lines=24) as session:
        session.expect("FRX")
        assert session.wait() == 0
        assert "Pull from the hub" not in session.text
    assert "Pull from the hub" in copy.read_text()


def test_a_small_window_shows_the_catalogue_from_its_beginning(home: Home, tmp_path: Path) -> None:
    """Its columns fit into 80 cells, with the descriptions below, which say what would fit."""
    copy = tmp_path / "paged"
    home.configure(memory=8000)
    environment = {**home.environment, "PAGER": f"cat > {shlex.quote(str(copy))}; echo $LESS >&2"}
    with terminal(environment, "catalogue", columns=80, lines=24) as session:
        session.expect("FRX")
        session.expect("To download one")
        assert session.wait() == 0
        assert "FITS" not in session.text
    lines = [bare_text(line) for line in copy.read_text().splitlines()]
    assert lines[0].startswith("NAME")
    assert max(map(wcswidth, lines)) <= 80
    assert not any("fits no" in line for line in lines)
    assert any("; would fit as" in line or "; needs " in line for line in lines)


@pytest.mark.parametrize("arguments", [(), ("help",), ("help", "pull")])
def test_help_that_is_longer_than_the_screen_goes_through_the_pager(
    home: Home, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    copy = tmp_path / "paged"
    environment = {**home.environment, "PAGER": f"cat > {shlex.quote(str(copy))}; echo $LESS >&2"}
    with terminal(environment, *arguments, lines=24) as session:
        session.expect("FRX")
        assert session.wait() == (0 if arguments else 2)
        assert "Usage: localspec" not in session.text
    assert copy.read_text().startswith("Usage: localspec")
    with terminal(environment, *arguments, lines=200) as session:
        session.expect("Usage: localspec")
        session.wait()


@pytest.mark.parametrize("pager", ["", "cat", "no-such-program-zq"])
def test_without_a_pager_the_page_is_printed(home: Home, pager: str) -> None:
    with terminal({**home.environment, "PAGER": pager}, "help", "pairs", lines=24) as session:
        session.expect("Several pairs in memory")
        assert session.wait() == 0


def test_a_pager_that_leaves_early_is_no_error(home: Home) -> None:
    with terminal({**home.environment, "PAGER": "head -1"}, "help", "facts", lines=24) as session:
        session.expect("Measured facts")
        assert session.wait() == 0
        assert "Traceback" not in session.text


def test_a_dumb_terminal_gets_no_escape_codes(home: Home) -> None:
    with terminal({**home.environment, "TERM_": "dumb"}, "help", "vscode") as session:
        session.expect("# VS Code")
        assert session.wait() == 0
        assert "\x1b" not in session.raw
