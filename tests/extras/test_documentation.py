"""Test the README and the pages: commands run, links exist, and generated tables are current."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import config
from localspec.cli import topics
from localspec.cli.app import COMMANDS
from localspec.cli.options import ALIASES
from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "localspec" / "docs"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
}
LINKING = PAGES | {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (".github/CONTRIBUTING.md", ".github/SECURITY.md", "localspec/builtin/README.md")
}
README = PAGES["README.md"]
BUILTIN = ROOT / "localspec" / "builtin"


def find_code_blocks(language: str) -> list[str]:
    """Return all code blocks of a language, each once."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return list(dict.fromkeys(block for text in PAGES.values() for block in pattern.findall(text)))


def list_commands() -> list[str]:
    """Return every line of shell, once, except those of scripts/, which the tests of setup run."""
    text = "".join(find_code_blocks("sh")).replace("\\\n", " ")
    lines = [re.sub(r"\s{2,}#.*", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and line[0] != "#" and not line.startswith("scripts/")]
    return list(dict.fromkeys(lines))


# Commands that fail here, without network and terminal: their exit code and a part of the message.
REFUSED = {
    "localspec pull coder-7b": (1, "HF_HUB_OFFLINE"),
    "localspec pull Qwen/Qwen3-8B-GGUF:Q4_K_M": (1, "HF_HUB_OFFLINE"),
    "localspec pull nomic-embed": (1, "HF_HUB_OFFLINE"),
    "localspec use coder-7b": (1, "localspec pull coder-7b"),
    "localspec embed --json notes/*.md > vectors.jsonl": (2, "No file matches 'notes/*.md'"),
    'localspec ask -m coder-7b "What is a monad?"': (1, "localspec pull coder-7b"),
    "localspec show coder-7b --context 16384": (1, "localspec pull coder-7b"),
    "localspec verify coder-7b": (1, "localspec pull coder-7b"),
    "localspec rm coder-7b smollm2": (2, "add --yes"),
    "localspec tune --files ~/src/project": (2, "There is no file or folder"),
    "localspec tune --new --files ~/src/project --minutes 240": (2, "There is no file or folder"),
    "localspec uninstall": (2, "add --yes"),
    "localspec uninstall --models --history": (2, "add --yes"),
    "localspec editor install vscode": (1, "Install from VSIX"),
    "localspec launch claude": (1, "npm install -g @anthropic-ai/claude-code"),
    "localspec tune --revert": (2, "add --yes"),
    'localspec ask -f shot.png "What does it say?"': (2, "shot.png cannot be read"),
    'localspec ask -f paper.pdf "What is new in it?"': (2, "paper.pdf cannot be read"),
    "localspec chat": (2, "A chat needs a terminal"),
    "localspec chat -t brief -f 'src/*.py'": (2, "A chat needs a terminal"),
    'localspec ask --copy "What does glob do?"': (1, "Not copied"),
    'localspec cmd "find files over 1 GB changed this week"': (1, "built-in demo pair"),
    "ls no-such-file 2>&1 | localspec explain": (1, "built-in demo pair"),
    "localspec ask -x > dates.py": (2, "No question given"),  # This works only at a terminal.
    "localspec commit": (1, "built-in demo pair"),
    "localspec status --watch": (130, ""),
    "localspec rpc-worker": (130, "Serving layers on 127.0.0.1:50052"),
    'localspec ask -x "parse ISO dates" > dates.py': (
        1,
        "writes code only when asked for an example",
    ),
}
NOT_ALONE = {  # commands that must run before
    'localspec ask -m big "What does shutil.copytree do?"': (
        "localspec add big --upstream http://127.0.0.1:9/v1 --fallback builtin --replace; "
    ),
    "localspec ask -c": 'localspec ask -n 3 "What does shutil.copytree do?"; ',
    "localspec start --listen 127.0.0.1:8012": "localspec stop; ",
}


ENDLESS = {"localspec status --watch", "localspec rpc-worker"}  # what only Ctrl-C ends


@pytest.fixture(scope="module")
def reader() -> Iterator[dict[str, str]]:
    """Yield the environment of a reader who follows the pages in a folder of code."""
    root = Path(tempfile.mkdtemp(prefix="ls-"))
    for name in ("bin", "run", "work/src", "models"):
        (root / name).mkdir(parents=True, mode=0o700)
    program = root / "bin" / "localspec"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m localspec "$@"\n')
    program.chmod(0o755)
    (root / "bin" / "ssh").symlink_to("/bin/true")  # No other machine is contacted.
    work = root / "work"
    (work / "src" / "main.py").write_text("X = 1\n" * 45)
    shutil.copy(BUILTIN / "target.gguf", work / "a.gguf")
    shutil.copy(BUILTIN / "draft.gguf", work / "b.gguf")
    environment_kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("LOCALSPEC_", "XDG_", "HF_", "DISPLAY", "WAYLAND_"))
    }
    environment = {
        **environment_kept,
        "PATH": f"{root}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(root),
        "XDG_RUNTIME_DIR": str(root / "run"),
        "HF_HUB_OFFLINE": "1",
        "PWD": str(work),
    }
    run_in_shell("git init -q && git add src && echo 'X = 2' > src/main.py", environment)
    (work / "src" / "main.py").write_text("X = 1\n" * 44 + "X = 2\n")
    assert (
        run_in_shell('localspec ask "What does shutil.copytree do?"', environment).returncode == 0
    )
    yield environment
    assert run_in_shell("localspec stop", environment).returncode == 0
    shutil.rmtree(root)


