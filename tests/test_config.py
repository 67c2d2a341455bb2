"""Configuration: where a value comes from, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localspec.config import Config, load_config
from localspec.errors import UsageError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_no_file_means_the_defaults(file: Path) -> None:
    assert load_config(file, {}) == Config()


def test_flags_win_over_variables_over_the_file(file: Path) -> None:
    file.write_text('pair = "a"\nparallel = 2\nqueue = 3\n')
    config = load_config(file, {"LOCALSPEC_PARALLEL": "5", "LOCALSPEC_QUEUE": "6"}, {"queue": 7})
    assert (config.pair, config.parallel, config.queue) == ("a", 5, 7)
    assert config.origin == {"pair": str(file), "parallel": "LOCALSPEC_PARALLEL", "queue": "flag"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("paralel = 2", "unknown key 'paralel'"),
        ('parallel = "2"', "'parallel' must be a whole number, not '2'"),
        ("parallel = true", "'parallel' must be a whole number, not True"),
        ("parallel = 0", "'parallel' must be between 1 and 64, not 0"),
        ("watchdog = nan", "'watchdog' must be between 1 and 86400, not nan"),
        ('kv_type = "q4"', "'kv_type' must be one of f16, q8_0"),
        ("exact = 1", "'exact' must be true or false, not 1"),
        ("pair = ", "Invalid value"),
        ('pair = "a"\nparallel == 2', "line 2"),
    ],
)
def test_a_wrong_file_is_named_with_key_and_limit(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(file, {})
    assert str(file) in caught.value.message
    assert words in caught.value.message


def test_a_file_that_is_no_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="utf-8"):
        load_config(file, {})


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("exact", "true", True),
        ("exact", "0", False),
        ("watchdog", "2.5", 2.5),
        ("idle_unload", "30", 30.0),
        ("depth", "-1", -1),
        ("pair", "7", "7"),
    ],
)
def test_variables_are_read_by_the_type_of_their_key(
    file: Path, variable: str, text: str, value: Any
) -> None:
    config = load_config(file, {f"LOCALSPEC_{variable.upper()}": text})
    assert getattr(config, variable) == value


@pytest.mark.parametrize(
    ("variable", "text"), [("exact", "maybe"), ("queue", "x"), ("queue", "-1")]
)
def test_a_wrong_variable_is_named(file: Path, variable: str, text: str) -> None:
    name = f"LOCALSPEC_{variable.upper()}"
    with pytest.raises(UsageError, match=f"{name}: '{variable}' must be"):
        load_config(file, {name: text})


def test_a_wrong_flag_is_named_as_it_was_typed(file: Path) -> None:
    with pytest.raises(UsageError, match="--idle-unload: 'idle_unload' must be"):
        load_config(file, {}, {"idle_unload": -1})
