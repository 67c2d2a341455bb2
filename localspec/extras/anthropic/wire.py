"""Anthropic's Messages API: requests and responses.

Content blocks and tools are accepted as raw objects, since newer clients send kinds that are
unknown here. Blocks of a known kind are checked when they are translated. Others are skipped.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType, field

from localspec.protocol.answers import LengthLimit, Unheeded
from localspec.protocol.fields import Described
from localspec.protocol.frames import Speculation
from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.requests import INT32, Count, SamplingParameters, SpeculativeOptions, Stop
from localspec.protocol.settings import LoopGuardScope

Blocks = list[Annotated[dict[str, Any], Described(lambda: _BLOCKS)]]
Tools = list[dict[str, Any]]


class MessageParam(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class BlockParam(Struct, kw_only=True):
    """What all blocks may have. `cache_control` needs no handling: every prompt is cached by its content."""

    type: str = ""
    cache_control: Any = None


class TextParam(BlockParam, kw_only=True):
    text: str


class ImageSource(Struct):
    """The source of a picture. Only `base64` has it in the request."""

    type: str
    media_type: str = ""
    data: str = ""


class ImageParam(BlockParam, kw_only=True):
    source: ImageSource


class DocumentSource(Struct):
    """The source of a document. `base64` and `text` have it in `data`, and `content` in text and pictures."""

    type: str
    media_type: str = ""
    data: str = ""
    content: str | Blocks = ""


class DocumentParam(BlockParam, kw_only=True):
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Any = None


class ThinkingParam(BlockParam, kw_only=True):
    thinking: str = ""
    signature: Any = None


class RedactedParam(BlockParam, kw_only=True):
    data: Any = None


class ToolUseParam(BlockParam, kw_only=True):
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultParam(BlockParam, kw_only=True):
    tool_use_id: str
    content: str | Blocks | None = None
    is_error: bool | None = None


class SearchResultParam(BlockParam, kw_only=True):
    source: str
    title: str
    content: list[TextParam]


_BLOCKS: dict[str, type[Struct]] = {
    "text": TextParam,
    "image": ImageParam,
    "document": DocumentParam,
    "thinking": ThinkingParam,
    "redacted_thinking": RedactedParam,
    "tool_use": ToolUseParam,
    "tool_result": ToolResultParam,
    "search_result": SearchResultParam,
}


class ToolParam(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: Any = None


class ToolChoiceParam(Request):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: OrDefault[bool] = False


class ThinkingConfig(Request):
    """Whether and how to think.

    - `type`: "enabled" with a budget, "disabled", or the model's own way ("adaptive" and newer
      values).
    - `display`: "omitted" leaves the thoughts' text out of the answer.
    """

    type: str
    budget_tokens: Count | None = None
    display: str | None = None


class OutputFormat(Struct):
    """The format of an answer. `type` is "json_schema"."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CreateThread(Struct, tag_field="type", tag="create"):
    """Store the conversation, so that a later request can continue it by the answer's id."""


class ContinueThread(Struct, tag_field="type", tag="continue"):
    """Continue a stored conversation after the answer `previous_message_id`.

    `messages` holds the new messages only. The system prompt and the tools are those of the request
    that created the thread; repeating them is allowed, changing them is not.
    """

    previous_message_id: str


class CountTokensRequest(SamplingParameters, Request, kw_only=True):
    """A request to count the tokens of `messages` and of everything that is read with them.

    Tools of the types `bash_…`, `text_editor_…`, `memory_…` and `computer_…` are offered with the
    schema that Anthropic has published. Those that Anthropic runs are skipped, like content blocks of
    unknown kinds. The answer names them in `localspec.ignored`.
    A request that generates text has all our sampling parameters, not only Anthropic's.
    """

    refusal_table: ClassVar[str] = "chat"

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=10_000)]
    model: OrDefault[str] = ""
    system: str | Blocks | None = None
    offered: Tools | None = field(default=None, name="tools")
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: OrDefault[dict[str, Any]] = field(default_factory=dict)
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    thread: CreateThread | ContinueThread | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=0, le=INT32)]
    stream: OrDefault[bool] = False
    stop_sequences: Annotated[list[Stop], Meta(max_length=64)] | None = None
    metadata: dict[str, Any] | None = None
    exact: bool | None = None
    loop_guard: LoopGuardScope | None = None
    speculative: SpeculativeOptions | None = None


class TextBlock(Struct, tag="text"):
    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """Thoughts. `signature` proves nothing, but clients send thoughts back only if there is one."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesUsage(Struct):
    """Numbers of tokens.

    - `input_tokens`: tokens of the prompt that had to be prefilled.
    - `cache_read_input_tokens`: the other tokens of the prompt.
    """

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class MessagesExtra(Struct):
    """Extensions of localspec in an answer.

    - `ignored`: fields of the request without effect.
    - `not_kept`: why the answer could not be stored in its thread. The other fields are as in a
      chat.
    """

    ignored: list[str] | UnsetType = UNSET
    speculation: Speculation | UnsetType = UNSET
    note: str | UnsetType = UNSET
    news: str | UnsetType = UNSET
    not_kept: str | UnsetType = UNSET
    limit: LengthLimit | UnsetType = UNSET
    loop: Literal["thoughts", "text"] | UnsetType = UNSET


class MessagesAnswer(Struct):
    id: str
    content: list[Block]
    model: str
    usage: MessagesUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    localspec: MessagesExtra | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: int
    localspec: Unheeded | UnsetType = UNSET


class MessagesErrorDetail(Struct):
    """An error. `code` and `param` are OpenAI's, because Anthropic has nothing of the kind.

    `details` has an `error_code` if Anthropic's clients act on it, as for errors about threads.
    """

    type: str
    message: str
    code: str
    param: str | None
    details: dict[str, Any] | UnsetType = UNSET


class MessagesError(Struct):
    error: MessagesErrorDetail
    request_id: str
    type: Literal["error"] = "error"


class TextBlockDelta(Struct, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    """More JSON of a tool's input, as the model writes it."""

    partial_json: str


Delta = TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(Struct, tag="message_start"):
    message: MessagesAnswer


class BlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(Struct, tag="content_block_stop"):
    index: int


class Stopped(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    """The end of an answer. `usage` counts the whole answer."""

    delta: Stopped
    usage: MessagesUsage
    localspec: MessagesExtra | UnsetType = UNSET


class MessageStop(Struct, tag="message_stop"):
    pass


class Ping(Struct, tag="ping"):
    pass


MessagesEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
)


class MessagesModel(Struct):
    """A pair in Anthropic's list of models. `display_name` is its name, since there is no other.

    `max_input_tokens` is the context, which limits an answer (`max_tokens`) as well. Both are null where
    it is unknown.
    """

    id: str
    display_name: str
    created_at: str  # RFC 3339
    max_input_tokens: int | None = None
    max_tokens: int | None = None
    lifecycle: Literal["active"] = "active"
    deprecated_at: None = None
    retires_at: None = None
    type: Literal["model"] = "model"


class MessagesModelPage(Struct):
    """A page of models, which has all of them if no `limit` was sent."""

    data: list[MessagesModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


REQUESTS = (MessagesRequest, CountTokensRequest)  # for the description (scripts/openapi.py)
ANSWERS = (MessagesAnswer, *get_args(MessagesEvent), TokenCount, MessagesModelPage, MessagesError)
