"""Test base models: they are listed as text models, `ask` completes with them, and errors fit the CLI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.cli.terminal.pairs import format_first_use
from localspec.registry.store.store import Part, Record, StoredModel
from tests.support.daemons import Home, temporary_home
from tests.support.extras import needs
from tests.support.pairs import cycle_pair
from tests.support.terminal import terminal

HTTP_WORDS = ("/v1/", "POST", "GET ", "HTTP")


@pytest.fixture(scope="module")
def home_with_base_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Return a home with the base model `base` and the chat model `chatty`, answered by the engine."""
    with temporary_home() as home, pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("base")
        chatty = cycle_pair(folder / "chatty")
        patch.setattr("gguf.GGUFWriter.add_chat_template", lambda self, template: None)
        files = cycle_pair(folder / "plain")
        output = home.must_run("add", "base", "--target", files.target)
        assert "This is a base model: it completes text and cannot chat." in output
        added = home.run("add", "chatty", "--target", chatty.target)
        assert added.returncode == 0, added.stderr
        assert "base model" not in added.stdout
        yield home


def complete_text(home: Home, *words: str, stdin: str = "") -> str:
    """Return what the base model adds to a text in twelve tokens."""
    run = home.run("ask", "-m", "base", "-n", "12", "--temp", "0", *words, stdin=stdin)
    assert run.returncode in (0, 1), run.stderr
    assert not any(word in run.stderr for word in HTTP_WORDS), run.stderr
    return run.stdout


def test_a_base_model_is_listed_and_shown_as_text(home_with_base_model: Home) -> None:
    listed = home_with_base_model.run("list").stdout.splitlines()
    assert next(line.split()[3] for line in listed if line.startswith("base")) == "text"
    assert next(line.split()[3] for line in listed if line.startswith("chatty")) == "chat"
    output = home_with_base_model.run("show", "base").stdout
    assert [line.split()[1] for line in output.splitlines() if line.startswith("for ")] == ["text"]


def test_ask_completes_words_files_and_standard_input_alike(
    home_with_base_model: Home, tmp_path: Path
) -> None:
    text = "w5 w6"
    body = {"model": "base", "prompt": text, "max_tokens": 12, "temperature": 0}
    completion = home_with_base_model.request("POST", "/v1/completions", body).json["choices"][0][
        "text"
    ]
    assert completion.strip()
    (tmp_path / "a.txt").write_text(f"{text}\n")
    assert complete_text(home_with_base_model, text).strip() == completion.strip()
    assert complete_text(home_with_base_model, stdin=f"{text}\n").strip() == completion.strip()
    assert (
        complete_text(home_with_base_model, "-f", str(tmp_path / "a.txt")).strip()
        == completion.strip()
    )
    assert complete_text(home_with_base_model, "-f", "-", stdin=text).strip() == completion.strip()
    assert complete_text(home_with_base_model, "--no-stream", text).strip() == completion.strip()
    answer = json.loads(complete_text(home_with_base_model, "--json", text))
    assert answer["choices"][0]["message"]["content"] == completion


def test_the_configured_base_model_completes_too(home_with_base_model: Home) -> None:
    home_with_base_model.run("use", "base")
    assert (
        complete_text(home_with_base_model, "w5 w6")
        == home_with_base_model.run("ask", "-n", "12", "--temp", "0", "w5 w6").stdout
    )
    home_with_base_model.run("config", "unset", "pair")


@pytest.mark.parametrize("flags", [["-c"], ["--cid", "x"], ["-s", "be brief"]])
def test_options_of_a_chat_are_refused_in_plain_words(
    home_with_base_model: Home, flags: list[str]
) -> None:
    home_with_base_model.run("ask", "-m", "chatty", "-n", "2", "w1")
    run = home_with_base_model.run("ask", "-m", "base", *flags, "w5")
    assert run.returncode != 0
    assert run.stdout == ""
    assert not any(word in run.stderr for word in HTTP_WORDS), run.stderr


@needs("shell")
@pytest.mark.parametrize("words", [["explain", "x failed"], ["cmd", "list files"]])
def test_other_commands_suggest_ask(home_with_base_model: Home, words: list[str]) -> None:
    run = home_with_base_model.run(words[0], "-m", "base", *words[1:])
    assert (run.returncode, run.stdout) == (1, "")
    assert "'base' is a base model: it completes text and cannot chat" in run.stderr
    assert "localspec ask -m base" in run.stderr
    assert not any(word in run.stderr for word in HTTP_WORDS)


def test_a_chat_with_a_base_model_says_what_it_can_do(home_with_base_model: Home) -> None:
    with terminal(home_with_base_model.environment, "chat", "-m", "base") as session:
        session.expect("'base' is a base model: it completes text and cannot chat")
        assert session.wait() == 1
        assert "exits." not in session.text
    with terminal(home_with_base_model.environment, "chat", "-m", "nope") as session:
        session.expect("There is no pair 'nope'")
        assert session.wait() == 1
        assert "exits." not in session.text
    with terminal(home_with_base_model.environment, "chat") as session:
        session.expect("exits.")
        session.send("/pair base\r")
        session.expect("›")
        session.send("hello\r")
        session.expect("'base' is a base model: it completes text and cannot chat")
        session.expect("›")
        session.send("/exit\r")
        assert session.wait() == 0
        assert not any(word in session.text for word in HTTP_WORDS)


def test_completions_are_not_in_the_history(home_with_base_model: Home) -> None:
    history = home_with_base_model.run("history", "list").stdout
    complete_text(home_with_base_model, "w5 w6")
    assert home_with_base_model.run("history", "list").stdout == history


@given(
    st.lists(st.sampled_from(["chat", "fim"]), min_size=1, unique=True), st.sampled_from(["", "0"])
)
def test_only_a_model_with_a_template_can_chat(roles: list[str], template: str) -> None:
    model = StoredModel(parts=(Part(file="a", size=1, path="/a"),), architecture="llama")
    record = Record(name="a", target=model, roles=tuple(roles), template_sha256=template * 64)
    assert ("chat" in record.purposes) == ("chat" in roles and bool(template))
    assert ("text" in record.purposes) == ("chat" in roles and not template)
    assert ("fim" in record.purposes) == ("fim" in roles)
    assert ("base model" in format_first_use("a", record.purposes)) == ("text" in record.purposes)
