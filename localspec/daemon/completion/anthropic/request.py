"""Anthropic's request into ours: system, messages of content blocks, tools, thinking.

What a newer client sends and nobody here knows is passed over, and named in `ignored`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localspec.errors import InvalidRequest
from localspec.protocol.clients.anthropic import (
    Blocks,
    CountTokensRequest,
    MessagesRequest,
    SearchResultParam,
    TextParam,
    ThinkingParam,
    ToolParam,
    ToolResultParam,
    ToolUseParam,
)
from localspec.protocol.fields import Ignored, without_effect
from localspec.protocol.reading import converted
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    Function,
    JsonSchema,
    NamedFunction,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from localspec.protocol.sampling import parameters

# A prompt's beginning is kept by its content, and calls are held to their schemas where that is possible, so
# the last two ask for nothing.
_TOOL_FIELDS = {*ToolParam.__struct_fields__, "type", "cache_control", "strict"}
ID = "toolu_"  # how ids of calls begin there; templates are shown the rest


def chat_request(
    body: CountTokensRequest, before: Sequence[ChatMessage] = (), ignored: Ignored | None = None
) -> tuple[ChatRequest, Ignored, list[ChatMessage]]:
    """Return `body` as a request of ours, what of it changes nothing, and the messages that it adds.

    before: the messages of the thread that it continues. ignored: what is known to change nothing already.

    Raises:
        BadBody: a block or a tool is not what its type wants.
        InvalidRequest: images and documents, a choice without a name.
    """
    ignored = Ignored() if ignored is None else ignored
    for name in without_effect(body):
        ignored.add(name)
    added = _messages(body, ignored)
    asked = ChatRequest(
        model=body.model,
        messages=_whole_turns([*before, *added]),
        tools=_tools(body.offered or [], ignored) or None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    _check_last(asked.messages)
    _choose(body, asked)
    _think(body, asked)
    _format(body, asked)
    if isinstance(body, MessagesRequest):
        asked.stream, asked.max_tokens, asked.stop = (
            body.stream,
            body.max_tokens,
            body.stop_sequences,
        )
        asked.exact, asked.speculative = body.exact, body.speculative
        for each in parameters():
            setattr(asked, each.name, getattr(body, each.name))
    return asked, ignored, added


# ------------------------------------------------------------------------ messages


@dataclass
class _Said:
    """What one message says, its blocks taken apart."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)

    def messages(self, role: str) -> Iterator[ChatMessage]:
        """Results first: they belong to the calls right before them."""
        yield from self.results
        if self.texts or self.calls or self.thoughts:
            text = "\n".join(self.texts) if self.texts else None
            thoughts = "\n".join(self.thoughts) or None
            yield ChatMessage(role, text, None, self.calls or None, None, thoughts)


def system_prompt(body: CountTokensRequest, ignored: Ignored | None = None) -> list[ChatMessage]:
    """Return the system prompt as a message, or no message if it has no text."""
    ignored = Ignored() if ignored is None else ignored
    return [*_said(body.system or [], "system", "system", ignored).messages("system")]


def _messages(body: CountTokensRequest, ignored: Ignored) -> list[ChatMessage]:
    """The messages of the request. Those of the role "system" are a developer's: of a system's there is
    one, which comes first.
    """
    found = system_prompt(body, ignored)
    for index, message in enumerate(body.messages):
        said = _said(message.content, message.role, f"messages[{index}].content", ignored)
        found += said.messages("developer" if message.role == "system" else message.role)
    if all(each.role in ("system", "developer") for each in found):
        raise InvalidRequest("'messages' contains nothing to answer.", param="messages")
    return _whole_turns(found)


