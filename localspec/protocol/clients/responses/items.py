"""A response, the items it consists of, and the items that are listed of its input."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from localspec.protocol.answers import TopLogprob, Unheeded
from localspec.protocol.frames import Speculation, Timings

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


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


OutputItem = Message | Reasoning | FunctionCall | CustomCall
AnyItem = Message | Reasoning | FunctionCall | CustomCall | FunctionOutput


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
    limit: Literal["tokens", "context"] | UnsetType = UNSET


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
