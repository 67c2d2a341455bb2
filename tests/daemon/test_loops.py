"""What clients are told of an answer that was ended because it repeated itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Home, real_home, wait_for
from tests.support.pairs import looping_pair
from tests.support.terminal import terminal


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    files = looping_pair(Path(tmp_path_factory.mktemp("looping")))
    with real_home(pair=f"{files.target},{files.draft}") as home:
        yield home


@pytest.mark.parametrize(("fields", "limit"), [({"loop_guard": "all"}, "loop"), ({}, "tokens")])
@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/completions", {"prompt": [1, 100]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_an_answer_says_that_it_was_in_a_loop(
    looping: Home, path: str, question: dict[str, Any], fields: dict[str, str], limit: str
) -> None:
    body = {**question, "max_tokens": 3500, "temperature": 0, **fields}
    answer = looping.request("POST", path, body).json
    assert answer["localspec"]["limit"] == limit
    assert answer["localspec"].get("loop") == ("text" if fields else None)
    if path == "/v1/messages":
        assert answer["stop_reason"] == "max_tokens"
    else:
        assert answer["choices"][0]["finish_reason"] == "length"
        assert (answer["usage"]["completion_tokens"] < 3500) is bool(fields)
    streamed = looping.request("POST", path, {**body, "stream": True})
    *_, last, _ = streamed.body.decode().strip().split("\n\n")
    assert json.loads(last.partition("data: ")[2])["localspec"]["limit"] == limit


def test_a_wrong_scope_is_refused(looping: Home) -> None:
    answer = looping.request("POST", "/v1/completions", {"prompt": "a", "loop_guard": "some"})
    assert answer.status == 400
    assert "loop_guard" in answer.error["message"]
    assert looping.run("config", "set", "loop_guard", "some").returncode == 2


def test_the_setting_is_the_default_of_requests(looping: Home) -> None:
    assert looping.run("config", "set", "loop_guard", "all").returncode == 0
    body = {"prompt": [1, 100], "max_tokens": 3500, "temperature": 0}
    answer = looping.request("POST", "/v1/completions", body).json
    assert answer["localspec"]["limit"] == "loop"


def control(home: Home, answer: str, action: str = "reasoning_end") -> Any:
    body = {"id": answer, "action": action}
    return home.request("POST", "/v1/chat/completions/control", body)


def test_thoughts_end_when_a_client_asks_for_the_answer(home: Home) -> None:
    home.start()
    with home.streaming("think") as stream:
        first = json.loads(stream.readline().decode().removeprefix("data: "))
        assert control(home, first["id"], "stop").status == 400
        assert control(home, "chatcmpl-0").json == {
            "success": False,
            "message": "No chat completion with the id 'chatcmpl-0' is running.",
        }
        wait_for(lambda: control(home, first["id"]).json == {"success": True}, "the thoughts")
        assert '"content":"so"' in stream.read().decode()
        assert control(home, first["id"]).json["success"] is False


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_a_key_ends_the_thoughts(home: Home, command: str) -> None:
    home.start()
    words = ["think"] if command == "ask" else []
    with terminal(home.environment, command, *words) as opened:
        if command == "chat":
            opened.expect("›")
            opened.send("think\r")
        opened.expect("5 6 7")
        opened.send("\x1c")  # Ctrl-\
        opened.expect("so")
