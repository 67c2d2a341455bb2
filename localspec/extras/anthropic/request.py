"""Translate Anthropic's request: system, messages of content blocks, tools, thinking.

Fields that only newer clients know are skipped and named in `ignored`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localspec.daemon.completion.files import decode_picture, read_file
from localspec.daemon.completion.request import translate_request
from localspec.errors import InvalidRequest
from localspec.extras.anthropic.client_tools import find_client_tool
from localspec.extras.anthropic.wire import (
    Blocks,
    CountTokensRequest,
    DocumentParam,
    ImageParam,
    ImageSource,
    MessagesRequest,
    SearchResultParam,
    TextParam,
    ThinkingParam,
    ToolChoiceParam,
    ToolParam,
    ToolResultParam,
    Tools,
    ToolUseParam,
)
from localspec.protocol.fields import IgnoredFields, fields_without_effect
from localspec.protocol.reading import convert
from localspec.protocol.requests import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    Function,
    JsonSchema,
    NamedFunction,
    ResponseFormat,
    Tool,
    ToolChoice,
)

# `cache_control` and `strict` need no handling: every prompt is cached by its content, and calls follow
# their schemas wherever possible.
_TOOL_FIELDS = {*ToolParam.__struct_fields__, "type", "cache_control", "strict"}
CALL_ID_PREFIX = "toolu_"  # of call ids in this protocol; templates get the ids without it
_OFFLINE = "localspec works offline, and stores no files."


def chat_request(
    body: CountTokensRequest, ignored: IgnoredFields, before: Sequence[ChatMessage] = ()
) -> tuple[ChatRequest, list[ChatMessage]]:
    """Return `body` as a chat, and the messages that the request adds.

    `before` are the messages of the thread that it continues. Fields without effect are added to `ignored`.

    Raises:
        BadBody: a block or a tool does not match its type.
        InvalidRequest: a document or a picture cannot be read, or a choice has no name.
    """
    for name in fields_without_effect(body):
        ignored.add(name)
    new_messages = _messages(body, ignored)
    # Whatever decides how an answer is written is of no interest to a request that only counts tokens.
    chat = translate_request(
        ChatRequest,
        *([body] if isinstance(body, MessagesRequest) else []),
        model=body.model,
        stop=body.stop_sequences if isinstance(body, MessagesRequest) else None,
        messages=_merge_assistant_turns([*before, *new_messages]),
        tools=_tools(body.offered or [], ignored) or None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if chat.messages[-1].role == "assistant" and chat.messages[-1].tool_calls:
        raise InvalidRequest(
            "The last message has 'tool_use' blocks; their 'tool_result' blocks must follow in a "
            "message of the role 'user'.",
            param="messages",
        )
    if body.tool_choice:
        _choose(body.tool_choice, body.offered or [], chat)
    _think(body, chat)
    output_format = body.output_format or (body.output_config and body.output_config.format)
    if output_format:
        chat.response_format = ResponseFormat("json_schema", JsonSchema(output_format.schema))
    return chat, new_messages


@dataclass
class _MessageContent:
    texts: list[ContentPart] = field(default_factory=list)  # and pictures and files
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)

    def messages(self, role: str) -> Iterator[ChatMessage]:
        yield from self.results  # first, because they belong to the preceding calls
        if self.texts or self.calls or self.thoughts:
            content = _join_parts(self.texts) if self.texts else None
            thoughts = "\n".join(self.thoughts) or None
            yield ChatMessage(role, content, None, self.calls or None, None, thoughts)


def _join_parts(parts: list[ContentPart]) -> str | list[ContentPart]:
    """Return parts as one text, or as they are if there are others among them."""
    if all(part.type == "text" for part in parts):
        return "\n".join(part.text or "" for part in parts)
    return parts


def system_prompt(
    body: CountTokensRequest, ignored: IgnoredFields | None = None
) -> list[ChatMessage]:
    """Return the system prompt as a message, or no message if it has no text."""
    ignored = IgnoredFields() if ignored is None else ignored
    return [*_read_content(body.system or [], "system", "system", ignored).messages("system")]


def _messages(body: CountTokensRequest, ignored: IgnoredFields) -> list[ChatMessage]:
    messages = system_prompt(body, ignored)
    for index, message in enumerate(body.messages):
        path = f"messages[{index}].content"
        content = _read_content(message.content, message.role, path, ignored)
        # A chat has only one system message, which comes first.
        messages += content.messages("developer" if message.role == "system" else message.role)
    if all(chat_message.role in ("system", "developer") for chat_message in messages):
        raise InvalidRequest.at("messages", "contains nothing to answer.")
    return _merge_assistant_turns(messages)


def _merge_assistant_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Merge consecutive messages of the assistant, which are one turn in this protocol."""
    turns: list[ChatMessage] = []
    for message in messages:
        if not (message.role == "assistant" and turns and turns[-1].role == "assistant"):
            turns.append(message)
            continue
        content = _MessageContent()
        for part in (turns.pop(), message):
            text = part.content
            content.texts += [ContentPart("text", text)] if isinstance(text, str) else text or []
            content.thoughts += [part.reasoning_content] if part.reasoning_content else []
            content.calls += part.tool_calls or []
        turns += content.messages("assistant")
    return turns