def _whole_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Messages of the assistant that follow each other are one turn there."""
    found: list[ChatMessage] = []
    for each in messages:
        if each.role == "assistant" and found and found[-1].role == "assistant":
            each = _joined(found.pop(), each)
        found.append(each)
    return found


def _check_last(messages: Sequence[ChatMessage]) -> None:
    """Refuse a conversation that ends with calls without their results."""
    if messages[-1].role == "assistant" and messages[-1].tool_calls:
        raise InvalidRequest(
            "The last message has 'tool_use' blocks; their 'tool_result' blocks must follow in a "
            "message of the role 'user'.",
            param="messages",
        )


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    texts = [each.content for each in (first, second) if isinstance(each.content, str)]
    thoughts = [each.reasoning_content for each in (first, second) if each.reasoning_content]
    calls = [*(first.tool_calls or []), *(second.tool_calls or [])]
    said = _Said(texts, thoughts, calls)
    return next(said.messages(first.role))


def _said(content: str | Blocks, role: str, at: str, ignored: Ignored) -> _Said:
    """The blocks of a message, or of the system prompt; `at` is their path."""
    said = _Said()
    if isinstance(content, str):
        said.texts.append(content)
        return said
    for index, block in enumerate(content):
        _take(said, block, role, f"{at}[{index}]", ignored)
    return said


def _take(said: _Said, block: dict[str, Any], role: str, at: str, ignored: Ignored) -> None:
    kind = block.get("type")
    match kind, role:
        case "tool_use", "assistant":
            call = converted(block, ToolUseParam, at)
            function = {"name": call.name, "arguments": call.input}
            said.calls.append(
                {"id": call.id.removeprefix(ID), "type": "function", "function": function}
            )
        case "tool_result", "user":
            result = converted(block, ToolResultParam, at)
            text = _result(result, at, ignored)
            call_id = result.tool_use_id.removeprefix(ID)
            said.results.append(ChatMessage("tool", text, None, None, call_id))
        case "thinking", "assistant":
            if thoughts := converted(block, ThinkingParam, at).thinking:
                said.thoughts.append(thoughts)
        case (("tool_use" | "tool_result" | "thinking"), _):
            raise InvalidRequest(
                f"'{at}': a message of the role '{role}' cannot have blocks of the type '{kind}'.",
                param=at,
            )
        case "redacted_thinking", _:
            pass  # nobody but Anthropic can read it
        case _:
            said.texts += _texts(block, at, ignored)


def _texts(block: dict[str, Any], at: str, ignored: Ignored) -> list[str]:
    """What there is to read in a block of text; nothing in one that is not known.

    Raises:
        InvalidRequest: images and documents. Without them the question would be another one.
    """
    match kind := block.get("type"):
        case "text":
            return [converted(block, TextParam, at).text]
        case "search_result":
            found = converted(block, SearchResultParam, at)
            return [found.title, found.source, *(each.text for each in found.content)]
        case "image" | "document":
            raise InvalidRequest(
                f"'{at}': {kind} input is not supported; this model reads text only.", param=at
            )
        case str():
            ignored.add(at, kind)
            return []
        case _:
            raise InvalidRequest(f"'{at}.type' must be a string.", param=f"{at}.type")


def _result(result: ToolResultParam, at: str, ignored: Ignored) -> str:
    """What a tool gave back, as text; templates have no other place to say that it failed."""
    content = result.content
    if isinstance(content, list):
        blocks = enumerate(content)
        texts = [each for i, b in blocks for each in _texts(b, f"{at}.content[{i}]", ignored)]
        content = "\n".join(texts)
    text = content or ""
    failed = result.is_error and not text.lower().startswith("error")
    return f"Error: {text}" if failed else text


# ------------------------------------------------------------------------ tools, thinking, format


def _tools(offered: Blocks, ignored: Ignored) -> list[Tool]:
    found = []
    for index, each in enumerate(offered):
        at, kind = f"tools[{index}]", each.get("type")
        if kind not in (None, "custom"):
            ignored.add(at, kind)
            continue
        tool = converted(each, ToolParam, at)
        function = Tool(Function(tool.name, tool.description or "", tool.input_schema))
        function.__dict__["own"] = msgspec.to_builtins(function)  # templates do not know `strict`
        function.function.strict = tool.strict
        for key in each.keys() - _TOOL_FIELDS:
            ignored.add(f"{at}.{key}")
        found.append(function)
    return found


def _choose(body: CountTokensRequest, asked: ChatRequest) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        asked.parallel_tool_calls = False
    match choice.type:
        case "tool":
            if not choice.name:
                raise InvalidRequest("'tool_choice.name' is missing.", param="tool_choice.name")
            asked.tool_choice = ToolChoice(NamedFunction(choice.name))
        case "any":
            asked.tool_choice = "required"
        case "auto":
            asked.tool_choice = "auto"
        case "none":
            asked.tool_choice = "none"


def _think(body: CountTokensRequest, asked: ChatRequest) -> None:
    """Who does not ask for thoughts gets none: such clients read the first block as the answer."""
    wanted = body.thinking
    if wanted is None or wanted.type == "disabled":
        asked.reasoning_budget_tokens = 0
    elif wanted.type == "enabled" and wanted.budget_tokens is not None:
        asked.reasoning_budget_tokens = wanted.budget_tokens
    else:
        asked.reasoning_budget_tokens = -1
    if body.output_config is not None and asked.reasoning_budget_tokens:
        asked.reasoning_effort = body.output_config.effort


def _format(body: CountTokensRequest, asked: ChatRequest) -> None:
    wanted = body.output_format or (body.output_config and body.output_config.format)
    if wanted:
        asked.response_format = ResponseFormat("json_schema", JsonSchema(wanted.schema))
