"""Translate a Responses request, with its tools and items, into a chat, and create its response."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from localspec.chat.tools import custom_arguments, custom_parameters, describe_grammar
from localspec.daemon.completion.files import read_file, read_picture
from localspec.daemon.completion.request import translate_request
from localspec.errors import InvalidRequest
from localspec.extras.responses.client_tools import (
    ClientTool,
    describe_shell_output,
    find_call,
    find_client_tool,
)
from localspec.extras.responses.wire import (
    InputItem,
    Part,
    ReasoningOptions,
    ResponseExtra,
    ResponseObject,
    ResponsesRequest,
)
from localspec.protocol.requests import (
    MAX_TOOLS,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Function,
    JsonSchema,
    NamedFunction,
    ReasoningEffort,
    ResponseFormat,
    Tool,
    ToolChoice,
)

_ADDING = ("additional_tools", "tool_search_output")  # types of items that add tools
MAX_OFFERED_TOOLS = 4 * MAX_TOOLS
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_LOGPROBS_INCLUDE = "message.output_text.logprobs"
_OPAQUE_PREFIX = "localspec."  # of reasoning that clients store and send back unread
_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_RESULT_TYPES = {
    f"{kind}_output"
    for kind in (
        *("function_call", "custom_tool_call", "shell_call"),
        *("local_shell_call", "apply_patch_call", "computer_call"),
    )
}
# Fields that would change the answer, and what to use instead.
_REFUSED = {
    "conversation": "use 'previous_response_id' to go on from a response",
    "prompt": "there are no stored prompts here; send 'instructions' and 'input'",
}

Resolve = Callable[[str], ChatMessage]


@dataclass(frozen=True, slots=True)
class ToolKind:
    """A tool that a function stands for; `client_tool` is set for one that OpenAI has defined."""

    name: str  # the client's name of the tool
    custom: bool = False
    namespace: str = ""
    client_tool: ClientTool | None = None


@dataclass(slots=True)
class ToolSet:
    """The tools that the model is offered, all of them as functions.

    A custom tool becomes a function with one text, and one that the client runs a function with OpenAI's
    schema. Tools that OpenAI's own servers run (web search, stored files) are left out.

    `kinds` maps the model's name of each tool to what it stands for, and `ignored` has a sentence for each
    tool that was left out.
    """

    offered: list[Tool] = field(default_factory=list)
    kinds: dict[str, ToolKind] = field(default_factory=dict)
    choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    ignored: list[str] = field(default_factory=list)

    def kind(self, name: str) -> ToolKind:
        """Return what the model's name of a tool stands for."""
        return self.kinds.get(name) or ToolKind(name)

    def name_of(self, name: str, namespace: str = "") -> str:
        """Return the model's name of a client's tool."""
        names = (
            model_name
            for model_name, kind in self.kinds.items()
            if (kind.name, kind.namespace) == (name, namespace)
        )
        return next(names, name)


def translate_tools(
    tools: list[dict[str, Any]],
    choice: str | dict[str, Any] | None,
    items: Sequence[InputItem] = (),
) -> ToolSet:
    """Translate `tools` and `tool_choice` of a request, and the tools that `items` of its input add.

    A prompt has all tools at its beginning, so added ones are offered from there on.

    Raises:
        InvalidRequest: a tool has no name or an invalid schema, or the choice is invalid.
    """
    result = ToolSet()
    for index, tool in enumerate(tools):
        _add_tool(result, tool, f"tools[{index}]")
    for index, item in enumerate(items):
        for nested_index, tool in enumerate((item.type in _ADDING and item.tools) or []):
            if new_tool := _leave_out_known(result, tool):
                _add_tool(result, new_tool, f"input[{index}].tools[{nested_index}]")
    if len(result.offered) > MAX_OFFERED_TOOLS:
        raise InvalidRequest(
            f"'tools' and 'input' offer more than {MAX_OFFERED_TOOLS} tools.", param="tools"
        )
    if choice not in (None, "auto"):
        _choose(result, choice)
    return result


