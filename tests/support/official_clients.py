"""The official clients of OpenAI and Anthropic over a daemon's socket."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import openai

from tests.support.daemons import Home
from tests.support.patience import PATIENCE

URL = "http://localspec"
KNOWS_TOOLS = "{% if tools %}<tool_call>{% endif %}"  # a template that supports tools


def written_call(name: str, **arguments: Any) -> str:
    """Return a call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def http_client(home: Home, timeout: float = PATIENCE, **options: Any) -> httpx2.Client:
    transport = httpx2.HTTPTransport(uds=str(home.socket), verify=False)
    return httpx2.Client(transport=transport, timeout=timeout, **options)


def async_http_client(home: Home) -> httpx2.AsyncClient:
    transport = httpx2.AsyncHTTPTransport(uds=str(home.socket), verify=False)
    return httpx2.AsyncClient(transport=transport, timeout=PATIENCE)


def _options(http: Any, path: str = "", **options: Any) -> dict[str, Any]:
    shared = {"api_key": "none", "base_url": URL + path, "http_client": http, "max_retries": 0}
    return {**shared, **options}


def openai_client(home: Home, timeout: float = PATIENCE) -> openai.OpenAI:
    return openai.OpenAI(**_options(http_client(home, timeout), "/v1", timeout=timeout))


def async_openai_client(home: Home) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**_options(async_http_client(home), "/v1"))


def anthropic_client(home: Home, timeout: float = PATIENCE, **hooks: Any) -> anthropic.Anthropic:
    """Return a client that checks what it gets; `hooks` are those of its HTTP client."""
    http = http_client(home, timeout, **hooks)
    options = _options(http, timeout=timeout, _strict_response_validation=not hooks)
    return anthropic.Anthropic(**options)


def async_anthropic_client(home: Home) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**_options(async_http_client(home)))
