"""A response, the items it consists of, and the items that are listed of its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct, field

from localspec.protocol.answers import ChatLogprob, LengthLimit, PromptProgress, Unheeded
from localspec.protocol.fields import Described
from localspec.protocol.frames import Speculation, Timings
from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.requests import (
    MAX_LOGPROBS,
    MAX_TOOLS,
    GenerationRequest,
    ThinkingTokens,
    TokenLimit,
)

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputTokenLogprob(ChatLogprob):
    pass


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[OutputTokenLogprob] = field(default_factory=list)


class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class Message(Struct, tag_field="type", tag="message"):
    id: str
    role: str
    content: list[OutputText | InputText]
    status: Status = "completed"


class Reasoning(Struct, tag_field="type", tag="reasoning"):
    """Thoughts, in `content` or, if a summary was requested, in `summary`.

    `encrypted_content` is included on request and lets a client send the thoughts back. It is
    opaque but not secret.
    """

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText] = field(default_factory=list)
    encrypted_content: str | None = None
    status: Status = "completed"


class FunctionCall(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status = "completed"
    namespace: str | UnsetType = UNSET


class FunctionOutput(Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str
    status: Status = "completed"


class CustomCall(Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: Status = "completed"
    namespace: str | UnsetType = UNSET


class ShellAction(Struct):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(Struct, tag_field="type", tag="shell_call"):
    id: str
    call_id: str
    action: ShellAction
    status: Status = "completed"


class LocalShellAction(Struct, tag_field="type", tag="exec"):
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCall(Struct, tag_field="type", tag="local_shell_call"):
    id: str
    call_id: str
    action: LocalShellAction
    status: Status = "completed"


class CreateFile(Struct, tag_field="type", tag="create_file"):
    path: str
    diff: str = ""


class UpdateFile(Struct, tag_field="type", tag="update_file"):
    path: str
    diff: str = ""


class DeleteFile(Struct, tag_field="type", tag="delete_file"):
    path: str


class ApplyPatchCall(Struct, tag_field="type", tag="apply_patch_call"):
    id: str
    call_id: str
    operation: CreateFile | UpdateFile | DeleteFile
    status: Literal["in_progress", "completed"] = "completed"


class ComputerCall(Struct, tag_field="type", tag="computer_call"):
    """A use of a computer, with one `action` or, for the newer tool, with `actions`."""

    id: str
    call_id: str
    action: dict[str, Any] | UnsetType = UNSET
    actions: list[dict[str, Any]] | UnsetType = UNSET
    pending_safety_checks: list[Any] = field(default_factory=list)
    status: Status = "completed"


class ToolSearchCall(Struct, tag_field="type", tag="tool_search_call"):
    """A search for tools, which the client loads and adds in its next request."""

    id: str
    call_id: str
    arguments: dict[str, Any]
    execution: Literal["client"] = "client"
    status: Literal["in_progress", "completed", "incomplete"] = "completed"


OutputItem = (
    Message
    | Reasoning
    | FunctionCall
    | CustomCall
    | ShellCall
    | LocalShellCall
    | ApplyPatchCall
    | ComputerCall
    | ToolSearchCall
)
AnyItem = OutputItem | FunctionOutput


class ItemList(Struct):
    data: list[AnyItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Incomplete(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    """An error.

    `code` is one of OpenAI's published codes, and `localspec_code` is our own, more specific one.
    """

    code: str
    message: str
    localspec_code: str | UnsetType = UNSET


class InputDetails(Struct):
    """Tokens of the prompt.

    - `cache_write_tokens`: tokens that were prefilled and that a request with the same beginning
      finds in the cache.
    """

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseExtra(Struct, omit_defaults=True):
    """Extensions of localspec in a response.

    - `ignored`: sentences about parts of the request that were not honoured. The other fields are
      as in a chat.
    """

    ignored: list[str] = field(default_factory=list)
    speculation: Speculation | UnsetType = UNSET
    note: str | UnsetType = UNSET
    news: str | UnsetType = UNSET
    conversation: str | UnsetType = UNSET
    not_kept: str | UnsetType = UNSET
    limit: LengthLimit | UnsetType = UNSET
    loop: Literal["thoughts", "text"] | UnsetType = UNSET


class ResponseObject(Struct, kw_only=True):
    """A response. Fields that the request left out are null.

    Some parameters are only repeated here; `localspec.ignored` names those without effect.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] = field(default_factory=dict)
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = field(default_factory=dict)
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    timings: Timings | UnsetType = UNSET
    localspec: ResponseExtra | UnsetType = UNSET


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
    localspec: Unheeded | UnsetType = UNSET


