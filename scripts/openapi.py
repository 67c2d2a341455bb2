#!/usr/bin/env python3
"""Write the schemas of localspec/openapi.yaml from the structs that the daemon uses.

The text above the marker in that file is written by hand. The schemas below it are generated here, so that
they say what the daemon checks and sends. An endpoint that is not described yet gets an outline from its
function's docstring, to be written out. Run this script after you change a struct or add an endpoint; a test
compares.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from localspec import extras
from localspec.daemon import routes
from localspec.protocol import answers, conversations, pairs, requests
from localspec.registry.pulls.messages import PullState

FILE = Path(__file__).resolve().parents[1] / "localspec" / "openapi.yaml"
MARKER = "    # From here on made by scripts/openapi.py.\n"


def completion(name: str, kind: str, choice: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """answers.Completion with one kind of choices: a schema can tell three apart by `object`."""
    members = {"object": Literal[kind], "choices": list[choice]}  # type: ignore[valid-type] # a type made here
    fields = [
        (field.name, members.get(field.name, field.type))
        if field.required
        else (field.name, field.type, field.default)
        for field in msgspec.structs.fields(answers.Completion)
    ]
    return msgspec.defstruct(name, fields)


# The wire types of each protocol. Each of these modules has `REQUESTS` and `ANSWERS`.
WIRES = [
    import_module(module.name)
    for module in pkgutil.walk_packages(extras.__path__, f"{extras.__name__}.")
    if module.name.endswith(".wire")
]
REQUESTS: tuple[type[msgspec.Struct], ...] = (
    requests.ChatRequest,
    requests.CompletionRequest,
    requests.EmbeddingRequest,
    requests.RerankRequest,
    requests.LoadRequest,
    requests.TokenizeRequest,
    requests.ControlRequest,
    requests.StreamLookup,
    requests.DetokenizeRequest,
    requests.TemplateRequest,
    requests.NativeCompletionRequest,
    requests.InfillRequest,
    pairs.PullRequest,
    pairs.AddRequest,
    pairs.AddUpstreamRequest,
    pairs.CollectRequest,
    pairs.DraftsRequest,
    pairs.DiskRequest,
    *(request for wire in WIRES for request in wire.REQUESTS),
)
ANSWERS: tuple[type[msgspec.Struct], ...] = (
    completion("ChatCompletion", "chat.completion", answers.ChatChoice),
    completion("ChatChunk", "chat.completion.chunk", answers.ChunkChoice),
    completion("TextCompletion", "text_completion", answers.TextChoice),
    answers.ControlResult,
    answers.StreamState,
    answers.EmbeddingList,
    answers.NativeEmbedding,
    answers.RankedList,
    answers.RankedText,
    answers.ErrorBody,
    answers.Configured,
    answers.ModelList,
    answers.PairStatus,
    answers.Status,
    pairs.PairEntry,
    pairs.PairList,
    pairs.PairView,
    pairs.RemovedView,
    pairs.CollectedView,
    pairs.Verifying,
    pairs.Drafts,
    pairs.Disk,
    PullState,
    conversations.ConversationList,
    conversations.Conversation,
    conversations.Undone,
    conversations.Forgotten,
    conversations.Statistics,
    *(answer for wire in WIRES for answer in wire.ANSWERS),
)


def schemas() -> dict[str, Any]:
    """Return the JSON schemas by the names of the structs. An answer has only the fields it declares."""
    template = "#/components/schemas/{name}"
    _, request_schemas = msgspec.json.schema_components(REQUESTS, ref_template=template)
    _, answer_schemas = msgspec.json.schema_components(ANSWERS, ref_template=template)
    for name in answer_schemas.keys() - request_schemas.keys():
        answer_schemas[name]["additionalProperties"] = False
    every = {**answer_schemas, **request_schemas}
    for schema in every.values():
        del schema["title"]  # it repeats the name
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
    return dict(sorted(every.items()))


def outline(method: str, path: str, handler: routes.Handler) -> str:
    """Return the description of an endpoint as far as its row and its docstring tell."""
    name = f"{handler.__module__.rpartition('.')[2]}_{handler.__name__}"
    summary = (inspect.getdoc(handler) or name).splitlines()[0].rstrip(".")
    operation: dict[str, Any] = {
        "tags": ["localspec"],
        "operationId": name,
        "summary": summary,
    }
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
            for parameter in names
        ]
    answer = {"description": summary, "content": {"application/json": {"schema": {}}}}
    refusal = {"$ref": "#/components/responses/Refused"}
    operation["responses"] = {"200": answer, "400": refusal}
    lines = yaml.safe_dump({method.lower(): operation}, sort_keys=False).splitlines()
    return "".join(f"    {line}\n" for line in lines)


def add_outlines(manual_part: str) -> str:
    """Return the part that is written by hand, with an outline of each endpoint that it lacks."""
    known: dict[str, Any] = yaml.safe_load(manual_part)["paths"]
    for method, path, handler, _ in routes.ENDPOINTS:
        head = f"  {path}:\n"
        if path not in known:
            known[path] = {}
            manual_part = manual_part.replace("\ncomponents:\n", f"{head}\ncomponents:\n")
        if method.lower() not in known[path]:
            manual_part = manual_part.replace(head, head + outline(method, path, handler))
    return manual_part


def text() -> str:
    """Return the whole file as it should be."""
    manual_part = add_outlines(FILE.read_text(encoding="utf-8").partition(MARKER)[0])
    generated = yaml.safe_dump(
        schemas(), sort_keys=False, allow_unicode=True, width=90, default_flow_style=None
    )
    return manual_part + MARKER + "".join(f"    {line}\n" for line in generated.splitlines())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
