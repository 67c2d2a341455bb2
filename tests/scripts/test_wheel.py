"""The contents of the wheel: everything that a user needs, and nothing that only developers need."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from localspec import extras

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "localspec" / "docs"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with wheel and source distribution, built as pip and pipx would."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    run = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


def test_the_wheel_has_the_package_and_its_data_only(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    inside = {name for name in names if ".data/" not in name}
    data = {"openapi.yaml", "models.toml", "py.typed", "engine/speculation/drafters/ngram.json"}
    data |= {f"builtin/{name}" for name in ("target.gguf", "draft.gguf", "README.md")}
    data |= {f"cli/prompts/{name}.toml" for name in ("cmd", "cmd-explain", "commit", "explain")}
    if extras.is_here("bench"):
        data.add("extras/bench/workloads.toml")
    data |= {"extras/launch/pi.mjs"} if extras.is_here("launch") else set()
    if extras.is_here("shell"):
        data |= {f"extras/shell/hooks/failures.{shell}" for shell in ("bash", "zsh", "fish")}
    editors = ROOT / "localspec" / "extras" / "editors"
    data |= {
        f"extras/editors/{path.relative_to(editors)}"
        for folder in ("vim", "vscode")
        for path in (editors / folder).rglob("*")
        if path.is_file()
    }
    data |= {f"docs/{path.relative_to(DOCS)}" for path in DOCS.rglob("*.md")}
    assert {name for name in inside if not name.endswith(".py")} == {
        f"localspec/{name}" for name in data
    }
    pages = {name.partition(".data/data/")[2] for name in names - inside}
    assert pages >= {f"share/man/man1/localspec{name}.1" for name in ("", "-ask", "-history-rm")}
    assert all(name.startswith("share/man/man1/localspec") for name in pages)
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "localspec").rglob("*.py")}
    assert {name for name in inside if name.endswith(".py")} == modules


def test_the_source_distribution_has_everything_for_development(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert inside >= {
        "models.toml",
        "scripts/setup",
        "scripts/benchmarks/synthetic.py",
        "scripts/builtin_pair/evaluation/questions.toml",
        "tests/test_imports.py",
        "localspec/builtin/target.gguf",
    }
