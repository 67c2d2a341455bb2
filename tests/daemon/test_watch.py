"""Edits of config.toml and models.toml take effect, even those made before the watch starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.daemon.lifecycle import watched_paths
from tests.support.daemons import Home, RunningDaemon, wait_for

# A daemon that starts to watch late: every edit of these tests comes before that.
DELAYED_DAEMON = """
import sys
from localspec.daemon import lifecycle
lifecycle._START_DELAY_S = 1.0
from localspec.daemon.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def unset_home(home: Home) -> Home:
    """Return a home with the scripted engine whose pair is set in config.toml."""
    home.use_fake()
    del home.environment["LOCALSPEC_PAIR"]
    return home


def test_a_pair_set_just_after_the_start_is_used(unset_home: Home) -> None:
    RunningDaemon(unset_home, program=DELAYED_DAEMON)
    assert unset_home.status()["pair"]["name"] != str(unset_home.model)
    unset_home.must_run("config", "set", "pair", str(unset_home.model))
    wait_for(lambda: unset_home.status()["pair"]["name"] == str(unset_home.model), "the new pair")
    assert unset_home.chat("say x").json["model"] == str(unset_home.model)


def test_a_broken_edit_just_after_the_start_is_reported(unset_home: Home) -> None:
    unset_home.environment["LOCALSPEC_PAIR"] = str(unset_home.model)
    folder = unset_home.root / "config"
    RunningDaemon(unset_home, program=DELAYED_DAEMON)
    assert unset_home.request("GET", "/localspec/pairs?all=1").status == 200  # reads the catalogue
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("context = many\n")
    (folder / "models.toml").write_text("[pairs\n")
    wait_for(lambda: len(unset_home.status()["problems"]) == 2, "both")
    problems = unset_home.status()["problems"]
    assert any("config.toml" in problem for problem in problems)
    assert any("models.toml" in problem for problem in problems)
    assert unset_home.chat("say x").text == "x"
    (folder / "config.toml").write_text("")
    (folder / "models.toml").unlink()
    wait_for(lambda: not unset_home.status()["problems"], "the end of the problems")


def test_symbolic_links_are_followed(unset_home: Home, tmp_path: Path) -> None:
    """The targets, the links and a linked folder on the way are edited, as in dotfiles folders."""
    unset_home.environment["LOCALSPEC_PAIR"] = str(unset_home.model)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.toml").write_text("")
        (folder / "models.toml").write_text("")
    (tmp_path / "now").symlink_to("first")  # a linked folder on the way
    config_folder = unset_home.root / "config"
    config_folder.mkdir(exist_ok=True)
    for name in ("config.toml", "models.toml"):
        (config_folder / name).symlink_to(tmp_path / "now" / name)
    RunningDaemon(unset_home)
    assert unset_home.request("GET", "/localspec/pairs?all=1").status == 200  # reads the catalogue

    def wait_for_problems(*parts: str) -> None:
        def matches() -> bool:
            problems = unset_home.status()["problems"]
            return len(problems) == len(parts) and all(
                any(part in problem for problem in problems) for part in parts
            )

        wait_for(matches, f"{parts}")

    (first / "models.toml").write_text("[pairs\n")  # edit the target of a link
    wait_for_problems("models.toml")
    replaced = first / "new"
    replaced.write_text("context = many\n")
    replaced.replace(first / "config.toml")  # editors replace files like this
    wait_for_problems("models.toml", "config.toml")
    (tmp_path / "other").symlink_to("second")
    (tmp_path / "other").replace(tmp_path / "now")  # point the folder elsewhere
    wait_for_problems()
    (second / "models.toml").write_text("[pairs\n")
    wait_for_problems("models.toml")
    (config_folder / "models.toml").unlink()  # replace the link by a file
    (config_folder / "models.toml").write_text("")
    wait_for_problems()
    (config_folder / "models.toml").write_text("hello = 1\n")
    wait_for_problems("hello")


def test_watched_paths_include_every_link(tmp_path: Path) -> None:
    real = tmp_path.resolve()
    (real / "a").mkdir()
    (real / "b").symlink_to("a")
    (real / "a" / "x").symlink_to(real / "b" / ".." / "y")  # passes through the link b again
    assert watched_paths(real / "b" / "x") == [real / "b", real / "a" / "x", real / "y"]
    assert watched_paths(real / "a" / "plain") == [real / "a" / "plain"]
    (real / "y").symlink_to("b/x")  # a cycle
    assert watched_paths(real / "b" / "x") == [real / "b", real / "a" / "x", real / "y"]
