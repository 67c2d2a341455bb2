"""Test that output fits terminals of 44 to 200 columns without breaking words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from localspec.cli.terminal import layout
from tests.cli.test_harmless import ARGUMENTS
from tests.support.daemons import Home, scripted_home
from tests.support.many import Job, in_a_terminal, in_pipes
from tests.support.terminal import ESCAPES

WIDTHS = range(44, 201)
PER_TERMINAL = 150  # This many commands take some seconds together.
# Verbatim output of any width: scripts, logs, paths, records and code.
VERBATIM = (
    "--json",
    "--html",
    "logs",
    "completion",
    "editor config",
    "history export",
    "config path",
    "--path",
    "--print",
    "--hook",
)
VERBATIM_TOO = (
    "export ",
    "ask ",
    "cmd ",
    "explain ",
    "complete",
    "history show -x",
    "templates show",
    "--man",
)
TITLE = "why is the 缓存 not emptied when a conversation was removed, and where does that happen? "


def _command_lines() -> Iterator[str]:
    for name, variants in ARGUMENTS.items():
        yield f"{name} --help"
        yield from (f"{name} {arguments}".strip() for arguments in variants if "❮" not in arguments)
    yield from ("--help", "nothing", "ask --nothing", "show missing-pair", "history show zzz")
    yield from (
        "verify builtin",
        "config set context -5",
        "config set contxt 5",
        "pull missing-pair",
    )
    yield from ("list --all", "rm -y missing", "add mine --target /nowhere/at/all.gguf")


LINES = [
    line
    for line in dict.fromkeys(_command_lines())
    if line.endswith("--help")
    or not (any(part in line for part in VERBATIM) or line.startswith(VERBATIM_TOO))
]


@pytest.fixture(scope="module")
def home_with_history() -> Iterator[Home]:
    """Yield a home with some conversations."""
    with scripted_home() as home:
        home.environment["EDITOR"] = "true"
        for text in (f"say {TITLE * 3}", "say two"):
            home.chat(text, localspec={"conversation": "new", "kind": "ask"})
        yield home


def make_job(line: str, width: int = 80) -> Job:
    words = [*shlex.split(line), *(["say", TITLE] if line.startswith("ask") else [])]
    return words, {"COLUMNS": str(width)}


def final_lines(raw: str) -> list[str]:
    """Return the lines as they stand at the end, without the spinner that a carriage return overwrote."""
    text = raw.replace("\r\n", "\n")
    return [ESCAPES.sub("", line.rsplit("\r", 1)[-1]) for line in text.split("\n")]


def is_too_wide(line: str, width: int) -> bool:
    """Return whether a line is too wide; a single word may be wider than the terminal."""
    return wcswidth(line) > width and len(line.removesuffix(" \\").split()) > 1


# Each command at 44, 80 and two other columns; together they cover all widths.
JOBS = [
    (line, width)
    for at, line in enumerate(LINES)
    for width in (44, 80, WIDTHS[7 * at % 157], WIDTHS[(11 * at + 5) % 157])
]


@pytest.mark.parametrize("start", range(0, len(JOBS), PER_TERMINAL))
def test_no_line_of_any_command_is_wider_than_the_terminal(
    home_with_history: Home, start: int
) -> None:
    jobs = JOBS[start : start + PER_TERMINAL]
    outputs = in_a_terminal(
        home_with_history.environment, [make_job(*entry) for entry in jobs], columns=80
    )
    for (line, width), raw in zip(jobs, outputs, strict=True):
        wide_lines = [entry for entry in final_lines(raw) if is_too_wide(entry, width)]
        assert not wide_lines, (line, width)


def normalized_words(text: str) -> set[str]:
    """Return the words of a text without commas and case, which differ between table layouts.

    Units of time are left out: a minute may pass between two outputs.
    """
    words = {word.strip(",").casefold().rstrip("?") for word in text.split()}
    return words - {"\\", "min", "h"}


def test_no_word_is_broken_that_would_fit(home_with_history: Home) -> None:
    plain = in_pipes(home_with_history.environment, [make_job(line) for line in LINES])
    for width in (44, 80):
        jobs = [make_job(line, width) for line in LINES]
        outputs = in_a_terminal(home_with_history.environment, jobs, columns=80)
        for line, raw, (_, out, err) in zip(LINES, outputs, plain, strict=True):
            # Skip Markdown, which is drawn differently on a terminal, and measurements, which differ
            # between runs.
            if line.startswith(("history", "bench")):
                continue
            plain_words = normalized_words(out + err)
            terminal_words = normalized_words("\n".join(final_lines(raw)))
            broken = {
                word for word in terminal_words - plain_words if word.isalpha() and word.isascii()
            }
            assert not broken, (line, width, broken)


WORDS = st.text(st.sampled_from("abc`.:缓é"), min_size=1, max_size=12)
TEXTS = st.lists(WORDS, max_size=40).map(" ".join)


@given(text=TEXTS, width=st.integers(12, 200), indent=st.integers(0, 8))
def test_wrapped_text_fits_and_keeps_its_words(text: str, width: int, indent: int) -> None:
    lines = layout.wrap(text, width, "- ", " " * indent)
    assert not [line for line in lines if is_too_wide(line, width)]
    assert "".join("".join(lines).split()) == "-" + "".join(text.split())
    assert len(lines) == 1 or all(line.strip() for line in lines)


@given(text=TEXTS, width=st.integers(14, 60), tinted=st.integers(0, 2**32))
def test_streamed_text_breaks_between_words(text: str, width: int, tinted: int) -> None:
    text = f"a {text}"  # Begin with a word, so that no code block begins.
    flow = layout.Flow(width)
    styles = ["32" * (tinted >> position % 32 & 1) for position in range(len(text))]
    output = "".join(map(flow.text, text, styles))
    output = ESCAPES.sub("", output + flow.release_word())
    assert output.replace("\n", "").replace(" ", "") == text.replace(" ", "")
    assert not [line for line in output.split("\n") if is_too_wide(line, width)]
    assert set(output.split()) <= set(text.split()) or not text.isascii()


@given(code=TEXTS, width=st.integers(12, 60))
def test_streamed_code_is_unchanged(code: str, width: int) -> None:
    text = f"```sh\n{code.replace('`', '')}\n```\n    {code}"
    flow = layout.Flow(width)
    assert "".join(map(flow.text, text)) + flow.release_word() == text


@given(path=st.text("abc/", min_size=1, max_size=80), width=st.integers(30, 120))
def test_a_path_stands_beside_or_below_its_name(path: str, width: int) -> None:
    *_, last_line = layout.fields([("socket", f"/{path}"), ("config", "fine")], width)[:-1]
    if last_line.startswith("socket"):
        return
    indent = len(last_line) - len(last_line.lstrip())
    assert indent in (0, 4)
    assert indent == 4 or len(last_line) + 4 > width


@given(
    rows=st.lists(
        st.tuples(WORDS, TEXTS.map(lambda text: text[:20].strip()), TEXTS), min_size=1, max_size=6
    ),
    width=st.none() | st.integers(30, 200),
)
def test_a_table_has_every_word_and_no_empty_column(
    rows: list[tuple[str, str, str]], width: int | None
) -> None:
    head = ("NAME", "NOTHING", "SOME", "WHAT")
    lines = layout.table([head, *((a, "", b, c) for a, b, c in rows)], width)
    table = "\n".join(lines)
    assert "NOTHING" not in table
    assert "nothing" not in table
    for row in rows:
        for word in " ".join(row).split():
            assert word in table or "".join(re.split(r"(缓)", word)) in "".join(table.split())
    if width is not None:
        assert not [line for line in lines if is_too_wide(line, width)]


def test_columns_are_aligned_wrapped_or_put_below_as_there_is_room() -> None:
    rows = [("NAME", "SIZE", "WHAT IT IS"), ("tiny", "1 MiB", "a model that is small " * 2)]
    rows = [tuple(map(str.strip, row)) for row in rows]  # type: ignore[misc]
    assert layout.table(rows, None) == [
        "NAME  SIZE   WHAT IT IS",
        "tiny  1 MiB  a model that is small a model that is small",
    ]
    assert layout.table(rows, 44) == [
        "NAME  SIZE   WHAT IT IS",
        "tiny  1 MiB  a model that is small a model",
        "             that is small",
    ]
    assert layout.table(rows, 30) == [
        "NAME  SIZE",
        "    WHAT IT IS",
        "tiny  1 MiB",
        "    a model that is small a",
        "    model that is small",
    ]
    assert layout.table(rows, 10)[:3] == ["tiny", "size 1 MiB", "    a"]


def test_a_wrapped_command_can_be_copied() -> None:
    line = "  localspec add mine --target /models/large.gguf --draft /models/small.gguf"
    wrapped = layout.wrap(line, 44)
    assert wrapped == [
        "  localspec add mine --target \\",
        "      /models/large.gguf --draft \\",
        "      /models/small.gguf",
    ]
    assert shlex.split("\n".join(wrapped).replace("\\\n", "")) == shlex.split(line)
    quoted = "  git diff | localspec ask -f 'src/*.py' \"is it complete, and is it right?\""
    wrapped = layout.wrap(quoted, 44)
    assert wrapped == [
        "  git diff | localspec ask -f 'src/*.py' \\",
        '      "is it complete, and is it right?"',
    ]
    noted = "  localspec ask -x > dates.py  # the code of the last answer"
    assert layout.wrap(noted, 44) == [
        "  # the code of the last answer",
        "  localspec ask -x > dates.py",
    ]
    hook = '  eval "$(localspec completion bash --hook)"'
    assert layout.wrap(hook, 42) == ["  eval \\", '"$(localspec completion bash --hook)"']
    message = "They were found on this disk: localspec list --all"
    assert layout.wrap(message, 44) == ["They were found on this disk:", "localspec list --all"]
