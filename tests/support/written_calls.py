"""Calls as the chat template of a model writes them in an earlier answer."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

from localspec.chat.dialect import learn_dialect
from localspec.chat.markers import MESSAGE_START
from localspec.chat.wordings import append_calls
from localspec.engine.prompt.template_child import environment, render
from localspec.engine.prompt.template_process import TemplateProcess
from localspec.protocol.calls import CallFormat
from localspec.protocol.dialect import Dialect
from tests.support import templates
from tests.support.random_calls import PIECES, Schema

_QUESTION = "zqquestion"
_ENVIRONMENT = environment()
# What ends a text in notations that do not escape it. Templates of LFM2 escape nothing.
_END_OF_TEXT = {"gemma": ['<|"|>'], "python": ["'", "\\"]}
Calls = list[tuple[str, Any]]


@cache
def _process() -> TemplateProcess:
    return TemplateProcess()


@cache
def learn(name: str) -> Dialect:
    """Return the dialect of a template."""
    text = templates.template(name)
    return learn_dialect(text, partial(_process().render, text))


def carried_pieces(form: CallFormat) -> list[str]:
    """Return the pieces of texts that the notation can write: its own markers, but none that ends a text."""
    literals = [*form.opens, form.close, form.lead, form.middle, form.again, *form.parameter[:3]]
    ends = [*form.parameter[3:], form.elements, *_END_OF_TEXT.get(form.kind, ())]
    pieces = [*PIECES, *filter(str.strip, literals)]
    return [piece for piece in pieces if not any(end.strip() in piece for end in ends if end)]


def write_calls(name: str, calls: Calls, schemas: dict[str, Schema]) -> str:
    """Return an answer of these calls as the model's template writes them. Raises TemplateRaised."""
    dialect = learn(name)
    is_text = dialect.calls.told or dialect.calls.guessed
    as_json = dialect.messages.json_arguments and not is_text
    tool_calls = [
        {
            "id": f"abcdefg0{at}",
            "type": "function",
            "function": {
                "name": called,
                "arguments": json.dumps(arguments) if as_json else arguments,
            },
        }
        for at, (called, arguments) in enumerate(calls)
    ]
    if is_text:
        return append_calls("", tool_calls)
    functions = [
        {"name": tool, "description": "d", "parameters": schema} for tool, schema in schemas.items()
    ]
    variables: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": "", "tool_calls": tool_calls},
        ],
        "tools": [{"type": "function", "function": function} for function in functions],
        "bos_token": "",
        "eos_token": "",
        "documents": None,
        "add_generation_prompt": False,
    }
    text = render(_ENVIRONMENT, templates.template(name), variables).rpartition(_QUESTION)[2]
    if dialect.calls.thoughts:
        text = text.partition(MESSAGE_START)[2]
    return text[text.index("{") :] if dialect.calls.bare else text
