"""HTTP bodies: what clients may send, checked strictly, and what they get back.

Requests take OpenAI's names and llama-server's. A field of the wrong type or out of range is
refused with its name and its limit; fields nobody here knows are ignored, as everywhere, and null is
read as a field that is not there.
Responses have OpenAI's shapes, plus llama-server's `timings` and ours under one key, `localspec`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from localspec.protocol import reading
from localspec.protocol.frames import Speculation, Timings
from localspec.protocol.reading import BadBody as BadBody
from localspec.protocol.reading import Body, OrDefault, Request
from localspec.protocol.sampling import INT32, Bias, Sampled, TokenLimit
from localspec.protocol.weight import Weight

MAX_CHOICES = 4
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 16
MAX_TOOLS = 128


# ---------------------------------------------------------------------------- requests


class StreamOptions(Request):
    include_usage: OrDefault[bool] = False


class JsonSchema(Request):
    """OpenAI's wrapper around a schema; `name` and `strict` change nothing here."""

    schema: OrDefault[dict[str, Any]] = field(default_factory=dict)
    name: OrDefault[str] = ""


class ResponseFormat(Request):
    """OpenAI's `json_schema` wrapper, or llama-server's `schema` directly."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None


class ChatMessage(Struct):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Request, omit_defaults=True):
    """A tool's function; `parameters` is a JSON Schema."""

    name: str
    description: OrDefault[str] = ""
    parameters: dict[str, Any] | None = None


class Tool(Request, dict=True):
    function: Function
    type: OrDefault[Literal["function"]] = "function"

    def shown(self) -> dict[str, Any]:
        """The caller's own object, which is what a template writes: its keys in their order, and those
        that nobody here knows. Null is what leaving out is, in a function's parameters excepted."""
        own = self.__dict__.get("own") or msgspec.to_builtins(self)
        function = {key: value for key, value in own["function"].items() if value is not None}
        found = {key: value for key, value in own.items() if value is not None}
        added = {} if "type" in found else {"type": self.type}
        return {**added, **found, "function": function}


class NamedFunction(Struct):
    name: str


class ToolChoice(Request):
    """The one tool that must be called."""

    function: NamedFunction
    type: OrDefault[Literal["function"]] = "function"


class Prediction(Request):
    """Text the caller expects in the answer; drafted from by lookup. What is longer than the context
    is cut to it, since no answer can be longer.
    """

    content: str | list[ContentPart]
    type: OrDefault[Literal["content"]] = "content"


class SpeculativeOptions(Request):
    """Ours: `depth` is a number of drafted tokens or "auto"."""

    enabled: OrDefault[bool] = True
    depth: OrDefault[Annotated[int, Meta(ge=0, le=64)] | Literal["auto"]] = "auto"
    kind: OrDefault[Literal["auto", "draft", "ngram"]] = "auto"
    verification: OrDefault[Literal["auto", "match", "rejection"]] = "auto"


class LocalspecOptions(Request):
    """Ours. `conversation`: "new", "last" or an id: question and answer are kept there."""

    conversation: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


class GenerationRequest(Sampled, Request):
    """What chat and text completions share."""

    model: OrDefault[str] = ""
    stream: OrDefault[bool] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n_predict: TokenLimit | None = None  # llama-server's
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, Bias] | None = None
    ignore_eos: OrDefault[bool] = False
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None
    prediction: Prediction | None = None
    speculative: SpeculativeOptions | None = None
    exact: bool | None = None
    cache_prompt: OrDefault[bool] = True
    reveal_draft: OrDefault[bool] = False


class ChatRequest(GenerationRequest, kw_only=True):
    """`continue_final_message`: the answer goes on with the last message, which is the assistant's;
    true, unless said otherwise, where it is. "reasoning_content" goes on with its thoughts."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    chat_template_kwargs: OrDefault[dict[str, Any]] = field(default_factory=dict)
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: OrDefault[Literal["none", "auto", "deepseek"]] = "auto"
    localspec: LocalspecOptions | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`prompt`: a text, token ids, or several of either. `echo` may be false only, as in llama-server,
    and `best_of` no more than `n`: other values are refused."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    suffix: str | None = None
    echo: OrDefault[bool] = False
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class LoadRequest(Request):
    """`model` is a pair's name; empty for the configured one."""

    model: OrDefault[str] = ""


