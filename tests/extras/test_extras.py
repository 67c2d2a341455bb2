"""Extras can be deleted: the core works without any one of them, and without all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from localspec import extras
from localspec.cli.app import COMMANDS
from localspec.cli.options import CORE_NAMES
from tests.support.daemons import temporary_home

PACKAGE = Path(extras.__file__).parents[1]
NAMES = sorted(
    path.name for path in (PACKAGE / "extras").iterdir() if (path / "__init__.py").is_file()
)


def test_the_table_names_every_extra() -> None:
    commands = {extra for group in extras.COMMANDS.values() for extra, _, _ in group.values()}
    assert sorted(commands | set(extras.WITH_ROUTES)) == NAMES
    assert COMMANDS.keys() - CORE_NAMES == {
        name for group in extras.COMMANDS.values() for name in group
    }


@pytest.mark.parametrize("removed", [*([name] for name in NAMES), NAMES], ids=[*NAMES, "all"])
def test_the_core_answers_without_extras(removed: list[str], tmp_path: Path) -> None:
    copy = tmp_path / "localspec"
    # With its compiled files, which are as old as the sources say, since both keep their times.
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.gguf"))
    for name in removed:
        shutil.rmtree(copy / "extras" / name)
    with temporary_home() as home:
        home.environment["PYTHONPATH"] = str(tmp_path)
        daemon = home.start()
        try:
            assert home.run("ask", "say still here", cwd=tmp_path).stdout == "still here\n"
            help_text = home.run("--help", cwd=tmp_path).stdout
            assert "history" in help_text
            for name, (extra, _, _) in (
                (n, row) for group in extras.COMMANDS.values() for n, row in group.items()
            ):
                assert (f"\n  {name} " in help_text) == (extra not in removed)
            assert "No such command" in home.refused(
                "stats" if "stats" in removed else "nonsense", cwd=tmp_path, code=2
            )
            assert home.request("GET", "/v1/models").json["data"]
            response = home.chat("say over HTTP").json
            assert response["choices"][0]["message"]["content"] == "over HTTP"
        finally:
            daemon.stop()
