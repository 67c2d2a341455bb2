"""Whatever lies in the folder where somebody is, nothing of it runs: neither by name nor by accident."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import localspec
from localspec.extras.editors import plugin
from localspec.extras.editors.settings import EditorEnvironment, _agent_command
from tests.support.daemons import Home, scripted_home

PACKAGE = Path(localspec.__file__).parent
PYTHONS = sorted(
    path for path in PACKAGE.rglob("*.py") if "sys.executable" in path.read_text(encoding="utf-8")
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with a module of each name of the standard library and of ours, which tells that it ran."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, "localspec", "click", "msgspec", "httpx", "llama_cpp"}:
        (folder / f"{name}.py").write_text("open('ran', 'a').write(__name__ + chr(10)); assert 0\n")
    return folder


@pytest.fixture
def home() -> Iterator[Home]:
    with scripted_home() as home:
        yield home


def commands() -> dict[str, list[str]]:
    """What is written into other programs' settings, with something to do."""
    [vim] = re.findall(r"'localspec_command', (\[.*\])\)", plugin.text("vim"))
    command = json.loads(vim.replace("'", '"'))
    agent = _agent_command()
    return {
        "plug-in": [*command, "start", "--json"],
        "ask": [*command, "ask", "--no-log", "hello"],
        "language server": [*EditorEnvironment.__new__.__defaults__[-1], "--help"],  # type: ignore[index]
        "agent": [str(agent["command"]), *agent["args"], "--help"],  # type: ignore[misc]
    }


@pytest.mark.parametrize("name", commands())
def test_nothing_of_the_folder_where_an_editor_is_runs(
    name: str, hostile: Path, home: Home
) -> None:
    done = subprocess.run(
        commands()[name],
        cwd=hostile,
        env=home.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not (hostile / "ran").exists()
    assert done.returncode == 0, done.stderr


def test_nothing_of_the_folder_of_a_daemon_in_the_foreground_runs(
    hostile: Path, home: Home
) -> None:
    """Nor in what it starts."""
    command = [sys.executable, "-P", "-m", "localspec"]
    with subprocess.Popen(
        [*command, "start", "--foreground"],
        cwd=hostile,
        env=home.environment,
        stdout=subprocess.DEVNULL,
    ) as daemon:
        try:
            asked = subprocess.run(
                [*command, "ask", "--no-log", "hello"],
                cwd=hostile,
                env=home.environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            daemon.terminate()
    assert not (hostile / "ran").exists()
    assert asked.returncode == 0, asked.stderr


@pytest.mark.parametrize("path", PYTHONS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_whoever_starts_one_of_our_modules_says_that_the_folder_is_none_of_its(path: Path) -> None:
    """`-m` alone puts the present folder before all others."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.List | ast.Tuple):
            words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            if "-m" in words and any(str(word).startswith("localspec") for word in words):
                assert words[words.index("-m") - 1] == "-P", f"{path}:{node.lineno}"
    told = re.findall(
        r"sys\.executable\)?\}? (\S+ \S+) localspec", path.read_text(encoding="utf-8")
    )
    assert set(told) <= {"-P -m"}