def _read_content(
    content: str | Blocks, role: str, path: str, ignored: IgnoredFields
) -> _MessageContent:
    parsed = _MessageContent()
    if isinstance(content, str):
        parsed.texts.append(ContentPart("text", content))
        return parsed
    for index, block in enumerate(content):
        _add_block(parsed, block, role, f"{path}[{index}]", ignored)
    return parsed


def _add_block(
    parsed: _MessageContent, block: dict[str, Any], role: str, path: str, ignored: IgnoredFields
) -> None:
    kind = block.get("type")
    match kind, role:
        case "tool_use", "assistant":
            call = convert(block, ToolUseParam, path)
            function = {"name": call.name, "arguments": call.input}
            call_id = call.id.removeprefix(CALL_ID_PREFIX)
            parsed.calls.append({"id": call_id, "type": "function", "function": function})
        case "tool_result", "user":
            result = convert(block, ToolResultParam, path)
            content = _result_content(result, path, ignored)
            call_id = result.tool_use_id.removeprefix(CALL_ID_PREFIX)
            parsed.results.append(ChatMessage("tool", content, None, None, call_id))
        case "thinking", "assistant":
            if thoughts := convert(block, ThinkingParam, path).thinking:
                parsed.thoughts.append(thoughts)
        case (("tool_use" | "tool_result" | "thinking"), _):
            problem = f": a message of the role '{role}' cannot have blocks of the type '{kind}'."
            raise InvalidRequest.at(path, problem)
        case "redacted_thinking", _:
            pass  # only Anthropic can decrypt it
        case _:
            parsed.texts += _parts(block, path, ignored)


def _parts(block: dict[str, Any], path: str, ignored: IgnoredFields) -> list[ContentPart]:
    """Return the texts of a block, or its picture or file; nothing if its type is unknown."""
    match kind := block.get("type"):
        case "text":
            return [ContentPart("text", convert(block, TextParam, path).text)]
        case "search_result":
            found = convert(block, SearchResultParam, path)
            texts = [found.title, found.source, *(part.text for part in found.content)]
            return [ContentPart("text", text) for text in texts]
        case "image":
            return [_picture_part(convert(block, ImageParam, path).source, f"{path}.source")]
        case "document":
            return _document_parts(convert(block, DocumentParam, path), path, ignored)
        case str():
            ignored.add(path, kind)
            return []
        case _:
            raise InvalidRequest.at(f"{path}.type", "must be a string.")