def run_in_shell(line: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env=environment,
        cwd=environment["PWD"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def interrupt_in_shell(line: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command until it has written a line, and interrupt it. What it writes is all in `stderr`."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        env=environment,
        cwd=environment["PWD"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout
        written = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # as impatient people do
        written += process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == -signal.SIGINT
    return subprocess.CompletedProcess(line, 130, "", written)


def test_the_pages_contain_commands() -> None:
    assert len(list_commands()) > 60
    assert {*REFUSED, *NOT_ALONE, *ENDLESS} <= set(list_commands())


@pytest.mark.parametrize("line", list_commands())
def test_a_command_of_a_page_runs(reader: dict[str, str], line: str) -> None:
    code, message = REFUSED.get(line, (0, ""))
    # Use any free port, because another test or a real daemon may use this one.
    run_line = interrupt_in_shell if line in ENDLESS else run_in_shell
    configuration = Path(reader["HOME"]) / ".config" / "localspec" / "config.toml"
    before = configuration.read_bytes() if configuration.exists() else b""
    run = run_line(NOT_ALONE.get(line, "") + line.replace(":8012", ":0"), reader)
    if configuration.exists() and configuration.read_bytes() != before:
        run_in_shell("localspec config set pair; localspec config set listen", reader)
    assert (run.returncode, message in run.stderr) == (code, True), run.stderr
    assert "Traceback" not in run.stderr
    if line.startswith("curl"):
        assert json.loads(run.stdout)["choices"][0]["message"]["content"]


def test_the_snippet_for_python_runs(reader: dict[str, str]) -> None:
    (snippet,) = find_code_blocks("python")
    adapted = snippet.replace("/run/user/1000", reader["XDG_RUNTIME_DIR"])
    assert adapted != snippet
    program = f"{adapted}\nprint([each.id for each in client.models.list()])\n"
    run = subprocess.run(
        [sys.executable, "-c", program], env=reader, capture_output=True, text=True
    )
    assert "builtin" in run.stdout, run.stderr


def test_the_table_of_the_configuration_is_current() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(.*?)` \|", (DOCS / "configuration.md").read_text(), re.MULTILINE
    )
    default = config.Config()
    assert rows == [(key, json.dumps(getattr(default, key))) for key in config.KEYS]


def test_the_picture_of_the_readme_is_self_contained() -> None:
    (name,) = re.findall(r"!\[.*?\]\((.*?)\)", README)
    picture = (ROOT / name).read_text()
    assert "localspec&#160;status" in picture
    assert len(picture) < 60_000
    assert "url(http" not in picture


def test_the_readme_is_short_and_begins_with_two_commands() -> None:
    assert len(README.splitlines()) <= 150
    first_line, second_line = [line for line in README.splitlines() if line.startswith("scripts/")][
        :2
    ]
    assert (first_line.split()[0], second_line.split()[0]) == ("scripts/ask", "scripts/test")


def test_the_page_of_commands_is_current() -> None:
    # Use a new process, because click keeps the names of --help from a command's first context.
    script = [sys.executable, str(ROOT / "scripts" / "commands_page.py"), "--print"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(script, env=environment, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    assert PAGES["localspec/docs/commands.md"] == result.stdout, "run scripts/commands_page.py"


# --- links

_LINK = re.compile(r"!?\[[^]]*\]\(([^)\s]+)\)")


def find_anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def find_links(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [
        target for target in _LINK.findall(re.sub(r"`[^`]*`", "", prose)) if "://" not in target
    ]


@pytest.mark.parametrize("name", LINKING)
def test_the_links_of_a_page_lead_somewhere(name: str) -> None:
    for link in find_links(LINKING[name]):
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in find_anchors(path.read_text(encoding="utf-8")), (
                f"{name} links to {link}"
            )


def test_every_decision_is_in_their_index() -> None:
    folder = DOCS / "decisions"
    listed = find_links((folder / "index.md").read_text())
    decisions = sorted(path.name for path in folder.glob("0*.md"))
    assert [name for name in listed if not name.startswith("..")] == decisions


def test_the_index_names_each_page_by_its_topic() -> None:
    listed = [topic for entries in topics.groups().values() for topic, _ in entries]
    pages = {topic for topic in topics.pages() if not topic.startswith("decisions/")} - {"index"}
    assert sorted(listed) == sorted(pages)


def test_no_page_hides_behind_a_command() -> None:
    assert not topics.pages().keys() & {*COMMANDS, *ALIASES}


@pytest.mark.parametrize("name", [name for name in PAGES if name != "README.md"])
def test_a_page_begins_with_a_title_and_a_summary(name: str) -> None:
    title, blank, summary = PAGES[name].splitlines()[:3]
    assert title.startswith("# ")
    assert not blank
    assert summary


def test_the_files_that_contributing_names_are_there() -> None:
    text = LINKING[".github/CONTRIBUTING.md"]
    names = re.findall(r"`((?:localspec|scripts|tests)/[\w./-]+)`", text)
    assert len(names) > 30
    assert [name for name in names if "NAME" not in name and not (ROOT / name).exists()] == []
