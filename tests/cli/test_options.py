"""The short parser of `ask` agrees with click wherever it gives an answer."""

from __future__ import annotations

from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.cli import options
from localspec.cli.commands import ask

FLAGS = [flag for option in options.ASK for flag in option.flags]
ARGUMENTS = st.lists(
    st.sampled_from(
        [*FLAGS, "--", "-", "-h", "-un5", "--tokens=5", "--tok", "5", "0.5", "-1", "nan"]
    )
    | st.text(st.characters(codec="utf-8"), max_size=3)
)


def by_click(arguments: list[str]) -> dict[str, Any] | None:
    try:
        context = ask.command.make_context("ask", list(arguments))
    except (click.ClickException, click.exceptions.Exit):
        return None
    return {key: list(v) if isinstance(v, tuple) else v for key, v in context.params.items()}


@given(ARGUMENTS)
def test_the_short_parser_and_click_agree(arguments: list[str]) -> None:
    plain = options.parse(options.ASK, arguments)
    if plain is not None:
        assert plain == by_click(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["hi"],
        ["-n", "5", "hi"],
        ["a", "-u", "b"],
        ["--", "-u"],
        ["-m", "x", "--temperature", "0.5"],
    ],
)
def test_what_people_type_takes_the_short_way(arguments: list[str]) -> None:
    assert options.parse(options.ASK, arguments) == by_click(arguments)
    assert options.parse(options.ASK, arguments) is not None
