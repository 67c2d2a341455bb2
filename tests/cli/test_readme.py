"""README tells the truth: its commands are run, its table is the configuration."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec import config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BUILTIN = ROOT / "localspec" / "builtin"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line of shell but those of scripts/, which the tests of setup run."""
    text = "".join(blocks("sh")).replace("\\\n", " ")
    lines = [re.sub(r"\s{2,}#.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and line[0] != "#" and not line.startswith("scripts/")]


# What cannot end well here: no network, no terminal, the small pair. Exit code, and what is said.
REFUSED = {
    "localspec pull coder-7b": (1, "HF_HUB_OFFLINE"),
    "localspec pull Qwen/Qwen3-8B-GGUF:Q4_K_M": (1, "HF_HUB_OFFLINE"),
    "localspec pull nomic-embed": (1, "HF_HUB_OFFLINE"),
    "localspec use coder-7b": (1, "localspec pull coder-7b"),
    "localspec embed --json notes/*.md > vectors.jsonl": (2, "No file matches 'notes/*.md'"),
    'localspec ask -m coder-7b "What is a monad?"': (1, "localspec pull coder-7b"),
    "localspec show coder-7b --context 16384": (1, "localspec pull coder-7b"),
    "localspec verify coder-7b": (1, "localspec pull coder-7b"),
    "localspec rm coder-7b smollm2": (1, "coder-7b"),
    "localspec chat": (2, "A chat needs a terminal"),
    "localspec chat -t review -f 'src/*.py'": (2, "A chat needs a terminal"),
    'localspec ask --copy "What does glob do?"': (1, "Not copied"),
    'localspec cmd "find files over 1 GB changed this week"': (1, "built-in demo pair"),
    "localspec ask -x > dates.py": (2, "No question given"),  # only at a terminal
    "localspec commit": (1, "built-in demo pair"),
    "localspec status --watch": (130, ""),
    "localspec rpc-worker": (130, "Serving layers on 127.0.0.1:50052"),
    'localspec ask -x "parse ISO dates" > dates.py': (
        1,
        "writes code only when asked for an example",
    ),
}
NOT_ALONE = {  # what comes before
    'localspec ask -m big "What does shutil.copytree do?"': (
        "localspec add big --upstream http://127.0.0.1:9/v1 --fallback builtin --replace; "
    ),
    "localspec ask -c": 'localspec ask -n 3 "What does shutil.copytree do?"; ',
    "localspec start --listen 127.0.0.1:8012": "localspec stop; ",
    "localspec status --watch": "timeout --preserve-status -s INT 3 ",
    "localspec rpc-worker": "timeout --preserve-status -s INT 3 ",
}


@pytest.fixture(scope="module")
def reader() -> Iterator[dict[str, str]]:
    """Somebody who follows README in a folder of code; the environment, with PWD."""
    root = Path(tempfile.mkdtemp(prefix="ls-"))
    for name in ("bin", "run", "work/src", "models"):
        (root / name).mkdir(parents=True, mode=0o700)
    program = root / "bin" / "localspec"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m localspec "$@"\n')
    program.chmod(0o755)
    (root / "bin" / "ssh").symlink_to("/bin/true")  # nobody else's machine
    work = root / "work"
    (work / "src" / "main.py").write_text("X = 1\n" * 45)
    shutil.copy(BUILTIN / "target.gguf", work / "a.gguf")
    shutil.copy(BUILTIN / "draft.gguf", work / "b.gguf")
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("LOCALSPEC_", "XDG_", "HF_", "DISPLAY", "WAYLAND_"))
    }
    environment = {
        **kept,
        "PATH": f"{root}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(root),
        "XDG_RUNTIME_DIR": str(root / "run"),
        "HF_HUB_OFFLINE": "1",
        "PWD": str(work),
    }
    shell("git init -q && git add src && echo 'X = 2' > src/main.py", environment)
    (work / "src" / "main.py").write_text("X = 1\n" * 44 + "X = 2\n")
    assert shell('localspec ask "What does shutil.copytree do?"', environment).returncode == 0
    yield environment
    assert shell("localspec stop", environment).returncode == 0
    shutil.rmtree(root)


def shell(line: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env=environment,
        cwd=environment["PWD"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_readme_shows_commands() -> None:
    assert len(commands()) > 30
    assert set(REFUSED) | set(NOT_ALONE) <= set(commands())


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme_runs(reader: dict[str, str], line: str) -> None:
    code, said = REFUSED.get(line, (0, ""))
    # Whichever port is free: another test, or a real daemon, may have this one.
    run = shell(NOT_ALONE.get(line, "") + line.replace(":8012", ":0"), reader)
    shell("localspec config set pair; localspec config set listen", reader)
    assert (run.returncode, said in run.stderr) == (code, True), run.stderr
    assert "Traceback" not in run.stderr
    if line.startswith("curl"):
        assert json.loads(run.stdout)["choices"][0]["message"]["content"]


def test_the_snippet_for_python_runs(reader: dict[str, str]) -> None:
    (snippet,) = blocks("python")
    used = snippet.replace("/run/user/1000", reader["XDG_RUNTIME_DIR"])
    assert used != snippet
    asked = f"{used}\nprint([each.id for each in client.models.list()])\n"
    run = subprocess.run([sys.executable, "-c", asked], env=reader, capture_output=True, text=True)
    assert "builtin" in run.stdout, run.stderr


def test_the_table_is_the_configuration() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", README, re.MULTILINE)
    default = config.Config()
    assert rows == [(key, json.dumps(getattr(default, key))) for key in config.KEYS]


def test_its_picture_is_there_and_fetches_nothing() -> None:
    (name,) = re.findall(r"!\[.*?\]\((.*?)\)", README)
    picture = (ROOT / name).read_text()
    assert "localspec&#160;status" in picture
    assert len(picture) < 60_000
    assert "url(http" not in picture
