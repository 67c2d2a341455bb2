"""Clients recognise a prompt that is too long by the words of the error, in every protocol."""

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
OURS = "The prompt has 9 tokens, which exceeds the available context size of 8 tokens; shorten it."
ERRORS = [
    ContextExceeded(OURS, n_prompt_tokens=9, n_ctx=8),
    ContextExceeded("The vLLM at http://x refuses the request: it is long", param="prompt"),
    ContextExceeded(""),
]
SHAPES = {
    "openai": error_body,
    "anthropic": messages_error,
    "ollama": lambda error: OllamaError(recognizable_message(error)),
}


def told(shape: Any, error: LocalspecError) -> tuple[str, str | None]:
    """The message of an error and its code, as a client reads them."""
    found = shape(error).error
    return (found, None) if isinstance(found, str) else (found.message, found.code)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("protocol", SHAPES)
@pytest.mark.parametrize("error", ERRORS, ids=["the engine", "a server", "no words"])
def test_each_client_recognises_it(client: str, protocol: str, error: ContextExceeded) -> None:
    known = CLIENTS[client]
    if protocol not in known.get("protocols", SHAPES):
        return
    message, code = told(SHAPES[protocol], error)
    if "code" in known:
        assert code == known["code"]
        return
    assert any(re.search(each, message, re.IGNORECASE) for each in known["any"]), message
    assert not any(re.search(each, message, re.IGNORECASE) for each in known.get("none", []))


def test_no_other_error_is_taken_for_it() -> None:
    message, _ = told(error_body, LocalspecError("The queue is full."))
    known = [each for client in CLIENTS.values() for each in client.get("any", [])]
    assert not any(re.search(each, message, re.IGNORECASE) for each in known)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_daemon_says_it_in_its_answers(api: Home, path: str, stream: bool) -> None:
    text = "refuse context_length_exceeded"
    asked = (
        {"input": text}
        if "responses" in path
        else {"messages": [{"role": "user", "content": text}]}
    )
    answer = api.request("POST", path, {**asked, "stream": stream, "max_tokens": 9})
    words = "prompt is too long" if "messages" in path else "exceeds the available context size"
    assert words in answer.body.decode()
