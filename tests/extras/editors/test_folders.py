"""Test that no module in the current folder is ever imported instead of ours."""

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
from localspec.extras.editors.settings import _AGENT, EditorEnvironment
from tests.support.daemons import Home, scripted_home
from tests.support.patience import PATIENCE

PACKAGE = Path(localspec.__file__).parent
PYTHONS = sorted(
    path for path in PACKAGE.rglob("*.py") if "sys.executable" in path.read_text(encoding="utf-8")
)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a folder whose modules shadow the standard library and ours, and report that they ran."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, "localspec", "click", "msgspec", "httpx", "llama_cpp"}:
        (folder / f"{name}.py").write_text("open('ran', 'a').write(__name__ + chr(10)); assert 0\n")
    return folder


@pytest.fixture
def home() -> Iterator[Home]:
    with scripted_home() as home:
        yield home


def installed_commands() -> dict[str, list[str]]:
    """Return the command lines that are written into the settings of other programs."""
    [vim] = re.findall(r"'localspec_command', (\[.*\])\)", plugin.text("vim"))
    command = json.loads(vim.replace("'", '"'))
    return {
        "plug-in": [*command, "start", "--json"],
        "ask": [*command, "ask", "--no-log", "hello"],
        "language server": [*EditorEnvironment.__new__.__defaults__[-1], "--help"],  # type: ignore[index]
        "agent": [str(_AGENT["command"]), *_AGENT["args"], "--help"],
    }


@pytest.mark.parametrize("name", installed_commands())
def test_modules_in_the_folder_of_an_editor_are_not_run(
    name: str, hostile: Path, home: Home
) -> None:
    result = subprocess.run(
        installed_commands()[name],
        cwd=hostile,
        env=home.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert not (hostile / "ran").exists()
    assert result.returncode == 0, result.stderr


def test_modules_in_the_folder_of_a_daemon_are_not_run(hostile: Path, home: Home) -> None:
    """The same holds for the processes that the daemon starts."""
    command = [sys.executable, "-P", "-m", "localspec"]
    with subprocess.Popen(
        [*command, "start", "--foreground"],
        cwd=hostile,
        env=home.environment,
        stdout=subprocess.DEVNULL,
    ) as daemon:
        try:
            result = subprocess.run(
                [*command, "ask", "--no-log", "hello"],
                cwd=hostile,
                env=home.environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        finally:
            daemon.terminate()
    assert not (hostile / "ran").exists()
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", PYTHONS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_own_modules_are_started_in_safe_path_mode(path: Path) -> None:
    """Without -P, `-m` puts the current folder first on the module path."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.List | ast.Tuple):
            words = [element.value for element in node.elts if isinstance(element, ast.Constant)]
            if "-m" in words and any(str(word).startswith("localspec") for word in words):
                assert words[words.index("-m") - 1] == "-P", f"{path}:{node.lineno}"
    options = re.findall(
        r"sys\.executable\)?\}? (\S+ \S+) localspec", path.read_text(encoding="utf-8")
    )
    assert set(options) <= {"-P -m"}
