#!/usr/bin/env python3
"""Write the schemas of localspec/openapi.yaml anew from the structs that the daemon uses.

What stands above the marker in that file is written by hand; the schemas below it are made here, so
that they say what the daemon checks and sends. Run it after changing a struct; a test compares.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from localspec.protocol import answers, conversations, disk, pairs, requests
from localspec.registry.pulls.state import PullState

FILE = Path(__file__).resolve().parents[1] / "localspec" / "openapi.yaml"
MARKER = "    # From here on made by scripts/openapi.py.\n"


def completion(name: str, kind: str, choice: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """answers.Completion with one kind of choices: a schema can tell three apart by `object`."""
    told = {"object": Literal[kind], "choices": list[choice]}  # type: ignore[valid-type]
    fields = [
        (field.name, told.get(field.name, field.type))
        if field.required
        else (field.name, field.type, field.default)
        for field in msgspec.structs.fields(answers.Completion)
    ]
    return msgspec.defstruct(name, fields)


REQUESTS: tuple[type[msgspec.Struct], ...] = (
    requests.ChatRequest,
    requests.CompletionRequest,
    requests.LoadRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
    requests.TemplateRequest,
    requests.NativeCompletionRequest,
    requests.InfillRequest,
    pairs.PullRequest,
    pairs.AddRequest,
    pairs.CollectRequest,
    disk.DraftsRequest,
    disk.DiskRequest,
)
ANSWERS: tuple[type[msgspec.Struct], ...] = (
    completion("ChatCompletion", "chat.completion", answers.ChatChoice),
    completion("ChatChunk", "chat.completion.chunk", answers.ChunkChoice),
    completion("TextCompletion", "text_completion", answers.TextChoice),
    answers.ErrorBody,
    answers.ModelList,
    answers.PairStatus,
    answers.Status,
    pairs.PairEntry,
    pairs.PairList,
    pairs.PairView,
    pairs.RemovedView,
    pairs.CollectedView,
    pairs.Verifying,
    disk.Drafts,
    disk.Disk,
    PullState,
    conversations.ConversationList,
    conversations.Conversation,
    conversations.Undone,
    conversations.Forgotten,
)


def schemas() -> dict[str, Any]:
    """JSON Schema by the struct's name. An answer has the fields it declares and no others."""
    template = "#/components/schemas/{name}"
    _, asked = msgspec.json.schema_components(REQUESTS, ref_template=template)
    _, given = msgspec.json.schema_components(ANSWERS, ref_template=template)
    for name in given.keys() - asked.keys():
        given[name]["additionalProperties"] = False
    every = {**given, **asked}
    for schema in every.values():
        del schema["title"]  # it repeats the name
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
    return dict(sorted(every.items()))


def text() -> str:
    """The whole file as it should be."""
    by_hand = FILE.read_text(encoding="utf-8").partition(MARKER)[0]
    made = yaml.safe_dump(
        schemas(), sort_keys=False, allow_unicode=True, width=90, default_flow_style=None
    )
    return by_hand + MARKER + "".join(f"    {line}\n" for line in made.splitlines())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
