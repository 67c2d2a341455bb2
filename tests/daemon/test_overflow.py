"""Errors about too long prompts have words that clients recognise, in every protocol."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from localspec.daemon.http.errors import error_body
from localspec.errors import ContextExceeded, LocalspecError, recognizable_message
from localspec.extras.anthropic.errors import messages_error
from localspec.extras.ollama.wire import OllamaError
from tests.support.daemons import Home

CLIENTS = json.loads((Path(__file__).parent / "overflow_words.json").read_text("utf-8"))
OWN_MESSAGE = (
    "The prompt has 9 tokens, which exceeds the available context size of 8 tokens; shorten it."
)
ERRORS = [
    ContextExceeded(OWN_MESSAGE, n_prompt_tokens=9, n_ctx=8),
    ContextExceeded("The vLLM at http://x refuses the request: it is long", param="prompt"),
    ContextExceeded(""),
]
SHAPES = {
    "openai": error_body,
    "anthropic": messages_error,
    "ollama": lambda error: OllamaError(recognizable_message(error)),
}


def read_error(shape: Any, error: LocalspecError) -> tuple[str, str | None]:
    """Return the message and the code of an error as a client reads them."""
    details = shape(error).error
    return (details, None) if isinstance(details, str) else (details.message, details.code)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("protocol", SHAPES)
@pytest.mark.parametrize("error", ERRORS, ids=["the engine", "a server", "no words"])
def test_each_client_recognises_an_overflow(
    client: str, protocol: str, error: ContextExceeded
) -> None:
    rules = CLIENTS[client]
    if protocol not in rules.get("protocols", SHAPES):
        return
    message, code = read_error(SHAPES[protocol], error)
    if "code" in rules:
        assert code == rules["code"]
        return
    assert any(re.search(pattern, message, re.IGNORECASE) for pattern in rules["any"]), message
    assert not any(re.search(pattern, message, re.IGNORECASE) for pattern in rules.get("none", []))


def test_no_client_takes_another_error_for_an_overflow() -> None:
    message, _ = read_error(error_body, LocalspecError("The queue is full."))
    patterns = [pattern for client in CLIENTS.values() for pattern in client.get("any", [])]
    assert not any(re.search(pattern, message, re.IGNORECASE) for pattern in patterns)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_daemon_sends_the_recognised_words(api: Home, path: str, stream: bool) -> None:
    text = "refuse context_length_exceeded"
    body = (
        {"input": text}
        if "responses" in path
        else {"messages": [{"role": "user", "content": text}]}
    )
    answer = api.request("POST", path, {**body, "stream": stream, "max_tokens": 9})
    words = "prompt is too long" if "messages" in path else "exceeds the available context size"
    assert words in answer.body.decode()