# The events of a response's stream, in the published order.
#
# First come created and in_progress. For each item follow output_item.added, the events of its
# content, and output_item.done. A text has content_part.added, its deltas, its done and
# content_part.done. The stream ends with completed, incomplete or failed.


class Event(Struct, tag_field="type", kw_only=True):
    """Base of all events."""

    sequence_number: int = 0
    # llama-server's `timings`, at the end and, with `timings_per_token`, with each token.
    timings: Timings | UnsetType = UNSET


class ResponseEvent(Event, kw_only=True):
    response: ResponseObject


class ItemEvent(Event, kw_only=True):
    output_index: int
    item: OutputItem


class ItemContentEvent(Event, kw_only=True):
    item_id: str
    output_index: int


class ContentEvent(ItemContentEvent, kw_only=True):
    content_index: int = 0


class PartEvent(ContentEvent, kw_only=True):
    part: OutputText | ReasoningText


class SummaryEvent(ItemContentEvent, kw_only=True):
    summary_index: int = 0


class SummaryPartEvent(SummaryEvent, kw_only=True):
    part: SummaryText


class CommandEvent(Event, kw_only=True):
    output_index: int
    command_index: int


class Queued(ResponseEvent, tag="response.queued"):
    """The response waits to be answered, in the background."""


class InProgress(ResponseEvent, tag="response.in_progress"):
    """The response is in progress. `prompt_progress` is llama-server's."""

    prompt_progress: PromptProgress | UnsetType = UNSET


class Incompleted(ResponseEvent, tag="response.incomplete"):
    """The response ended at a limit, or was cancelled."""


class ErrorEvent(Event, tag="error", kw_only=True):
    code: str
    message: str
    param: str | None = None


