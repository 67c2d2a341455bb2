"""Errors say whether a client may send its request again, in every protocol."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.extras.test_overflow import QUESTIONS
from tests.support.daemons import Home, scripted_home
from tests.support.official_clients import http_client

URL = "http://localspec"
ENDPOINTS = [(path, body) for path, body in QUESTIONS.values()]
REFUSED = QUESTIONS["responses"][1]["input"]


def ask(home: Home, path: str, body: dict[str, Any], text: str, **fields: Any) -> Any:
    """Send a question of QUESTIONS with another text."""
    return home.request(
        "POST",
        path,
        {**json.loads(json.dumps(body).replace(REFUSED, text)), "max_tokens": 9, **fields},
    )


@pytest.mark.parametrize(("path", "body"), ENDPOINTS, ids=QUESTIONS)
def test_an_error_in_a_stream_says_that_it_is_the_servers(path: str, body: dict[str, Any]) -> None:
    """Agents that see no status (pi) retry on such words alone. The command line needs none."""
    with scripted_home() as home:
        stream = ask(home, path, body, "die SIGKILL", stream=True)
        assert stream.status == 200
        assert b'"Server error: The engine crashed' in stream.body
        assert b"one" in stream.body
        refused = ask(home, path, body, "refuse invalid_request", stream=True)
        assert b"Refused as told." in refused.body
        assert b"Server error" not in refused.body
        command = home.run("ask", "die SIGKILL")
        assert "The engine crashed" in command.stderr
        assert "Server error" not in command.stderr


@pytest.mark.parametrize("stream", [False, True])
def test_clients_do_not_repeat_what_fails_until_a_person_acts(stream: bool) -> None:
    requests: list[httpx2.Request] = []
    messages: Any = [{"role": "user", "content": "say hello"}]
    fields: Any = {"model": "", "messages": messages, "max_tokens": 9, "stream": stream}
    with (
        scripted_home("--load-error") as home,
        http_client(home, event_hooks={"request": [requests.append]}) as http,
    ):
        clients: dict[str, Any] = {"api_key": "none", "http_client": http}
        with pytest.raises(openai.InternalServerError, match="no GGUF"):
            openai.OpenAI(**clients, base_url=f"{URL}/v1").chat.completions.create(**fields)
        with pytest.raises(anthropic.InternalServerError, match="no GGUF") as caught:
            anthropic.Anthropic(**clients, base_url=URL).messages.create(**fields)
    assert [request.url.path for request in requests] == ["/v1/chat/completions", "/v1/messages"]
    error: Any = caught.value.body
    assert error["error"]["type"] == "api_error"


def test_clients_repeat_what_may_succeed() -> None:
    requests: list[httpx2.Request] = []
    messages: Any = [{"role": "user", "content": "die SIGKILL"}]
    with (
        scripted_home() as home,
        http_client(home, event_hooks={"request": [requests.append]}) as http,
        openai.OpenAI(api_key="none", http_client=http, base_url=f"{URL}/v1") as client,
        pytest.raises(openai.InternalServerError, match="The engine crashed"),
    ):
        client.with_options(max_retries=1).chat.completions.create(model="", messages=messages)
    assert len(requests) == 2
