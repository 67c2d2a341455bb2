"""Errors say whether a client may send its request again, in every protocol."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.support.daemons import PATIENCE, scripted_home

URL = "http://localspec"


@pytest.mark.parametrize("stream", [False, True])
def test_clients_do_not_repeat_what_fails_until_a_person_acts(stream: bool) -> None:
    requests: list[httpx2.Request] = []
    messages: Any = [{"role": "user", "content": "say hello"}]
    fields: Any = {"model": "", "messages": messages, "max_tokens": 9, "stream": stream}
    with scripted_home("--load-error") as home:
        transport = httpx2.HTTPTransport(uds=str(home.socket), verify=False)
        hooks = {"request": [requests.append]}
        with httpx2.Client(transport=transport, timeout=PATIENCE, event_hooks=hooks) as http:
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
    with scripted_home() as home:
        transport = httpx2.HTTPTransport(uds=str(home.socket), verify=False)
        hooks = {"request": [requests.append]}
        with (
            httpx2.Client(transport=transport, timeout=PATIENCE, event_hooks=hooks) as http,
            openai.OpenAI(api_key="none", http_client=http, base_url=f"{URL}/v1") as client,
            pytest.raises(openai.InternalServerError, match="The engine crashed"),
        ):
            client.with_options(max_retries=1).chat.completions.create(model="", messages=messages)
    assert len(requests) == 2
