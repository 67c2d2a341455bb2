"""Edits of config.toml and models.toml are seen, those from before the watch stands too."""

from __future__ import annotations

import pytest

from tests.support.daemons import Home, RunningDaemon, wait_for

# The daemon, which takes its time before it watches: every edit of these tests comes before that.
LATE = """
import sys
from localspec.daemon import watch
watch._LATER = 1.0
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
    assert any("config.toml" in each for each in problems)
    assert any("models.toml" in each for each in problems)
    assert unset.chat("say x").text == "x"
    (folder / "config.toml").write_text("")
    (folder / "models.toml").unlink()
    wait_for(lambda: not unset.status()["problems"], "the end of the problems")
    daemon.stop()