def _add_tool(result: ToolSet, tool: dict[str, Any], path: str) -> None:
    match tool.get("type"):
        case "namespace":
            name, nested_tools = tool.get("name"), tool.get("tools")
            if not (isinstance(name, str) and isinstance(nested_tools, list)):
                raise InvalidRequest.at(path, "needs a 'name' and 'tools'.")
            for index, nested in enumerate(nested_tools):
                nested_path = f"{path}.tools[{index}]"
                if isinstance(nested, dict) and nested.get("type") in ("function", "custom"):
                    _add_function(result, nested, nested_path, name)
                else:
                    result.ignored.append(f"'{nested_path}' is no function and cannot run here.")
        case "function" | "custom":
            _add_function(result, tool, path)
        case kind if client_tool := find_client_tool(tool):
            function = Function(str(kind), client_tool.description, client_tool.parameters)
            _offer(result, ToolKind(str(kind), client_tool=client_tool), function)
        case other:
            result.ignored.append(f"'{path}': a tool of type {_to_json(other)} cannot run here.")


def _leave_out_known(result: ToolSet, tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return a tool, or a namespace of tools, without what is offered already; None if nothing is left.

    Agents send all of their items again, and may load the same tool twice.
    """
    known = [(kind.name, kind.namespace) for kind in result.kinds.values()]
    nested = tool.get("tools")
    if tool.get("type") == "namespace" and isinstance(nested, list):
        left = [
            inner
            for inner in nested
            if not isinstance(inner, dict) or (inner.get("name"), tool.get("name")) not in known
        ]
        return {**tool, "tools": left} if left else None
    return None if (tool.get("name") or tool.get("type"), "") in known else tool


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()[:80]


def _add_function(result: ToolSet, tool: dict[str, Any], path: str, namespace: str = "") -> None:
    name, parameters, form = tool.get("name"), tool.get("parameters"), tool.get("format")
    if not isinstance(name, str):
        raise InvalidRequest.at(f"{path}.name", "must be a string.")
    # A tool outside of the namespace may have the same name.
    model_name = f"{namespace}.{name}" if namespace and name in result.kinds else name
    description = tool.get("description")
    text = description if isinstance(description, str) else ""
    if is_custom := tool["type"] == "custom":
        parameters = custom_parameters()
        if isinstance(form, dict) and form.get("type") == "grammar":
            text += describe_grammar(form.get("syntax"), form.get("definition"))
            result.ignored.append(
                f"'{path}.format': the model is told the grammar, and not held to it."
            )
    elif not isinstance(parameters, dict | None):
        raise InvalidRequest.at(f"{path}.parameters", "must be an object.")
    function = Function(model_name, text, parameters, tool.get("strict"))
    _offer(result, ToolKind(name, is_custom, namespace), function)


def _offer(result: ToolSet, kind: ToolKind, function: Function) -> None:
    result.kinds[function.name] = kind
    offered = Tool(function)
    # Models were trained with the keys in this order.
    shown = {"name": function.name, "description": function.description or None}
    shown_function = {**shown, "parameters": function.parameters}
    offered.__dict__["own"] = {"type": "function", "function": shown_function}
    result.offered.append(offered)


def _choose(result: ToolSet, choice: str | dict[str, Any] | None) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    kind = "computer" if kind == "computer_use" else kind
    if choice in ("none", "required"):
        result.choice = choice  # type: ignore[assignment] # one of these two
    elif isinstance(choice, dict) and kind in ("function", "custom"):
        if not isinstance(name := choice.get("name"), str):
            raise InvalidRequest.at("tool_choice.name", "must be a string.")
        result.choice = ToolChoice(NamedFunction(result.name_of(name)))
    elif isinstance(choice, dict) and kind == "allowed_tools":
        _allow_only(result, choice)
    elif isinstance(kind, str) and kind in result.kinds and result.kind(kind).client_tool:
        result.choice = ToolChoice(NamedFunction(kind))
    elif isinstance(kind, str) and result.offered:
        result.ignored.append(f"'tool_choice': a tool of type {_to_json(kind)} is not here.")
    elif isinstance(kind, str):
        result.choice = "required"
    else:
        raise InvalidRequest.at(
            "tool_choice", "must be 'none', 'auto', 'required', or an object with a 'type'."
        )
    if result.choice not in ("none", "auto") and not result.offered:
        reasons = "".join(f" {sentence}" for sentence in result.ignored[:1])
        raise InvalidRequest.at(
            "tool_choice", f"demands a call, and there is no tool that could be called.{reasons}"
        )


def _allow_only(result: ToolSet, choice: dict[str, Any]) -> None:
    """Offer only the tools that the choice lists."""
    tools, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(tools, list):
        raise InvalidRequest.at("tool_choice.tools", "must be a list.")
    names = {
        str(entry.get("name") or entry.get("type")) for entry in tools if isinstance(entry, dict)
    }
    result.offered = [
        tool for tool in result.offered if result.kinds[tool.function.name].name in names
    ]
    if mode not in ("auto", "required"):
        raise InvalidRequest.at("tool_choice.mode", "must be 'auto' or 'required'.")
    result.choice = mode


def encode_reasoning(thoughts: str) -> str:
    """Encode reasoning for clients that must not store it in readable form."""
    return _OPAQUE_PREFIX + base64.b64encode(thoughts.encode()).decode()


def decode_reasoning(text: str | None) -> str:
    """Decode reasoning that `encode_reasoning` encoded; "" if another server made it."""
    if not text or not text.startswith(_OPAQUE_PREFIX):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_OPAQUE_PREFIX), validate=True).decode()
    except ValueError:
        return ""


@dataclass(slots=True)
class MessageBuilder:
    """The messages so far, and sentences about items that were left out.

    A template expects a model's turn as one message, so consecutive reasoning, text and calls are joined.
    `resolve` returns the stored message that an item reference means.
    """

    tools: ToolSet
    resolve: Resolve
    messages: list[ChatMessage] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    _call_ids: dict[str, str] = field(default_factory=dict)  # by the id of the call's item

    def add(self, item: InputItem, path: str) -> None:
        """Add the message of an item. Raises InvalidRequest if it lacks a required field, or is not text."""
        match item.type or "message":
            case "message":
                self._add_message(item, path)
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else []
                text = _text(parts, f"{path}.content") or decode_reasoning(item.encrypted_content)
                if text := text or _text(item.summary or [], f"{path}.summary"):
                    turn = self._silent_turn()
                    turn.reasoning_content = "\n".join(filter(None, [turn.reasoning_content, text]))
            case "function_call" | "custom_tool_call":
                call_id = _require(item.call_id, f"{path}.call_id")
                name = _require(item.name, f"{path}.name")
                if item.type == "custom_tool_call":
                    arguments = custom_arguments(item.input)
                elif isinstance(item.arguments, str):
                    arguments = item.arguments
                else:
                    arguments = msgspec.json.encode(item.arguments or {}).decode()
                self._add_call(call_id, self.tools.name_of(name, item.namespace or ""), arguments)
            case kind if kind in _RESULT_TYPES:
                self._add_result(item, path)
            case "tool_search_output" if item.call_id:
                names = [str(tool.get("name") or tool.get("type")) for tool in item.tools or []]
                text = f"Loaded: {', '.join(names)}" if names else "No tool was found."
                self.messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
            case "additional_tools" | "tool_search_output":
                pass  # their tools are offered
            case "tool_search_call" if not item.call_id:
                pass  # OpenAI has run it
            case "item_reference":
                self._add_referenced(_require(item.id, f"{path}.id"))
            case _ if call := find_call(item):
                self._add_client_call(item, path, *call)
            case other:
                self.ignored.append(f"'{path}': an item of type '{other[:80]}' is not read here.")

    def _add_client_call(self, item: InputItem, path: str, kind: str, tool: ClientTool) -> None:
        call_id = _require(item.call_id, f"{path}.call_id")
        try:
            arguments = tool.read_arguments(item)
        except (TypeError, ValueError):
            raise InvalidRequest.at(f"{path}.{tool.member}", "must be an object.") from None
        if item.id:
            self._call_ids[item.id] = call_id
        self._add_call(call_id, kind, msgspec.json.encode(arguments).decode())

    def _add_result(self, item: InputItem, path: str) -> None:
        """Add the result of a call. One of a local shell has the call's id, or its item's, as `id`."""
        call_id, output = item.call_id, item.output
        if not call_id and item.type == "local_shell_call_output" and item.id:
            call_id = self._call_ids.get(item.id, item.id)
        call_id = _require(call_id, f"{path}.call_id")
        if item.type == "shell_call_output" and isinstance(output, list):
            output = describe_shell_output(output)
        elif item.type == "apply_patch_call_output":
            output = output or item.status or ""
        elif isinstance(output, dict) and output.get("type") == "computer_screenshot":
            output = [{**output, "type": "input_image"}]
        content: str | list[ContentPart]
        try:  # Clients send text, parts of text and pictures, or any other JSON.
            parts = msgspec.convert(output, str | list[Part])
        except msgspec.ValidationError:
            content = msgspec.json.encode(output).decode()
        else:
            content = _content(parts, f"{path}.output")
        self.messages.append(ChatMessage("tool", content, tool_call_id=call_id))

    def _add_message(self, item: InputItem, path: str) -> None:
        role, content, path = _require(item.role, f"{path}.role"), item.content, f"{path}.content"
        if isinstance(content, dict):
            raise InvalidRequest.at(path, "must be a string or a list of parts.")
        if role == "assistant":
            self._silent_turn().content = _text(content or "", path)
        else:
            role = "developer" if role == "system" else role
            self.messages.append(ChatMessage(role, _content(content or "", path)))

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        turn = self._last_turn() or self._new_turn()
        function = {"name": name, "arguments": arguments}
        tool_call = {"id": call_id, "type": "function", "function": function}
        turn.tool_calls = [*(turn.tool_calls or []), tool_call]

    def _add_referenced(self, reference: str) -> None:
        """Add the stored message, or the part of an answer, that the id means."""
        stored = self.resolve(reference)
        if stored.role != "assistant":
            self.messages.append(stored)
        elif stored.tool_calls:
            for call in stored.tool_calls:
                function = call["function"]
                self._add_call(call["id"], function["name"], function["arguments"])
        else:
            turn = self._silent_turn()
            turn.reasoning_content = turn.reasoning_content or stored.reasoning_content
            turn.content = stored.content

    def _last_turn(self) -> ChatMessage | None:
        last = self.messages[-1] if self.messages else None
        return last if last and last.role == "assistant" else None

    def _silent_turn(self) -> ChatMessage:
        """Return the model's current turn if it has neither text nor calls, else a new one."""
        last = self._last_turn()
        return self._new_turn() if last is None or last.content or last.tool_calls else last

    def _new_turn(self) -> ChatMessage:
        self.messages.append(turn := ChatMessage("assistant"))
        return turn


def _require(value: str | None, path: str) -> str:
    if not value:
        raise InvalidRequest.at(path, "is missing.")
    return value


def _content(content: str | list[Part], path: str) -> str | list[ContentPart]:
    """Return the parts as those of a chat's message if not all of them are text, else their text."""
    if isinstance(content, str) or not any(
        part.type in ("input_image", "input_file") for part in content
    ):
        return _text(content, path)
    return [_content_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _content_part(part: Part, path: str) -> ContentPart:
    if part.type == "input_file":
        file = {"filename": part.filename, "file_data": part.file_data}
        read_file(file, path)
        return ContentPart("file", file=file)
    if part.type != "input_image":
        return ContentPart("text", _part_text(part, path))
    if part.image_url is None:
        raise InvalidRequest(
            f"'{path}' must have an 'image_url': there are no stored files here.",
            param=f"{path}.image_url",
        )
    read_picture(part.image_url, f"{path}.image_url")
    return ContentPart("image_url", image_url=part.image_url)


def _text(content: str | list[Part], path: str) -> str:
    """Return the text of the parts, one line per part as in a chat. Raises InvalidRequest for others."""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: Part, path: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if text is None or part.type not in (*_TEXT_TYPES, "refusal"):
        raise InvalidRequest(
            f"'{path}' is of type '{(part.type or '')[:80]}'; text is read here, in parts of type "
            "'input_text' with a 'text', and pictures and files in a user's messages and results of calls.",
            param=f"{path}.type",
        )
    return text


def refuse_unsupported(request: ResponsesRequest) -> None:
    """Raise InvalidRequest for a field that would change the answer and is not supported."""
    if (request.n or 1) > 1:
        raise InvalidRequest.at("n", "must be 1: a response is one answer.")
    if request.background and request.store is False:
        raise background_not_stored("is false in this request")
    for name, instead in _REFUSED.items():
        if getattr(request, name):
            raise InvalidRequest.at(name, f"is not supported: {instead}.")


def background_not_stored(store: str) -> InvalidRequest:
    """Return the error of a background response that would not be stored; `store` says why."""
    return InvalidRequest.at(
        "background", f"needs 'store' to be true, which {store}: its answer is read by its id."
    )


@dataclass(frozen=True, slots=True)
class ParsedInput:
    """The content of a request's items; `messages` continue those of the responses before."""

    messages: list[ChatMessage]
    tools: ToolSet
    ignored: list[str]


def parse_input(request: ResponsesRequest, resolve: Resolve) -> ParsedInput:
    """Parse the items of the request; `resolve` returns the message that an item reference means."""
    items = [] if request.input is None else request.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    tools = translate_tools(request.tools or [], request.tool_choice, items)
    builder = MessageBuilder(tools, resolve)
    for index, item in enumerate(items):
        builder.add(item, f"input[{index}]")
    ignored = [*builder.ignored, *tools.ignored, *_ignored(request)]
    return ParsedInput(builder.messages, tools, ignored)


def _ignored(request: ResponsesRequest) -> list[str]:
    sentences = []
    if request.truncation == "auto":
        sentences.append("'truncation': nothing is dropped; an input that is too long is refused.")
    if request.text and request.text.verbosity not in (None, "medium"):
        sentences.append("'text.verbosity': this model does not know it.")
    effort = request.reasoning and request.reasoning.effort
    if effort and effort not in get_args(ReasoningEffort):
        sentences.append(f"'reasoning.effort': {effort[:80]!r} is not known here.")
    for include in request.include or []:
        if include not in (_LOGPROBS_INCLUDE, ENCRYPTED_REASONING):
            sentences.append(f"'include': {include[:80]!r} is not produced here.")
    if requested_summary(request):
        sentences.append("'reasoning.summary': the summary is the reasoning itself, uncut.")
    return sentences


def chat_request(
    request: ResponsesRequest, parsed: ParsedInput, before: Sequence[ChatMessage]
) -> ChatRequest:
    """Return the request as a chat; `before` are the messages of the responses that it continues."""
    messages = [*before, *parsed.messages]
    if not messages:
        raise InvalidRequest.at("input", "is missing.")
    if request.instructions:
        messages.insert(0, ChatMessage("system", request.instructions))
    chat = translate_request(
        ChatRequest,
        request,
        n=None,
        n_cmpl=None,
        localspec=None,
        stream_options=None,
        messages=messages,
        chat_template_kwargs=request.chat_template_kwargs,
        continue_final_message=False,
        tools=parsed.tools.offered or None,
        tool_choice=parsed.tools.choice if parsed.tools.offered else None,
        parallel_tool_calls=request.parallel_tool_calls,
    )
    if request.max_output_tokens is not None:
        chat.max_tokens, chat.max_completion_tokens = request.max_output_tokens, None
    if request.top_logprobs is not None or _LOGPROBS_INCLUDE in (request.include or []):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs
    options = request.reasoning or ReasoningOptions()
    if options.effort in get_args(ReasoningEffort):
        chat.reasoning_effort = options.effort  # type: ignore[assignment] # checked just above
    if options.max_tokens is not None:
        chat.reasoning_budget_tokens = options.max_tokens
    if options.enabled is not None and chat.reasoning_budget_tokens is None:
        chat.reasoning_budget_tokens = None if options.effort else -1
    if options.enabled is False:
        chat.reasoning_budget_tokens = 0
    if form := request.text and request.text.format:
        if form.type == "json_schema" and form.schema is None:
            raise InvalidRequest.at("text.format.schema", "is missing.")
        chat.response_format = ResponseFormat(form.type)
        if form.type == "json_schema":
            schema = JsonSchema(form.schema or {}, form.name, form.strict)
            chat.response_format.json_schema = schema
    return chat


def requested_summary(request: ResponsesRequest) -> str | None:
    """Return the kind of summary that the request asks for; None if it asks for none."""
    options = request.reasoning or ReasoningOptions()
    summary = options.summary or options.generate_summary
    return None if summary == "none" else summary


def new_response(
    request: ResponsesRequest, key: str, model: str, ignored: list[str]
) -> ResponseObject:
    """Return the response before anything of it is written; it repeats fields of the request."""
    text = msgspec.to_builtins(request.text) if request.text else {}
    form = (text.get("format") or {"type": "text"}).items()
    repeated = (
        *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
        *("prompt_cache_key", "safety_identifier", "temperature", "top_p", "user"),
    )
    return ResponseObject(
        id=f"resp_{key}",
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": requested_summary(request),
        },
        store=request.store is not False,
        text={
            "format": {name: value for name, value in form if value is not None},
            "verbosity": text.get("verbosity") or "medium",
        },
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        truncation=request.truncation or "disabled",
        metadata=request.metadata or {},
        localspec=ResponseExtra(ignored=ignored),
        **{name: getattr(request, name) for name in repeated},
    )