class OutputTextDelta(ContentEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[OutputTokenLogprob]


class TextDone(ContentEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[OutputTokenLogprob]


class ArgumentsDone(ItemContentEvent, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


EventKind = TypeVar("EventKind", bound=Event)


def _event(name: str, base: type[EventKind], tag: str, field: str = "") -> Callable[..., EventKind]:
    """Return the struct of an event that has the fields of `base`, and a text in `field`."""
    fields, tag = [(field, str)] if field else [], f"response.{tag}"
    kind = defstruct(name, fields, bases=(base,), tag=tag, kw_only=True, module=__name__)
    return cast(Callable[..., EventKind], kind)


Created = _event("Created", ResponseEvent, "created")
Completed = _event("Completed", ResponseEvent, "completed")
Failed = _event("Failed", ResponseEvent, "failed")
ItemAdded = _event("ItemAdded", ItemEvent, "output_item.added")
ItemDone = _event("ItemDone", ItemEvent, "output_item.done")
PartAdded = _event("PartAdded", PartEvent, "content_part.added")
PartDone = _event("PartDone", PartEvent, "content_part.done")
ReasoningDelta = _event("ReasoningDelta", ContentEvent, "reasoning_text.delta", "delta")
ReasoningDone = _event("ReasoningDone", ContentEvent, "reasoning_text.done", "text")
SummaryAdded = _event("SummaryAdded", SummaryPartEvent, "reasoning_summary_part.added")
SummaryPartDone = _event("SummaryPartDone", SummaryPartEvent, "reasoning_summary_part.done")
SummaryDelta = _event("SummaryDelta", SummaryEvent, "reasoning_summary_text.delta", "delta")
SummaryDone = _event("SummaryDone", SummaryEvent, "reasoning_summary_text.done", "text")
ArgumentsDelta = _event(
    "ArgumentsDelta", ItemContentEvent, "function_call_arguments.delta", "delta"
)
CustomToolInputDelta = _event(
    "CustomToolInputDelta", ItemContentEvent, "custom_tool_call_input.delta", "delta"
)
InputDone = _event("InputDone", ItemContentEvent, "custom_tool_call_input.done", "input")
CommandAdded = _event("CommandAdded", CommandEvent, "shell_call_command.added", "command")
CommandDelta = _event("CommandDelta", CommandEvent, "shell_call_command.delta", "delta")
CommandDone = _event("CommandDone", CommandEvent, "shell_call_command.done", "command")

EVENTS: tuple[Any, ...] = (
    *(Created, Queued, InProgress, Completed, Incompleted, Failed, ErrorEvent),
    *(ItemAdded, ItemDone, PartAdded, PartDone, OutputTextDelta, TextDone),
    *(ReasoningDelta, ReasoningDone, SummaryAdded, SummaryPartDone, SummaryDelta, SummaryDone),
    *(ArgumentsDelta, ArgumentsDone, CustomToolInputDelta, InputDone),
    *(CommandAdded, CommandDelta, CommandDone),
)


# Requests are checked as leniently as OpenAI intends: fields and items of newer clients are no error, and
# null is read as a missing field.


MAX_ITEMS = 10_000

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class Part(Struct):
    """A part of an item.

    Its type is `input_text`, `output_text`, `reasoning_text`, `summary_text`, `refusal`, `input_image` with a
    data URL, or `input_file` with `file_data`.
    """

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_data: str | None = None
    filename: str | None = None


_PART_TYPES = ("input_text", "input_image", "input_file")
Parts = list[Annotated[dict[str, Any], Described(lambda: dict.fromkeys(_PART_TYPES, Part))]]


class InputItem(Struct):
    """One item of `input`. Without a `type` it is a message.

    Of an item of unknown type no other field is read. The types of `arguments`, `input`, `output`,
    `action`, `actions` and `operation` are checked where they are used.
    """

    type: str | None = None
    role: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    content: str | list[Part] | dict[str, Any] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    output: Parts | Any = None
    action: Any = None
    actions: Any = None
    operation: Any = None
    status: str | None = None
    execution: str | None = None
    tools: list[AnyTool] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class TextFormat(Request):
    """The format of the answer: `text`, `json_object`, or `json_schema` with its `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: OrDefault[str] = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct):
    """How to think. `max_tokens` (a budget) and `enabled` are OpenRouter's."""

    effort: str | None = None
    max_tokens: ThinkingTokens | None = None
    enabled: bool | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its older name


class ToolFormat(Struct):
    """The format of a custom tool's input."""

    type: Any = None
    syntax: Any = None
    definition: Any = None


FormatObject = Annotated[dict[str, Any], Described(lambda: {"": ToolFormat})]


class ToolDefinition(Struct):
    """A tool that a call may name."""

    type: Any = None
    name: Any = None
    description: Any = None


AllowedTool = Annotated[dict[str, Any], Described(lambda: {"": ToolDefinition})]


class ToolChoiceParam(Struct):
    type: Any = None
    name: Any = None
    mode: Any = None
    tools: list[AllowedTool] = []


ToolChoiceObject = Annotated[dict[str, Any], Described(lambda: {"": ToolChoiceParam})]
AnyTool = Annotated[dict[str, Any], Described(lambda: _TOOLS)]


def _tool(names: str = "", **typed: Any) -> type[Struct]:
    """Return the struct of a kind of tool, which may have further fields."""
    fields = [(name, Any, None) for name in names.split()]
    fields += [(name, hint, None) for name, hint in typed.items()]
    return defstruct("KindOfTool", fields, bases=(ToolDefinition,), module=__name__)


_CLIENT_TOOLS = ("shell", "local_shell", "apply_patch", "computer", "computer_use_preview")
_TOOLS: dict[str, type[Struct]] = {
    "function": _tool("parameters strict"),
    "custom": _tool(format=FormatObject),
    "namespace": _tool(tools=list[AnyTool]),
    "tool_search": _tool("execution parameters"),
    **dict.fromkeys(_CLIENT_TOOLS, _tool("environment display_width display_height")),
}


class ResponsesRequest(GenerationRequest, kw_only=True):
    """POST /v1/responses. In addition to OpenAI's fields it has those of chats that affect the answer.

    - `store`: false stores nothing. Otherwise the response is saved like a conversation, unless
      `keep_responses` in the configuration says otherwise.
    - `background`: the answer goes on without its client, and is read by its id. It must be stored.
    - `conversation`, `prompt`: refused.
    - `tools`, `input`: functions, custom tools and those that the client runs (`shell`, `local_shell`,
      `apply_patch`, `computer`, `tool_search`); messages, calls, their results, thoughts and tools that
      are added later (`additional_tools`, `tool_search_output`). Tools and items of other types are
      left out, and `localspec.ignored` names them.
    """

    refusal_table: ClassVar[str] = "chat"

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    metadata: Metadata | None = None
    max_output_tokens: TokenLimit | None = None
    max_tool_calls: int | None = None
    tools: Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: OrDefault[dict[str, Any]] = msgspec.field(default_factory=dict)


REQUESTS = (ResponsesRequest,)  # for the description (scripts/openapi.py)
ANSWERS = (ResponseObject, ItemList, DeletedResponse, InputTokens, *EVENTS)
