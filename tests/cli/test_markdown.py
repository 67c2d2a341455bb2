"""Test Markdown on a terminal: the text that is shown and copied is the text of the model."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import os
import random
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from localspec.cli.terminal import markdown, render
from localspec.cli.terminal.fences import Fences, blocks
from tests.support.screen import Screen

BRACKETS = "()[]{}<>"


def render_screen(
    text: str,
    columns: int = 80,
    lines: int = 24,
    cuts: list[int] | None = None,
    text_before: str = "",
) -> Screen:
    """Return the screen after `text`, cut at the given positions; `text_before` was shown before."""
    stdout = io.StringIO()
    positions = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    with (
        patch.object(sys, "stdout", stdout),
        patch.object(shutil, "get_terminal_size", lambda: os.terminal_size((columns, lines))),
        patch.object(markdown, "_REDRAW_INTERVAL_S", 0.0),
    ):
        printer = render.MarkdownPrinter(text_before)
        for start, end in itertools.pairwise(positions):
            printer.text(text[start:end], [])
        printer.close()
    return Screen(columns, lines).feed(stdout.getvalue())


def render_text(text: str, columns: int = 80) -> str:
    return "\n".join(render_screen(text, columns).shown).strip()


def significant_characters(text: str) -> str:
    """Return the letters, digits and brackets of a text."""
    return "".join(char for char in text if char.isalnum() or char in BRACKETS)


def expected_characters(text: str) -> str:
    """Return those of an answer, but not the names of languages, which colours show."""
    reader, shown = Fences(), []
    for line in text.split("\n"):
        kind = reader.classify_next(line)
        known = kind == "open" and " " not in reader.info and is_language(reader.info.strip("{}."))
        shown.append(reader.before if known else line)
    return significant_characters("\n".join(shown))


@functools.cache
def is_language(name: str) -> bool:
    with contextlib.suppress(ClassNotFound):
        return bool(get_lexer_by_name(name))
    return False


MARKS = [*"*_`~#|\\-+>!&;:.,/=\"' \n", "**", "```", "\n\n", "    ", "| ", "\n- ", "\n1. "]
WORDS = [
    "a",
    "word",
    "List<String>",
    "<div>",
    "__init__",
    "src/**/*.py",
    "[x](http://a/b_c)",
    "é",
    "字",
    "文字列",
    "x" * 50,
]
soup = st.lists(
    st.sampled_from([*MARKS, *WORDS]) | st.text("ab1(<[ \n", max_size=8), max_size=60
).map("".join)
words = st.lists(
    st.sampled_from(
        [
            *WORDS,
            "**bold text**",
            "*so*",
            "`code`",
            "``a`b``",
            "&lt;",
            "2**3**4",
            "x*y*z",
            "**a `b` c**",
        ]
    ),
    min_size=1,
    max_size=25,
).map(" ".join)
code = st.lists(st.text("ab (){}[]<>#*_\"'|`", max_size=70), max_size=6).map("\n".join)
fences = st.builds(
    lambda indent, mark, language, inside: "\n".join(
        f"{' ' * indent}{line}" for line in [f"{mark}{language}", *inside.split("\n"), mark]
    ),
    st.integers(0, 3),
    st.sampled_from(["```", "````", "~~~"]),
    st.sampled_from(["", "python", "c++", "no such language", "json"]),
    code.filter(lambda text: "```" not in text),
)
tables = st.lists(st.lists(words, min_size=1, max_size=4), min_size=1, max_size=12).map(
    lambda rows: "\n".join(
        f"| {' | '.join(row)} |" + ("\n|---|:-:|" if at == 0 else "") for at, row in enumerate(rows)
    )
)
blocks_ = st.one_of(
    words,
    fences,
    tables,
    st.builds(
        "{} {}".format,
        st.sampled_from(["#", "###", "-", "  *", "10.", "    3)", ">", "> >"]),
        words,
    ),
    st.builds("    {}".format, words),
    soup,
)
documents = st.lists(st.tuples(blocks_, st.sampled_from(["\n", "\n\n", "\n\n\n"])), max_size=8).map(
    lambda parts: "".join(block + end for block, end in parts)
)
columns = st.integers(20, 200)
lines = st.integers(4, 50)
cuts = st.lists(st.integers(0, 4000), max_size=80)


@settings(max_examples=60, deadline=None)
@given(documents, columns, lines, cuts)
@example("**" + "a " * 60 + "b** c", 20, 4, list(range(400)))
@example("| a |\n|---|\n" + "| b |\n" * 20 + "| " + "word " * 9 + "|\n", 20, 4, list(range(400)))
def test_no_character_is_lost_on_the_screen(
    text: str, columns: int, lines: int, cuts: list[int]
) -> None:
    screen = render_screen(text, columns, lines, cuts)
    assert significant_characters("".join(screen.shown)) == expected_characters(text)


@settings(max_examples=50, deadline=None)
@given(documents, columns, cuts)
def test_an_answer_in_pieces_looks_like_the_whole(text: str, columns: int, cuts: list[int]) -> None:
    assert (
        render_screen(text, columns, 10_000, cuts).shown
        == render_screen(text, columns, 10_000).shown
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(words, fences), min_size=1, max_size=4), columns, lines, cuts)
def test_a_copied_code_block_is_what_the_model_wrote(
    parts: list[tuple[str, str]], columns: int, lines: int, cuts: list[int]
) -> None:
    text = "\n\n".join(piece for part in parts for piece in part)
    copied = render_screen(text, columns, lines, cuts).copied
    for block in blocks(text):
        assert f"\n{block}\n" in copied
        copied = copied[copied.index(f"\n{block}\n") + len(block) + 1 :]


@settings(max_examples=50, deadline=None)
@given(documents, documents, columns, lines, cuts)
def test_a_continued_answer_shows_the_new_text(
    text_before: str, text: str, columns: int, lines: int, cuts: list[int]
) -> None:
    characters = significant_characters(
        "".join(render_screen(text, columns, lines, cuts, text_before).shown)
    )
    before, whole = expected_characters(text_before), expected_characters(text_before + text)
    assume(whole.startswith(before))  # not where the name of a language is complete only now
    new = whole.removeprefix(before)
    # A table row or a list marker is drawn again as a whole.
    assert characters.endswith(new)
    assert before.endswith(characters.removesuffix(new))


ROOT = Path(__file__).parents[2]


def load_answers() -> list[str]:
    """Load answers of the shipped pair, texts in the style of larger models, and documentation."""
    answers = (ROOT / "tests" / "support" / "answers.md").read_text().split("\f\n")
    pages = sorted((ROOT / "localspec" / "docs").glob("*.md"))
    for path in (ROOT / "README.md", *(page for page in pages if page.name != "commands.md")):
        answers += path.read_text(encoding="utf-8").split("\n## ")
    for name in ("argparse", "textwrap", "shutil", "json", "re", "random", "string", "statistics"):
        module = importlib.import_module(name)
        texts = [
            inspect.getdoc(member)
            for member in [module, *vars(module).values()]
            if callable(member)
        ]
        answers += [member for member in texts if member]
    return list(dict.fromkeys(answers))


ANSWERS = load_answers()


def test_there_are_200_real_answers() -> None:
    assert len(ANSWERS) >= 200


@pytest.mark.parametrize(("columns", "first"), [(20, 0), (44, 1), (80, 0), (200, 1)])
def test_no_character_of_real_answers_is_lost(columns: int, first: int) -> None:
    """Each answer is shown on a narrow screen and on a wide one."""
    rng = random.Random(columns)
    for answer in ANSWERS[first::2]:
        positions = [rng.randrange(len(answer)) for _ in range(len(answer) // rng.randint(1, 40))]
        screen = render_screen(answer, columns, rng.choice([6, 24, 60]), positions)
        assert significant_characters("".join(screen.shown)) == expected_characters(answer)
        copied = screen.copied.expandtabs()
        assert [b for b in blocks(answer) if f"\n{b.expandtabs()}\n" not in f"\n{copied}"] == []


@pytest.mark.parametrize(
    "text",
    [
        "Use the <div> element or List<String>: grep <pattern>. Press <Enter>.",
        "src/**/*.py and lib/**/*.py, **/*.txt, *.py or test_*.c",
        "../../Tools/*/*.gif",
        "2*3*4, 2**3**4, x*y",
        "__init__ of _private and snake_case_",
        "f(*args, **kwargs) and *p = **q",
        "a &lt;b&gt; &amp; &#8238; c",
        r"\d+\.\w C:\new \(x\) \[y\]",
        "[text](https://a.b/c_d_e) ![alt](x.png) [a][b]",
        "[b]: https://a.b 'title'",
        "~~struck~~ H~2~O",
        "a lone ` backtick, * star",
        "#hashtag #include <stdio.h>",
        "1) one\n7) seven\n007. agent",
        "<!-- note -->\n<details>\n<summary>x</summary>",
        "one\ntwo\nthree",
    ],
)
def test_text_without_markup_is_unchanged(text: str) -> None:
    assert render_text(text) == text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("**bold**, *it*, ***both***, __bold too__, _it_", "bold, it, both, bold too, it"),
        ('**a *b* c** (**d**) "*e*"', 'a b c (d) "e"'),
        ("`code` ``a `b` c`` `x*y*z`", "code a `b` c x*y*z"),
        ("这是**粗体**文字", "这是粗体文字"),
        (r"\*no\* \_no\_ \`no\` \# no", "*no* _no_ `no` # no"),
        ("# One\n## Two ##\n### C#", "One\nTwo\nC#"),
        ("- a\n  * b\n    + c", "• a\n  • b\n    • c"),
        ("- [ ] a\n- [x] b", "• [ ] a\n• [x] b"),
        ("a\n\n\n\nb", "a\n\nb"),
        ("```\na  b\n```\nc", "a  b\n\nc"),
        ("a\n```python\nb\n```", "a\n\nb"),
        ("a\n\n~~~ c++\nb\n~~~\nc", "a\n\nb\n\nc"),
        ("a\n```python src/b.py\nb\n```", "a\n\npython src/b.py\nb"),
        ("a\n```b.py\nb\n```", "a\n\nb.py\nb"),
        ("1. ```sh\n   ls\n   ```\n2. b", "1.\nls\n\n2. b"),
        ("    code\n      more", "code\n  more"),
        ("| a | b |\n|---|--:|\n| `x|y` | 10 |", "a   │  b\n────┼───\nx|y │ 10"),
    ],
)
def test_markup_is_rendered(text: str, plain: str) -> None:
    assert render_text(text) == plain


def test_emphasis_and_code_have_a_style(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        markdown.paint(markdown.parse_inline("a **b** `c`")) == "a \x1b[1mb\x1b[0m \x1b[36mc\x1b[0m"
    )
    monkeypatch.setenv("NO_COLOR", "1")  # Without colours, backticks mark the code.
    assert markdown.paint(markdown.parse_inline("a **b** `c`")) == "a \x1b[1mb\x1b[0m `c`"


@settings(max_examples=200, deadline=None)
@given(st.text('ab1 .,*_*_/()字"-', min_size=1, max_size=20))
@example(
    "*_1*_"
)  # the first mark ends before the second does, though it opens nothing that is drawn
def test_emphasis_agrees_with_commonmark(text: str) -> None:
    tokens = MarkdownIt("commonmark").parseInline(text)[0].children or []
    theirs = "".join(token.content for token in tokens if token.type == "text")
    ours = markdown.parse_inline(text).plain
    assert [ours.count(mark) >= theirs.count(mark) for mark in "*_"] == [True, True]


def test_a_language_is_named_where_no_colours_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert render_text("a\n```nosuchlanguage\nb\n```") == "a\n\nnosuchlanguage\nb"
    monkeypatch.setenv("NO_COLOR", "1")
    assert render_text("a\n```python\nb\n```\nc") == "a\n\n```python\nb\n```\n\nc"
    assert render_text("a\n~~~\nb") == "a\n\n```\nb"


def test_a_continued_code_block_stays_code() -> None:
    assert render_screen(
        "n\n    x = a*b*c\n```\n**so**", text_before="Do:\n```python\nretur"
    ).copied.startswith("n\n    x = a*b*c\n\nso")


def test_a_table_that_does_not_fit_keeps_its_cells_in_order() -> None:
    text = "| a | b |\n|---|---|\n| one two three | four five six |\n| 1 | 2 |\n"
    assert render_text(text, 20).split("\n") == [
        "a │ b",
        "─" * 19,
        "one two three │",
        "  four five six",
        "1 │ 2",
    ]


def test_a_code_block_in_a_list_is_copied_without_the_lists_indentation() -> None:
    text = "1. Do\n   ```sh\n   if a; then\n     b\n   fi\n   ```\n2. Then"
    assert blocks(text) == ["if a; then\n  b\nfi"]
    assert "\nif a; then\n  b\nfi\n" in render_screen(text).copied


def test_tabs_and_other_separators_are_part_of_the_code() -> None:
    text = "```make\nall:\n\tcc\x0b -o\u2028 x\n```\n"
    assert blocks(text) == ["all:\n\tcc\x0b -o\u2028 x"]
    assert "all:\n        cc" in render_screen(text).copied


def test_a_tab_at_the_end_of_a_row_loses_no_character() -> None:
    text = f"```\n{'x' * 20}\ty\n{'x' * 18}\ty\n```"
    assert f"{'x' * 20} y\n{'x' * 18} y" in render_screen(text, 20).copied
