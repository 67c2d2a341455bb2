"""Edits of config.toml and models.toml are seen, those from before the watch stands too."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.daemon.lifecycle import watched_paths
from tests.support.daemons import Home, RunningDaemon, wait_for

# The daemon, which takes its time before it watches: every edit of these tests comes before that.
LATE = """
import sys
from localspec.daemon import lifecycle
lifecycle._START_DELAY_S = 1.0
from localspec.daemon.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def unset(home: Home) -> Home:
    """With the scripted engine, and the pair left to config.toml."""
    home.use_fake()
    del home.environment["LOCALSPEC_PAIR"]
    return home


def test_a_pair_that_is_set_just_after_the_start_is_the_one_that_answers(unset: Home) -> None:
    daemon = RunningDaemon(unset, program=LATE)
    assert unset.status()["pair"]["name"] != str(unset.model)
    changed = unset.run("config", "set", "pair", str(unset.model))
    assert changed.returncode == 0, changed.stderr
    wait_for(lambda: unset.status()["pair"]["name"] == str(unset.model), "the new pair")
    assert unset.chat("say x").json["model"] == str(unset.model)
    daemon.stop()


def test_a_broken_edit_just_after_the_start_is_said(unset: Home) -> None:
    unset.environment["LOCALSPEC_PAIR"] = str(unset.model)
    folder = unset.root / "config"
    daemon = RunningDaemon(unset, program=LATE)
    assert unset.request("GET", "/localspec/pairs?all=1").status == 200  # reads the catalogue
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("context = many\n")
    (folder / "models.toml").write_text("[pairs\n")
    wait_for(lambda: len(unset.status()["problems"]) == 2, "both")
    problems = unset.status()["problems"]
    assert any("config.toml" in problem for problem in problems)
    assert any("models.toml" in problem for problem in problems)
    assert unset.chat("say x").text == "x"
    (folder / "config.toml").write_text("")
    (folder / "models.toml").unlink()
    wait_for(lambda: not unset.status()["problems"], "the end of the problems")
    daemon.stop()


def test_files_that_are_links_are_followed(unset: Home, tmp_path: Path) -> None:
    """As those who keep their dotfiles in one place have it: edited there, here, or led elsewhere."""
    unset.environment["LOCALSPEC_PAIR"] = str(unset.model)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.toml").write_text("")
        (folder / "models.toml").write_text("")
    (tmp_path / "now").symlink_to("first")  # a folder that is a link, on the way
    kept = unset.root / "config"
    kept.mkdir(exist_ok=True)
    for name in ("config.toml", "models.toml"):
        (kept / name).symlink_to(tmp_path / "now" / name)
    daemon = RunningDaemon(unset)
    assert unset.request("GET", "/localspec/pairs?all=1").status == 200  # reads the catalogue

    def said(*parts: str) -> None:
        def right() -> bool:
            problems = unset.status()["problems"]
            return len(problems) == len(parts) and all(
                any(part in problem for problem in problems) for part in parts
            )

        wait_for(right, f"{parts}")

    (first / "models.toml").write_text("[pairs\n")  # through what it leads to
    said("models.toml")
    replaced = first / "new"
    replaced.write_text("context = many\n")
    replaced.replace(first / "config.toml")  # as editors write
    said("models.toml", "config.toml")
    (tmp_path / "other").symlink_to("second")
    (tmp_path / "other").replace(tmp_path / "now")  # all of it elsewhere
    said()
    (second / "models.toml").write_text("[pairs\n")
    said("models.toml")
    (kept / "models.toml").unlink()  # no link any more
    (kept / "models.toml").write_text("")
    said()
    (kept / "models.toml").write_text("hello = 1\n")
    said("hello")
    daemon.stop()


def test_the_way_to_a_file_names_every_link_on_it(tmp_path: Path) -> None:
    real = tmp_path.resolve()
    (real / "a").mkdir()
    (real / "b").symlink_to("a")
    (real / "a" / "x").symlink_to(real / "b" / ".." / "y")  # by way of b again
    assert watched_paths(real / "b" / "x") == [real / "b", real / "a" / "x", real / "y"]
    assert watched_paths(real / "a" / "plain") == [real / "a" / "plain"]
    (real / "y").symlink_to("b/x")  # a circle
    assert watched_paths(real / "b" / "x") == [real / "b", real / "a" / "x", real / "y"]