def _document_parts(
    document: DocumentParam, path: str, ignored: IgnoredFields
) -> list[ContentPart]:
    if document.citations:
        ignored.add(f"{path}.citations")
    source, path = document.source, f"{path}.source"
    parts = [ContentPart("text", document.context)] if document.context else []
    match source.type:
        case "base64":
            file = {"filename": document.title, "file_data": source.data}
            read_file(file, path, "data")
            return [*parts, ContentPart("file", file=file)]
        case "text":
            text = f"{document.title or 'document'}:\n{source.data.rstrip()}\n"
            return [*parts, ContentPart("text", text)]
        case "content":
            content = _read_content(source.content, "user", f"{path}.content", ignored)
            return [*parts, *content.texts]
        case _:
            kinds = '"base64", "text" or "content"'
            raise InvalidRequest.at(f"{path}.type", f"must be {kinds}: {_OFFLINE}")


def _picture_part(source: ImageSource, path: str) -> ContentPart:
    if source.type != "base64":
        raise InvalidRequest.at(f"{path}.type", f'must be "base64": {_OFFLINE}')
    decode_picture(source.data, f"{path}.data")
    return ContentPart("image_url", image_url=f"data:{source.media_type};base64,{source.data}")


def _result_content(
    result: ToolResultParam, path: str, ignored: IgnoredFields
) -> str | list[ContentPart]:
    content: str | list[ContentPart] = ""
    if isinstance(result.content, list):
        parts: list[ContentPart] = []
        for index, block in enumerate(result.content):
            parts += _parts(block, f"{path}.content[{index}]", ignored)
        content = _join_parts(parts)
    elif result.content:
        content = result.content
    if not result.is_error:
        return content
    # A failure is part of the text, as templates have no other field.
    if isinstance(content, list):
        return [ContentPart("text", "Error:"), *content]
    return content if content.lower().startswith("error") else f"Error: {content}"


def _tools(offered: Tools, ignored: IgnoredFields) -> list[Tool]:
    tools = []
    for index, definition in enumerate(offered):
        path, kind = f"tools[{index}]", definition.get("type")
        known_fields = _TOOL_FIELDS
        if kind not in (None, "custom"):
            if not (known := find_client_tool(definition, path)):
                ignored.add(path, kind)
                continue
            known_fields = known_fields | known.fields
            schema = {"description": known.description, "input_schema": known.parameters}
            definition = {"name": known.name, **definition, **schema}
        parameters = convert(definition, ToolParam, path)
        text = parameters.description or ""
        tool = Tool(Function(parameters.name, text, parameters.input_schema))
        # The template gets the tool without `strict`, which is no field of its format.
        tool.__dict__["own"] = msgspec.to_builtins(tool)
        tool.function.strict = parameters.strict
        for key in definition:
            if key not in known_fields:
                ignored.add(f"{path}.{key}")
        tools.append(tool)
    return tools


def _choose(choice: ToolChoiceParam, offered: Tools, chat: ChatRequest) -> None:
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    # A choice that demands a call is refused if only tools that run at Anthropic could be called.
    names = {tool.function.name for tool in chat.tools or []}
    for index, definition in enumerate(offered):
        name, kind = definition.get("name"), definition.get("type")
        if choice.type == "tool":
            is_meant = name == choice.name and name not in names
        else:
            is_meant = choice.type == "any" and not names
        if is_meant:
            raise InvalidRequest(
                f"'tool_choice' demands a call, but 'tools[{index}]', of the type '{str(kind)[:80]}', runs "
                "at Anthropic alone.",
                param="tool_choice",
            )
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest.at("tool_choice.name", "is missing.")
        chat.tool_choice = ToolChoice(NamedFunction(choice.name))
    else:
        chat.tool_choice = "required" if choice.type == "any" else choice.type


def _think(body: CountTokensRequest, chat: ChatRequest) -> None:
    """Translate `thinking`; the default is none, because clients take the first block for the answer."""
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        chat.reasoning_budget_tokens = 0
    elif thinking.type == "enabled" and thinking.budget_tokens is not None:
        chat.reasoning_budget_tokens = thinking.budget_tokens
    else:
        chat.reasoning_budget_tokens = -1
    if body.output_config is not None and chat.reasoning_budget_tokens:
        chat.reasoning_effort = body.output_config.effort
