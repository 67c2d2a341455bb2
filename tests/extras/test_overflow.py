"""Errors about too long prompts have words that clients recognise, in every protocol."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localspec.daemon import routes
from localspec.daemon.http.errors import shape_error
from localspec.errors import ContextExceeded, LocalspecError
from tests.support.daemons import Home
from tests.support.error_shapes import read_error

CLIENTS = json.loads((Path(__file__).parent / "overflow_words.json").read_text("utf-8"))
OWN_MESSAGE = (
    "The prompt has 9 tokens, which exceeds the available context size of 8 tokens; shorten it."
)
ERRORS = [
    ContextExceeded(OWN_MESSAGE, n_prompt_tokens=9, n_ctx=8),
    ContextExceeded("The vLLM at http://x refuses the request: it is long", param="prompt"),
    ContextExceeded(""),
]
TEXT = "refuse context_length_exceeded"
MESSAGES = {"messages": [{"role": "user", "content": TEXT}]}
# Each protocol with a question for the scripted engine.
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", MESSAGES),
    "responses": ("/v1/responses", {"input": TEXT}),
    "anthropic": ("/v1/messages", MESSAGES),
    "ollama": ("/api/chat", MESSAGES),
}
assert routes.ENDPOINTS  # the extras have added the shapes of their errors


def format_error(path: str, error: LocalspecError) -> tuple[str, str | None]:
    """Return the message and the code of an error as a client of this path reads them."""
    body, _ = shape_error({"type": "http", "path": path, "headers": []}, error)
    return read_error(path, msgspec.to_builtins(body))


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("protocol", QUESTIONS)
@pytest.mark.parametrize("error", ERRORS, ids=["the engine", "a server", "no words"])
def test_each_client_recognises_an_overflow(
    client: str, protocol: str, error: ContextExceeded
) -> None:
    rules = CLIENTS[client]
    if protocol not in rules.get("protocols", QUESTIONS):
        return
    message, code = format_error(QUESTIONS[protocol][0], error)
    if "code" in rules:
        assert code == rules["code"]
        return
    assert any(re.search(pattern, message, re.IGNORECASE) for pattern in rules["any"]), message
    assert not any(re.search(pattern, message, re.IGNORECASE) for pattern in rules.get("none", []))


def test_no_client_takes_another_error_for_an_overflow() -> None:
    message, _ = format_error("/v1/chat/completions", LocalspecError("The queue is full."))
    patterns = [pattern for client in CLIENTS.values() for pattern in client.get("any", [])]
    assert not any(re.search(pattern, message, re.IGNORECASE) for pattern in patterns)


@pytest.mark.parametrize(("path", "body"), QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_daemon_sends_the_recognised_words(
    api: Home, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = api.request("POST", path, {**body, "stream": stream, "max_tokens": 9})
    words = "prompt is too long" if "messages" in path else "exceeds the available context size"
    assert words in answer.body.decode()
