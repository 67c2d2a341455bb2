"""Test questions about folders, notebooks, PDF documents, files named as words, and URLs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic_projector import png
from localspec.cli import documents
from localspec.cli.options import expand_file_arguments
from localspec.errors import UsageError
from localspec.installation import install_extra_command
from tests.support.daemons import Home
from tests.support.documents import pdf, show, without_pictures_extra
from tests.support.patience import PATIENCE
from tests.support.terminal import terminal


def ask_model(home: Home, *line: str, **options: Any) -> tuple[str, str]:
    """Ask and return the question that the model received and the text on stderr."""
    home.run("ask", *line, **options)
    run = home.run("ask", *line, **options)
    assert run.returncode == 0, run.stderr
    messages = json.loads(home.run("history", "show", "--json").stdout)["messages"]
    return messages[0]["content"], run.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "src"
    files = {
        "a.py": b"a = 1\n", "b.py": b"b = 2\n", "sub/c.txt": b"c\n", ".hidden": b"no", ".git-like/x": b"no",
        "node_modules/x.js": b"no", "picture.png": b"\x89PNG\0", "latin.txt": b"\xe4",
        "data.csv": b"1\n" * 200_000,
    }  # fmt: skip
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "nowhere").symlink_to("at-all")
    return tmp_path


def test_a_folder_includes_its_text_files_and_lists_the_rest(warm: Home, folder: Path) -> None:
    question, stderr = ask_model(warm, "-f", "src", "say it", cwd=folder)
    names = [line for line in question.splitlines() if line.endswith(":")]
    assert names == ["src/a.py:", "src/b.py:", "src/sub/c.txt:"]
    assert stderr == (
        "src: 3 files, 14 bytes; left out: 1 hidden (.hidden); 1 over 256 KiB (data.csv); "
        "2 not text (latin.txt, picture.png).\n"
    )


def test_files_that_git_ignores_are_left_out(warm: Home, folder: Path) -> None:
    git = ["git", "-C", str(folder / "src")]
    if subprocess.run([*git, "init", "-q"], capture_output=True).returncode:
        return  # Without git, this is the same as the test above.
    (folder / "src" / ".gitignore").write_text("b.py\nsub\nnode_modules\n")
    marker = folder / "ran"
    subprocess.run([*git, "config", "core.fsmonitor", f"touch {marker}"], check=True)
    question, _ = ask_model(warm, "-f", "src", "say it", cwd=folder)
    names = [line for line in question.splitlines() if line.endswith(":")]
    assert names == ["src/a.py:"]
    assert not marker.exists()


def test_a_folder_without_text_and_one_with_too_much_are_refused(
    warm: Home, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    run = warm.run("ask", "-f", "empty", "say it", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (2, "localspec: empty has no text files.\n")
    (tmp_path / "much").mkdir()
    for number in range(20):
        (tmp_path / "much" / f"{number}.txt").write_text("x" * 250_000)
    assert "for example: -f 'much/**/*.py'" in warm.refused(
        "ask", "-f", "much/", "say it", cwd=tmp_path, code=2
    )


def test_a_url_is_refused_with_the_reason(warm: Home) -> None:
    message = warm.refused("ask", "-f", "https://example.com/a?b=[c]", "say it", code=2)
    assert "it works offline" in message
    assert "curl -fsSL 'https://example.com/a?b=[c]' | localspec ask" in message


def test_a_pattern_that_the_shell_expanded_is_all_files(warm: Home, folder: Path) -> None:
    for line in (
        ["-f", "src/a.py", "src/b.py", "say it"],
        ["say it", "-f", "src/a.py", "src/b.py"],
    ):
        question, stderr = ask_model(warm, *line, cwd=folder)
        assert question == "src/a.py:\n```\na = 1\n```\n\nsrc/b.py:\n```\nb = 2\n```\n\nsay it"
        assert stderr == "Also included, as files named after -f: src/b.py.\n"


def test_only_files_after_a_file_option_are_included(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "src")
    for line in (
        ["a.py", "b.py"],
        ["-f", "a.py", "why", "b.py"],
        ["-f", "a.py", "-s", "b.py"],
        ["-f", "a.py", "--", "b.py"],
        ["--", "-f", "a.py", "b.py"],
        ["-f"],
    ):
        assert expand_file_arguments(line) == line
    assert expand_file_arguments(["-f", "a.py", "b.py", "q"]) == ["-f", "a.py", "-f", "b.py", "q"]


def test_a_word_that_is_a_file_is_asked_about_on_a_terminal(warm: Home, folder: Path) -> None:
    for reply, included in (("", True), ("n", False)):
        with terminal(
            warm.environment, "ask", "say", str(folder / "src" / "a.py"), columns=400
        ) as session:
            session.expect("is a file here; include its text? [Y/n]")
            session.send(f"{reply}\r")
            assert session.wait() == 0
        messages = json.loads(warm.run("history", "show", "--json").stdout)["messages"]
        assert ("a = 1" in messages[0]["content"]) is included
        assert messages[0]["content"].endswith(f"say {folder / 'src' / 'a.py'}")


def test_a_word_that_is_a_file_is_noted_without_a_terminal(warm: Home, folder: Path) -> None:
    question, stderr = ask_model(warm, "say", "src/a.py", cwd=folder)
    assert question == "say src/a.py"
    assert stderr == "src/a.py is a file, and its text is not included; -f src/a.py includes it.\n"


@pytest.mark.parametrize(
    "line", [["-", "say"], ["say", "-"], ["-f", "-", "say"], ["-f", "-", "-", "-f", "-", "say"],
             ["-f", "/dev/stdin", "say"]]
)  # fmt: skip
def test_standard_input_is_read_once(warm: Home, line: list[str]) -> None:
    assert ask_model(warm, *line, stdin="given\n")[0] == "given\n\nsay"


def make_code_cell(source: object, **output: object) -> dict[str, object]:
    return {"cell_type": "code", "source": source, "outputs": [output] if output else []}


NOTEBOOK = {
    "nbformat": 4,
    "metadata": {"language_info": {"name": "python"}},
    "cells": [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        make_code_cell("print(1)", output_type="stream", text=["1\n"]),
        make_code_cell("1/0", ename="ZeroDivisionError", evalue="by zero"),
        make_code_cell("x", data={"text/plain": "\x1b[31mred\x1b[0m"}),
        make_code_cell([]),
    ],
}


def test_a_notebook_is_its_cells_and_what_they_printed(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "n.ipynb").write_text(json.dumps(NOTEBOOK))
    question, _ = ask_model(warm, "-f", "n.ipynb", "say it", cwd=tmp_path)
    assert question == (
        "n.ipynb:\n````\n# Title\ntext\n\n```python\nprint(1)\n```\nOutput:\n```\n1\n```\n\n"
        "```python\n1/0\n```\nOutput:\n```\nZeroDivisionError: by zero\n```\n\n"
        "```python\nx\n```\nOutput:\n```\nred\n```\n````\n\nsay it"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cells", "cell_type", "source", "outputs", "data", "text", "metadata",
                             "language_info", "name", "text/plain", "ename"]),
            inner,
        )
    ),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_any_notebook_is_text_or_refused(value: object) -> None:
    for text in (json.dumps(value), json.dumps({"cells": value}), json.dumps({"cells": [value]})):
        try:
            assert isinstance(documents.notebook_text("n.ipynb", text), str)
        except UsageError as error:
            assert "is not a Jupyter notebook" in error.message  # noqa: PT017
    with pytest.raises(UsageError):
        documents.notebook_text("n.ipynb", "[" * 100_000)


def test_a_pdf_goes_to_the_daemon(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"\n" * 9 + b"\xff" * 1000 + pdf(show("Hello")))
    question, _ = ask_model(warm, "-f", "*.pdf", "say it", cwd=tmp_path)
    assert question == "a.pdf, page 1 of 1:\nHello\n\nsay it"
    assert "No question given" in warm.refused("ask", "-f", "a.pdf", cwd=tmp_path, code=2)


def test_a_file_that_is_refused_is_named(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(png(4))
    (tmp_path / "bad one.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    words = ("-f", "good.png", "-f", "bad one.png", "-s", "Be brief.", "say it")
    error = warm.refused("ask", *words, cwd=tmp_path, code=1)
    assert error.startswith("localspec: bad one.png: the picture is damaged: it states no size")


def test_an_empty_file_is_noted(warm: Home, tmp_path: Path) -> None:
    for name in ("empty.txt", "blank.py", "full.py"):
        (tmp_path / name).write_text("x = 1\n" if name == "full.py" else "\n")
    run = warm.run("ask", "-f", "empty.txt", "say it", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "empty.txt is empty.\n")
    assert warm.run("ask", "-f", "*.py", "say it", cwd=tmp_path).stderr == ""


def run_with_stdin(
    home: Home, data: bytes, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return home.run(*arguments, stdin=os.fsdecode(data), cwd=folder)


def test_a_piped_document_and_a_file_of_its_name_are_both_read(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "stdin.pdf").write_bytes(pdf(show("Of the file")))
    words = ("ask", "-f", "stdin.pdf", "say it")
    run = run_with_stdin(warm, pdf(show("Of the pipe")), tmp_path, *words)
    assert run.returncode == 0, run.stderr
    question = json.loads(warm.run("history", "show", "--json").stdout)["messages"][0]["content"]
    assert "Of the pipe" in question
    assert "Of the file" in question


@pytest.mark.parametrize("arguments", [(), ("-",), ("-f", "-"), ("-f", "/dev/stdin")])
def test_stdin_may_be_what_a_file_may_be(
    warm: Home, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "more.txt").write_text("more")
    words = ("ask", *arguments, "-f", "more.txt", "say it")
    run = run_with_stdin(warm, b"\n" * 9 + pdf(show("Hello")), tmp_path, *words)
    assert run.returncode == 0, run.stderr
    question = json.loads(warm.run("history", "show", "--json").stdout)["messages"][0]["content"]
    assert question == "stdin.pdf, page 1 of 1:\nHello\n\nmore.txt:\n```\nmore\n```\n\nsay it"
    run = run_with_stdin(warm, b"\x89PNG\r\n\x1a\n\0", tmp_path, *words)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("localspec: Standard input: the picture is damaged")
    run = run_with_stdin(warm, pdf(show("x" * (5 << 20))), tmp_path, *words)
    assert "Standard input has more than" not in run.stderr  # that is the limit of a text
    run = run_with_stdin(warm, b"x" * (5 << 20), tmp_path, *words)
    assert "Standard input has more than 4 MiB" in run.stderr


def test_other_commands_read_a_pdf_on_stdin_as_text(warm: Home, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "pdftotext"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$4" = - ] && grep -q startxref && echo of pdftotext\n')
    program.chmod(0o755)
    home = Home(warm.root)
    home.environment = {**warm.environment, "PATH": f"{program.parent}:/bin:/usr/bin"}
    run = run_with_stdin(home, pdf(show("Hello")), tmp_path, "explain")
    assert "of pdftotext" in run.stdout, run.stderr
    run = run_with_stdin(home, b"\x89PNG\r\n\x1a\n\0", tmp_path, "explain")
    assert "Standard input is not text but a PNG image." in run.stderr


@pytest.mark.parametrize("command", [["ask"], ["ask", "-f", "-"], ["explain"]])
def test_a_pipe_that_stays_open_is_named(warm: Home, command: list[str]) -> None:
    reading, writing = os.pipe()
    process = warm.open_command(*command, stdin=reading)
    os.close(reading)
    assert process.stderr is not None
    note = process.stderr.readline()
    assert note == "Reading standard input until it ends; without one, add: </dev/null\n"
    os.write(writing, b"say so")
    os.close(writing)
    output, errors = process.communicate(timeout=PATIENCE)
    assert "so" in output
    assert "Reading" not in errors  # it is said once


def test_without_the_extra_a_pdf_is_read_by_pdftotext(warm: Home, tmp_path: Path) -> None:
    (tmp_path / "-d.pdf").write_bytes(b"%PDF-1.7\n\0")
    home = Home(warm.root)
    home.environment = {**warm.environment, **without_pictures_extra(tmp_path), "PATH": "/"}
    message = home.refused("ask", "--file", "./-d.pdf", "say it", cwd=tmp_path, stdin="", code=2)
    assert "./-d.pdf is a PDF document, and pdftotext" in message
    assert install_extra_command("pictures") in message.replace("\n", " ")
    program = tmp_path / "bin" / "pdftotext"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ "$4" = "$PWD/./-d.pdf" ] || [ "$4" = "$PWD/-d.pdf" ] && echo "$TEXT"\n'
    )
    program.chmod(0o755)
    home.environment |= {"PATH": f"{program.parent}:/bin:/usr/bin", "TEXT": "page"}
    question, _ = ask_model(home, "-f", "./-d.pdf", "say it", cwd=tmp_path)
    assert question == "./-d.pdf:\n```\npage\n```\n\nsay it"
    home.environment["TEXT"] = ""
    assert "without text" in home.refused("ask", "-f", "./-d.pdf", "say it", cwd=tmp_path, code=2)


def test_a_text_that_begins_like_a_bitmap_stays_text(warm: Home, tmp_path: Path) -> None:
    file = tmp_path / "cars.txt"
    file.write_text("BMW makes cars.")
    question, _ = ask_model(warm, "-f", str(file), "say hello")
    assert "BMW makes cars." in question
