"""What we make of a chat is what transformers makes of it, or there is a reason with a name.

`recorded_*.json.gz` hold the texts of transformers' own apply_chat_template (scripts/record_templates.py):
`kinds` of the templates beside this file, each with something of its own, `families` of those written as
models' are, `models` of real models' own, as far as they are here.
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

from localspec.daemon.completion.request import chat_prompt
from localspec.engine.prompt import template_child
from localspec.engine.prompt.template import TemplateRenderer
from localspec.engine.prompt.template_process import TemplateRaised
from localspec.errors import InvalidRequest, TemplateFailed
from localspec.protocol.frames import ChatPrompt
from localspec.protocol.reading import decode
from localspec.protocol.requests import TemplateRequest
from tests.support import templates
from tests.support.chats import CHATS

HERE = Path(__file__).resolve().parent
FOLDERS = {"kinds": HERE / "templates", "families": templates.FAMILIES, "models": templates.REAL}
NOW = datetime(2026, 3, 1, 12, 30)  # the recording's too


class Renderer(TemplateRenderer):
    """In this process, and at a time that stands still."""

    def __init__(self, template: str) -> None:
        super().__init__(None, "<s>", "</s>")
        self._template = template
        self._env = template_child.environment()
        self._env.globals["strftime_now"] = NOW.strftime

    def _today(self) -> dict[str, str]:
        return {}  # transformers gives no date but by strftime_now

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        request = json.dumps({"template": self._template, "variables": variables})
        reply = template_child.answer(self._env, request)
        if "error" in reply:
            raise TemplateRaised(reply["error"])
        text: str = json.loads(json.dumps(reply))["text"]
        return text


def ours(renderer: TemplateRenderer, body: dict[str, Any]) -> str:
    """The whole way: a client's body, the daemon's frame, the engine's prompt."""
    sent = json.loads(json.dumps(body))
    for message in sent["messages"]:
        for call in message.get("tool_calls", []):  # clients send them as JSON
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    prompt = chat_prompt(decode(json.dumps(sent).encode(), TemplateRequest))
    packed = msgspec.msgpack.encode(prompt)
    return renderer.render(msgspec.msgpack.decode(packed, type=ChatPrompt))


@cache
def recorded(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        gzip.decompress((HERE / f"recorded_{kind}.json.gz").read_bytes())
    )
    templates: dict[str, Any] = found["templates"]
    return templates


def wanted(by: Mapping[str, str]) -> str | None:
    """apply_chat_template's text; where null, left out, fails: with null, which is to be told from
    an empty text if that is possible, else with the empty text."""
    if "text" in by:
        return by["text"]
    null, empty = by.get("null"), by.get("empty")
    if null is None or (empty is not None and null.count("null") > empty.count("null")):
        return empty
    return null


def lost(body: dict[str, Any], text: str) -> list[str]:
    """What was said, called or offered, and is not in `text`, in the order of the chat."""
    at, found = 0, []
    for message in body["messages"]:
        said = (message["content"] or "").strip()
        place = text.find(said, at)
        if place < 0:
            found.append(said)
        at = max(at, place)
        for call in message.get("tool_calls", []):
            function = call["function"]
            texts = [each for each in function["arguments"].values() if isinstance(each, str)]
            words = (function["name"], *function["arguments"], *texts)
            found += [word for word in words if word not in text]
    for tool in body.get("tools", []):
        function = tool["function"]
        words = (function["name"], function["description"].split()[-1])
        found += [word for word in words if word not in text]
    return found


def cases() -> list[Any]:
    found = []
    for kind, folder in FOLDERS.items():
        for name in recorded(kind):
            if kind != "models" or (folder / f"{name}.jinja").exists():
                found.append(pytest.param(kind, name, id=f"{kind}-{name}"))
    return found


@pytest.mark.parametrize(("kind", "name"), cases())
def test_prompts_are_those_of_transformers(kind: str, name: str) -> None:
    file = FOLDERS[kind] / f"{name}.jinja"
    template, known = file.read_text(encoding="utf-8"), recorded(kind)[name]
    if hashlib.sha256(template.encode()).hexdigest() != known["sha256"]:
        assert kind == "models", "it was changed: record it again"
        pytest.skip(f"{file.name} is another version than the recorded one")
    renderer = Renderer(template)
    different = []
    for chat, body in CHATS.items():
        expected = wanted(known["chats"][chat])
        try:
            text = ours(renderer, body)
        except (InvalidRequest, TemplateFailed) as error:
            text, refused = None, error.message
        if text == expected:
            continue
        if expected is None:
            assert text is None or not lost(body, text)  # transformers refuses it, and we need not
        elif not lost(body, expected):
            different.append((chat, expected, text or refused))
        elif text is not None:
            assert not lost(body, text)  # transformers loses some of it, and we do not
    assert different == []
