"""Test that the short parser of `ask` agrees with click wherever it gives a result."""

from __future__ import annotations

from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.cli import app, options
from localspec.cli.commands import ask

FLAGS = [flag for option in options.ASK for flag in option.flags]
ARGUMENTS = st.lists(
    st.sampled_from(
        [*FLAGS, "--", "-", "-h", "-un5", "--tokens=5", "--tok", "5", "0.5", "-1", "nan"]
    )
    | st.text(st.characters(codec="utf-8"), max_size=3)
)


def parse_by_click(arguments: list[str]) -> dict[str, Any] | None:
    try:
        context = ask.ask_command.make_context("ask", list(arguments))
    except (click.ClickException, click.exceptions.Exit):
        return None
    return {key: list(v) if isinstance(v, tuple) else v for key, v in context.params.items()}


@given(ARGUMENTS)
def test_the_short_parser_and_click_agree(arguments: list[str]) -> None:
    plain = options.parse(arguments)
    if plain is not None:
        assert vars(plain) == parse_by_click(arguments)


# Quoted text and numbers that begin with a dash but are no options.
DASHED = st.one_of(
    st.sampled_from(["-5 + 3?", "-5", "-0.5", "- a list", "-x is what?", "--- a/file\n+++ b/file",
                     "--no such option", "-c why?", "-1e3", "-7z", "-\t", "-🙂 smile"]),
    st.from_regex(r"-[0-9][^\0]{0,9}", fullmatch=True),
    st.builds("-{} {}".format, st.sampled_from(["", "-", "é", "x", "-a", "uc"]), st.text(max_size=5)),
)  # fmt: skip


@given(
    st.lists(st.one_of(DASHED, st.sampled_from(["hi", "-u", "--", "-", "-x"]), st.text(max_size=3)))
)
def test_words_with_a_dash_are_words_in_their_order(arguments: list[str]) -> None:
    parsed = parse_by_click(arguments)
    dashes = arguments.index("--") if "--" in arguments else len(arguments)
    takes_value = {flag: word.kind is not bool for word in options.ASK for flag in word.flags}
    words = arguments[:dashes]
    if not all(word in ("-u", "-x") or options.is_word(word, takes_value) for word in words):
        return  # One of the random texts is an option.
    expected = [word for word in words if word not in ("-u", "-x")] + arguments[dashes + 1 :]
    assert parsed is not None
    assert parsed["words"] == expected
    assert (parsed["usage"], parsed["extract"]) == ("-u" in words, "-x" in words)


@pytest.mark.parametrize(
    ("arguments", "words", "values"),
    [
        (["-5 + 3?"], ["-5 + 3?"], {}),
        (["-5"], ["-5"], {}),
        (["what", "is", "-5 + 3", "now"], ["what", "is", "-5 + 3", "now"], {}),
        (["--seed", "-5", "-5"], ["-5"], {"seed": -5}),
        (["--presence-penalty", "-1.5", "hi"], ["hi"], {"presence_penalty": -1.5}),
        (["-uxm", "a pair", "- hi"], ["- hi"], {"model": "a pair", "usage": True, "extract": True}),
        (["-n5", "hi"], ["hi"], {"tokens": 5}),
        (["--system=Be brief.", "hi"], ["hi"], {"system": "Be brief."}),
        (["-sBe brief.", "hi"], ["hi"], {"system": "Be brief."}),
        (["-s", "- be brief", "hi"], ["hi"], {"system": "- be brief"}),
    ],
)
def test_dashes_of_options_and_of_words(
    arguments: list[str], words: list[str], values: dict[str, Any]
) -> None:
    parsed = parse_by_click(arguments)
    assert parsed is not None
    assert parsed["words"] == words
    assert {name: parsed[name] for name in values} == values


@pytest.mark.parametrize("option", ["--tok", "--nonsense=1", "-z", "-uz", "--no-such", "-é"])
@pytest.mark.parametrize("name", ["ask", "chat", "run"])
def test_unknown_options_are_refused(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([name, *(["builtin"] if name == "run" else []), option, "hi"]) == 2
    assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ask", "chat", "run"])
def test_sampling_comes_last_in_the_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    app.run([name, "--help"])
    page = capsys.readouterr().out
    general, sampling = page.split("\nSampling:\n")
    for option in options.SAMPLING:
        assert option.flags[0] not in general.split("Options:")[1]
        assert option.flags[0] in sampling
    assert "--help" in general


@pytest.mark.parametrize(
    "arguments",
    [
        ["hi"],
        ["-n", "5", "hi"],
        ["a", "-u", "b"],
        ["--", "-u"],
        ["-5 + 3?"],
        ["-5"],
        ["-m", "x", "--temperature", "0.5"],
    ],
)
def test_common_command_lines_use_the_short_parser(arguments: list[str]) -> None:
    parsed = options.parse(arguments)
    assert parsed is not None
    assert vars(parsed) == parse_by_click(arguments)


def test_ask_options_declare_every_option() -> None:
    assert [*options.AskOptions.__annotations__] == [
        "words",
        *(option.name for option in options.ASK),
    ]
