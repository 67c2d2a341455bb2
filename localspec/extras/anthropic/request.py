"""Translate Anthropic's request: system, messages of content blocks, tools, thinking.

Fields that only newer clients know are skipped and named in `ignored`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localspec.daemon.completion.files import read_file
from localspec.daemon.completion.pictures import decode_picture
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
CALL_ID_PREFIX = (
    "toolu_"  # the prefix of call ids in this protocol; templates get the ids without it
)


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
    _check_last(chat.messages)
    _choose(body, chat)
    _think(body, chat)
    _format(body, chat)
    return chat, new_messages


# ------------------------------------------------------------------------ messages


@dataclass
class _MessageContent:
    """The content of one message, separated by the kind of block."""

    texts: list[ContentPart] = field(default_factory=list)  # and pictures and files
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)

    def messages(self, role: str) -> Iterator[ChatMessage]:
        """Yield the chat messages; results come first, because they belong to the preceding calls."""
        yield from self.results
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
    """Return the messages of the request.

    Messages with the role "system" get the role "developer", because a chat has only one system message,
    which comes first.
    """
    messages = system_prompt(body, ignored)
    for index, message in enumerate(body.messages):
        content = _read_content(
            message.content, message.role, f"messages[{index}].content", ignored
        )
        messages += content.messages("developer" if message.role == "system" else message.role)
    if all(chat_message.role in ("system", "developer") for chat_message in messages):
        raise InvalidRequest("'messages' contains nothing to answer.", param="messages")
    return _merge_assistant_turns(messages)


def _merge_assistant_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Merge consecutive messages of the assistant, which are one turn in this protocol."""
    turns: list[ChatMessage] = []
    for message in messages:
        if message.role == "assistant" and turns and turns[-1].role == "assistant":
            message = _join_messages(turns.pop(), message)
        turns.append(message)
    return turns


def _check_last(messages: Sequence[ChatMessage]) -> None:
    """Refuse a conversation that ends with calls without their results."""
    if messages[-1].role == "assistant" and messages[-1].tool_calls:
        raise InvalidRequest(
            "The last message has 'tool_use' blocks; their 'tool_result' blocks must follow in a "
            "message of the role 'user'.",
            param="messages",
        )


def _join_messages(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    texts: list[ContentPart] = []
    for message in (first, second):
        if isinstance(message.content, str):
            texts.append(ContentPart("text", message.content))
        else:
            texts += message.content or []
    thoughts = [
        message.reasoning_content for message in (first, second) if message.reasoning_content
    ]
    calls = [*(first.tool_calls or []), *(second.tool_calls or [])]
    content = _MessageContent(texts, thoughts, calls)
    return next(content.messages(first.role))


def _read_content(
    content: str | Blocks, role: str, path: str, ignored: IgnoredFields
) -> _MessageContent:
    """Return the parsed blocks of a message or of the system prompt, whose path is `path`."""
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
            parsed.calls.append(
                {
                    "id": call.id.removeprefix(CALL_ID_PREFIX),
                    "type": "function",
                    "function": function,
                }
            )
        case "tool_result", "user":
            result = convert(block, ToolResultParam, path)
            content = _result_content(result, path, ignored)
            call_id = result.tool_use_id.removeprefix(CALL_ID_PREFIX)
            parsed.results.append(ChatMessage("tool", content, None, None, call_id))
        case "thinking", "assistant":
            if thoughts := convert(block, ThinkingParam, path).thinking:
                parsed.thoughts.append(thoughts)
        case (("tool_use" | "tool_result" | "thinking"), _):
            raise InvalidRequest(
                f"'{path}': a message of the role '{role}' cannot have blocks of the type '{kind}'.",
                param=path,
            )
        case "redacted_thinking", _:
            pass  # only Anthropic can decrypt it
        case _:
            parsed.texts += _parts(block, path, ignored)


def _parts(block: dict[str, Any], path: str, ignored: IgnoredFields) -> list[ContentPart]:
    """Return the texts of a block, or its picture or file; nothing if its type is unknown.

    Raises:
        InvalidRequest: the block is a document or a picture that cannot be read.
    """
    match kind := block.get("type"):
        case "text":
            return [ContentPart("text", convert(block, TextParam, path).text)]
        case "search_result":
            search_result = convert(block, SearchResultParam, path)
            texts = [
                search_result.title,
                search_result.source,
                *(part.text for part in search_result.content),
            ]
            return [ContentPart("text", text) for text in texts]
        case "image":
            return [_picture_part(convert(block, ImageParam, path).source, f"{path}.source")]
        case "document":
            return _document_parts(convert(block, DocumentParam, path), path, ignored)
        case str():
            ignored.add(path, kind)
            return []
        case _:
            raise InvalidRequest(f"'{path}.type' must be a string.", param=f"{path}.type")


def _document_parts(
    document: DocumentParam, path: str, ignored: IgnoredFields
) -> list[ContentPart]:
    """Return a document's context, and its file or text."""
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
            return [
                *parts,
                ContentPart("text", f"{document.title or 'document'}:\n{source.data.rstrip()}\n"),
            ]
        case "content":
            content = _read_content(source.content, "user", f"{path}.content", ignored)
            return [*parts, *content.texts]
        case _:
            raise InvalidRequest(
                f'\'{path}.type\' must be "base64", "text" or "content": localspec works offline, '
                "and stores no files.",
                param=f"{path}.type",
            )


def _picture_part(source: ImageSource, path: str) -> ContentPart:
    if source.type != "base64":
        raise InvalidRequest(
            f"'{path}.type' must be \"base64\": localspec works offline, and stores no files.",
            param=f"{path}.type",
        )
    decode_picture(source.data, f"{path}.data")
    return ContentPart("image_url", image_url=f"data:{source.media_type};base64,{source.data}")


def _result_content(
    result: ToolResultParam, path: str, ignored: IgnoredFields
) -> str | list[ContentPart]:
    """Return the result of a tool; a failure is part of its text, as templates have no other field."""
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
    if isinstance(content, list):
        return [ContentPart("text", "Error:"), *content]
    return content if content.lower().startswith("error") else f"Error: {content}"


# ------------------------------------------------------------------------ tools, thinking, format


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
        tool = Tool(
            Function(parameters.name, parameters.description or "", parameters.input_schema)
        )
        # The template gets the tool without `strict`, which is no field of its format.
        tool.__dict__["own"] = msgspec.to_builtins(tool)
        tool.function.strict = parameters.strict
        for key in definition:
            if key not in known_fields:
                ignored.add(f"{path}.{key}")
        tools.append(tool)
    return tools


def _choose(body: CountTokensRequest, chat: ChatRequest) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    _refuse_hosted_choice(choice, body.offered or [], chat.tools or [])
    match choice.type:
        case "tool":
            if not choice.name:
                raise InvalidRequest("'tool_choice.name' is missing.", param="tool_choice.name")
            chat.tool_choice = ToolChoice(NamedFunction(choice.name))
        case "any":
            chat.tool_choice = "required"
        case "auto":
            chat.tool_choice = "auto"
        case "none":
            chat.tool_choice = "none"


def _refuse_hosted_choice(choice: ToolChoiceParam, offered: Tools, tools: list[Tool]) -> None:
    """Refuse a choice that demands a call, if only tools that run at Anthropic could be called."""
    names = {tool.function.name for tool in tools}
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


def _format(body: CountTokensRequest, chat: ChatRequest) -> None:
    output_format = body.output_format or (body.output_config and body.output_config.format)
    if output_format:
        chat.response_format = ResponseFormat("json_schema", JsonSchema(output_format.schema))
