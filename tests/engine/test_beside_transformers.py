"""Prompts agree with those of transformers, or differ for a known reason.

`recorded_*.json.gz` hold the texts of transformers' apply_chat_template (scripts/record_templates.py).
`kinds` has the templates beside this file, each with a special feature; `families` has templates written
like those of models; `models` has those of real models, as far as they are on this machine.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localspec.chat.wordings import Messages
from localspec.daemon.completion.request import chat_prompt
from localspec.engine.prompt import template_child
from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import InvalidRequest, TemplateFailed, TemplateRaised
from localspec.protocol.frames import ChatPrompt
from localspec.protocol.reading import decode
from localspec.protocol.requests import TemplateRequest
from tests.support import templates
from tests.support.chats import CHATS

HERE = Path(__file__).resolve().parent
FOLDERS = {"kinds": HERE / "templates", "families": templates.FAMILIES, "models": templates.REAL}
NOW = datetime(2026, 3, 1, 12, 30)  # the time of the recording


class Renderer(TemplateRenderer):
    """A renderer that runs in this process, at a fixed time."""

    def __init__(self, template: str) -> None:
        super().__init__(None, "<s>", "</s>")
        self._template = template
        self._env = template_child.environment()
        self._env.globals["strftime_now"] = NOW.strftime

    def _variables(self, prompt: ChatPrompt, messages: Messages) -> dict[str, Any]:
        # Transformers provides dates by strftime_now only, unless the request has its own.
        ours = {"date_string", "datetime"} - prompt.template_kwargs.keys()
        variables = super()._variables(prompt, messages)
        return {name: value for name, value in variables.items() if name not in ours}

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        request = json.dumps({"template": self._template, "variables": variables})
        reply = template_child.answer(self._env, request)
        if "error" in reply:
            raise TemplateRaised(reply["error"])
        text: str = json.loads(json.dumps(reply))["text"]
        return text


def render_body(renderer: TemplateRenderer, body: dict[str, Any]) -> str:
    """Render a client's body through the daemon's frame to the engine's prompt."""
    body_copy = json.loads(json.dumps(body))
    for message in body_copy["messages"]:
        for call in message.get("tool_calls", []):  # clients send arguments as JSON
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    prompt = chat_prompt(decode(json.dumps(body_copy).encode(), TemplateRequest))
    packed = msgspec.msgpack.encode(prompt)
    return renderer.render(msgspec.msgpack.decode(packed, type=ChatPrompt))


@cache
def load_recorded(kind: str) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(
        gzip.decompress((HERE / f"recorded_{kind}.json.gz").read_bytes())
    )
    templates: dict[str, Any] = recording["templates"]
    return templates


def get_expected(by: Mapping[str, str]) -> str | None:
    """Return the recorded text of apply_chat_template.

    If a missing content failed, it is the text with null content, or with an empty one if null is printed.
    """
    if "text" in by:
        return by["text"]
    null, empty = by.get("null"), by.get("empty")
    if null is None or (empty is not None and null.count("null") > empty.count("null")):
        return empty
    return null


def find_missing(body: dict[str, Any], text: str) -> list[str]:
    """Return the contents, calls and tools of a chat that are missing in `text`, in their order."""
    at, missing = 0, []
    for message in body["messages"]:
        content = (message["content"] or "").strip()
        place = text.find(content, at)
        if place < 0:
            missing.append(content)
        at = max(at, place)
        for call in message.get("tool_calls", []):
            function = call["function"]
            texts = [value for value in function["arguments"].values() if isinstance(value, str)]
            words = (function["name"], *function["arguments"], *texts)
            missing += [word for word in words if word not in text]
    for tool in body.get("tools", []):
        function = tool["function"]
        words = (function["name"], function["description"].split()[-1])
        missing += [word for word in words if word not in text]
    return missing


def list_cases() -> list[Any]:
    parameters = []
    for kind, folder in FOLDERS.items():
        for name in load_recorded(kind):
            if kind != "models" or (folder / f"{name}.jinja").exists():
                parameters.append(pytest.param(kind, name, id=f"{kind}-{name}"))
    return parameters


@pytest.mark.parametrize(("kind", "name"), list_cases())
def test_prompts_are_those_of_transformers(kind: str, name: str) -> None:
    file = FOLDERS[kind] / f"{name}.jinja"
    template, recording = file.read_text(encoding="utf-8"), load_recorded(kind)[name]
    if hashlib.sha256(template.encode()).hexdigest() != recording["sha256"]:
        assert kind == "models", "it was changed: record it again"
        pytest.skip(f"{file.name} is another version than the recorded one")
    renderer = Renderer(template)
    different = []
    for chat, body in CHATS.items():
        expected = get_expected(recording["chats"][chat])
        try:
            text = render_body(renderer, body)
        except (InvalidRequest, TemplateFailed) as error:
            text, refused = None, error.message
        if text == expected:
            continue
        if expected is None:
            # Transformers refuses the chat, which we need not.
            assert text is None or not find_missing(body, text)
        elif not find_missing(body, expected):
            different.append((chat, expected, text or refused))
        elif text is not None:
            # Transformers loses some of the chat, which we must not.
            assert not find_missing(body, text)
    assert different == []
