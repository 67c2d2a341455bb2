#!/usr/bin/env python3
"""Write the schemas of localspec/openapi.yaml anew from the structs that the daemon uses.

What stands above the marker in that file is written by hand; the schemas below it are made here, so
that they say what the daemon checks and sends. An endpoint that is not described yet gets a description
made of its function's docstring, to be written out. Run it after changing a struct or adding an
endpoint; a test compares.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import yaml

from localspec.daemon import routes
from localspec.extras.anthropic import wire
from localspec.extras.ollama import wire as ollama
from localspec.extras.responses import wire as events
from localspec.extras.responses import wire as items
from localspec.extras.responses.wire import ResponsesRequest
from localspec.protocol import answers, conversations, pairs, requests
from localspec.registry.pulls.pull import PullState

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


REQUESTS: tuple[type[msgspec.Struct], ...] = (
    requests.ChatRequest,
    requests.CompletionRequest,
    wire.MessagesRequest,
    wire.CountTokensRequest,
    requests.EmbeddingRequest,
    requests.RerankRequest,
    requests.LoadRequest,
    requests.TokenizeRequest,
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
    ollama.OllamaChatRequest,
    ollama.OllamaGenerateRequest,
    ollama.OllamaEmbedRequest,
    ollama.OllamaEmbeddingsRequest,
    ollama.OllamaModelRequest,
    ResponsesRequest,
)
ANSWERS: tuple[type[msgspec.Struct], ...] = (
    completion("ChatCompletion", "chat.completion", answers.ChatChoice),
    completion("ChatChunk", "chat.completion.chunk", answers.ChunkChoice),
    completion("TextCompletion", "text_completion", answers.TextChoice),
    wire.MessagesAnswer,
    *get_args(wire.MessagesEvent),
    wire.TokenCount,
    wire.MessagesModelPage,
    wire.MessagesError,
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
    ollama.OllamaError,
    ollama.OllamaChatLine,
    ollama.OllamaGenerateLine,
    ollama.OllamaEmbeddings,
    ollama.OllamaEmbedding,
    ollama.OllamaModels,
    ollama.OllamaProgress,
    ollama.OllamaShown,
    ollama.OllamaVersion,
    items.ResponseObject,
    items.ItemList,
    items.DeletedResponse,
    items.InputTokens,
    *get_args(events.AnyEvent),
)


def schemas() -> dict[str, Any]:
    """JSON Schema by the struct's name. An answer has the fields it declares and no others."""
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
    """The description of an endpoint as far as its row and its docstring tell."""
    name = f"{handler.__module__.rpartition('.')[2]}_{handler.__name__}"
    summary = (inspect.getdoc(handler) or name).splitlines()[0].rstrip(".")
    operation: dict[str, Any] = {
        "tags": ["localspec"],
        "operationId": name,
        "summary": summary,
    }
    if named := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": schema, "in": "path", "required": True, "schema": {"type": "string"}}
            for schema in named
        ]
    answered = {"description": summary, "content": {"application/json": {"schema": {}}}}
    refused = {"$ref": "#/components/responses/Refused"}
    operation["responses"] = {"200": answered, "400": refused}
    lines = yaml.safe_dump({method.lower(): operation}, sort_keys=False).splitlines()
    return "".join(f"    {line}\n" for line in lines)


def described(by_hand: str) -> str:
    """The part that is written by hand, with an outline of each endpoint that it lacks."""
    known: dict[str, Any] = yaml.safe_load(by_hand)["paths"]
    for method, path, handler, _ in routes.ENDPOINTS:
        head = f"  {path}:\n"
        if path not in known:
            known[path] = {}
            by_hand = by_hand.replace("\ncomponents:\n", f"{head}\ncomponents:\n")
        if method.lower() not in known[path]:
            by_hand = by_hand.replace(head, head + outline(method, path, handler))
    return by_hand


def text() -> str:
    """The whole file as it should be."""
    by_hand = described(FILE.read_text(encoding="utf-8").partition(MARKER)[0])
    made = yaml.safe_dump(
        schemas(), sort_keys=False, allow_unicode=True, width=90, default_flow_style=None
    )
    return by_hand + MARKER + "".join(f"    {line}\n" for line in made.splitlines())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
