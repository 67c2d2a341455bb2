"""Base models complete text: they are listed so, `ask` completes with them, and no error speaks of HTTP."""

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
from tests.support.pairs import cycle_pair
from tests.support.terminal import terminal

HTTP_WORDS = ("/v1/", "POST", "GET ", "HTTP")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Return a home with the base model `base` and the chat model `chatty`, answered by the engine."""
    with temporary_home() as home, pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("base")
        chatty = cycle_pair(folder / "chatty")
        patch.setattr("gguf.GGUFWriter.add_chat_template", lambda self, template: None)
        files = cycle_pair(folder / "plain")
        added = home.run("add", "base", "--target", files.target)
        assert added.returncode == 0, added.stderr
        assert "This is a base model: it completes text and cannot chat." in added.stdout
        added = home.run("add", "chatty", "--target", chatty.target)
        assert added.returncode == 0, added.stderr
        assert "base model" not in added.stdout
        yield home


def completed(home: Home, *words: str, stdin: str = "") -> str:
    """Return what the base model adds to a text in twelve tokens."""
    run = home.run("ask", "-m", "base", "-n", "12", "--temp", "0", *words, stdin=stdin)
    assert run.returncode in (0, 1), run.stderr
    assert not any(word in run.stderr for word in HTTP_WORDS), run.stderr
    return run.stdout


def test_a_base_model_is_listed_and_shown_as_text(base: Home) -> None:
    listed = base.run("list").stdout.splitlines()
    assert next(line.split()[3] for line in listed if line.startswith("base")) == "text"
    assert next(line.split()[3] for line in listed if line.startswith("chatty")) == "chat"
    shown = base.run("show", "base").stdout
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("for")] == ["text"]


def test_ask_completes_words_files_and_standard_input_alike(base: Home, tmp_path: Path) -> None:
    text = "w5 w6"
    body = {"model": "base", "prompt": text, "max_tokens": 12, "temperature": 0}
    whole = base.request("POST", "/v1/completions", body).json["choices"][0]["text"]
    assert whole.strip()
    (tmp_path / "a.txt").write_text(f"{text}\n")
    assert completed(base, text).strip() == whole.strip()
    assert completed(base, stdin=f"{text}\n").strip() == whole.strip()
    assert completed(base, "-f", str(tmp_path / "a.txt")).strip() == whole.strip()
    assert completed(base, "-f", "-", stdin=text).strip() == whole.strip()
    assert completed(base, "--no-stream", text).strip() == whole.strip()
    answer = json.loads(completed(base, "--json", text))
    assert answer["choices"][0]["message"]["content"] == whole


def test_the_configured_base_model_completes_too(base: Home) -> None:
    base.run("use", "base")
    assert completed(base, "w5 w6") == base.run("ask", "-n", "12", "--temp", "0", "w5 w6").stdout
    base.run("config", "unset", "pair")


@pytest.mark.parametrize("flags", [["-c"], ["--cid", "x"], ["-s", "be brief"]])
def test_options_of_a_chat_are_refused_in_plain_words(base: Home, flags: list[str]) -> None:
    base.run("ask", "-m", "chatty", "-n", "2", "w1")
    run = base.run("ask", "-m", "base", *flags, "w5")
    assert run.returncode != 0
    assert run.stdout == ""
    assert not any(word in run.stderr for word in HTTP_WORDS), run.stderr


@pytest.mark.parametrize("words", [["explain", "x failed"], ["cmd", "list files"]])
def test_other_commands_name_the_way_out(base: Home, words: list[str]) -> None:
    run = base.run(words[0], "-m", "base", *words[1:])
    assert (run.returncode, run.stdout) == (1, "")
    assert "'base' is a base model: it completes text and cannot chat" in run.stderr
    assert "localspec ask -m base" in run.stderr
    assert not any(word in run.stderr for word in HTTP_WORDS)


def test_a_chat_with_a_base_model_says_what_it_can_do(base: Home) -> None:
    with terminal(base.environment, "chat", "-m", "base") as shown:
        shown.expect("exits.")
        shown.send("hello\r")
        shown.expect("'base' is a base model: it completes text and cannot chat")
        shown.expect("›")
        shown.send("/exit\r")
        assert shown.wait() == 0
        assert not any(word in shown.text for word in HTTP_WORDS)


def test_nothing_is_left_in_the_history(base: Home) -> None:
    before = base.run("history", "list").stdout
    completed(base, "w5 w6")
    assert base.run("history", "list").stdout == before


@given(
    st.lists(st.sampled_from(["chat", "fim"]), min_size=1, unique=True), st.sampled_from(["", "0"])
)
def test_only_a_template_makes_a_chat_of_a_model_that_writes(
    roles: list[str], template: str
) -> None:
    model = StoredModel(parts=(Part(file="a", size=1, path="/a"),), architecture="llama")
    record = Record(name="a", target=model, roles=tuple(roles), template_sha256=template * 64)
    assert ("chat" in record.purposes) == ("chat" in roles and bool(template))
    assert ("text" in record.purposes) == ("chat" in roles and not template)
    assert ("fim" in record.purposes) == ("fim" in roles)
    assert ("base model" in format_first_use("a", record.purposes)) == ("text" in record.purposes)