class TokenizeRequest(Request):
    content: str
    add_special: OrDefault[bool] = False
    parse_special: OrDefault[bool] = True
    with_pieces: OrDefault[bool] = False


class DetokenizeRequest(Request):
    tokens: list[Annotated[int, Meta(ge=0, le=INT32)]]


class TemplateRequest(Request):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    chat_template_kwargs: OrDefault[dict[str, Any]] = field(default_factory=dict)


class _Tools(Struct):
    tools: list[dict[str, Any]]


_tools = msgspec.json.Decoder(_Tools)


def decode(body: bytes | bytearray, kind: type[Body], weight: Weight | None = None) -> Body:
    """As `reading.decode`; the tools of a chat know their caller's own objects."""
    request = reading.decode(body, kind, weight)
    offered: list[Tool] | None = getattr(request, "tools", None)
    if offered:
        try:
            own = _tools.decode(body).tools
        except RecursionError:
            raise BadBody("The request body is nested too deeply.") from None
        for tool, each in zip(offered, own, strict=True):
            tool.__dict__["own"] = each
    return request


# ---------------------------------------------------------------------------- responses


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CalledFunction(Struct):
    """`arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class CalledDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    index: int
    function: CalledDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatAnswer(Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatAnswer
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class TextChoice(Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None


class Extra(Struct):
    """Ours. `drafted`: (start, end) character spans of this chunk that came from the draft.

    `news`: what happened to the pair's files, said with one answer and not again.
    """

    speculation: Speculation | UnsetType = UNSET
    note: str | UnsetType = UNSET
    news: str | UnsetType = UNSET
    drafted: list[tuple[int, int]] | UnsetType = UNSET
    conversation: str | UnsetType = UNSET


Choices = list[ChatChoice] | list[ChunkChoice] | list[TextChoice]


class Completion(Struct):
    """chat.completion, chat.completion.chunk and text_completion, by `object`."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Choices
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    localspec: Extra | UnsetType = UNSET


class ErrorDetail(Struct):
    """`n_prompt_tokens` and `n_ctx`: of a prompt that is too long, as llama-server has them."""

    message: str
    type: str
    param: str | None
    code: str
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class ErrorBody(Struct):
    error: ErrorDetail


class Model(Struct):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "localspec"


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class PairStatus(Struct):
    """`state`: unloaded, loading, ready or set_aside; `progress` 0…1 while loading."""

    name: str
    state: Literal["unloaded", "loading", "ready", "set_aside"]
    stage: str | None = None
    progress: float | None = None
    target: str | None = None
    draft: str | None = None
    n_ctx: int | None = None
    backend: str | None = None
    note: str | None = None


class Counts(Struct):
    """Since the daemon started."""

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    worker_starts: int = 0
    worker_deaths: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class Figures(Struct):
    """How answers went since the daemon started.

    `first_text_ms`: median wait for an answer's first text. `cache_hits`: prompts that began in a slot, in
    memory or on the disk. `mean_depth`: drafts per target pass. `accepted_at`: the share of each pass's
    first, second, … drafts that were accepted. `speed_up`: over plain decoding.
    """

    first_text_ms: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_hits: dict[str, int] = {}
    mean_depth: float | None = None
    accepted_at: list[float] = []
    speed_up: float | None = None


class Hashing(Struct):
    """A file that is read whole for its SHA-256, in bytes."""

    file: str
    done: int
    size: int


class Status(Struct):
    """/localspec/status. Times in seconds. `pulls` run; `problems`: files edited and not readable.
    `hashing`: what a pair that is to be loaded or added waits for.

    `listen`: the URL of the TCP listener, and `token_file` where its bearer token lies.
    """

    version: str
    api_version: int
    pid: int
    uptime: float
    pair: PairStatus
    running: int
    waiting: int
    queue_limit: int
    worker_pid: int | None
    safe_mode: bool
    draining: bool
    counts: Counts
    socket: str
    log: str
    pulls: int = 0
    problems: list[str] = []
    figures: Figures = field(default_factory=Figures)
    listen: str | None = None
    token_file: str | None = None
    hashing: Hashing | None = None
