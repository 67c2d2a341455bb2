"""Requests of OpenAI's Responses API.

They are checked as leniently as OpenAI intends: fields and items of newer clients are no error, and
null is read as a missing field.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.requests import MAX_LOGPROBS, MAX_TOOLS, GenerationRequest
from localspec.protocol.sampling import TokenLimit

MAX_ITEMS = 10_000

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class Part(Struct):
    """A part of an item: `input_text`, `output_text`, `reasoning_text`, `summary_text` or `refusal`."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct):
    """One item of `input`. Without a `type` it is a message.

    Of an item of unknown type no other field is read. The types of `arguments`, `input` and
    `output` are checked where they are used.
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
    output: Any = None
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
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its older name


class ResponsesRequest(GenerationRequest, kw_only=True):
    """POST /v1/responses. In addition to OpenAI's fields it has those of chats that affect the answer.

    - `store`: false stores nothing. Otherwise the response is saved like a conversation, unless
      `keep_responses` in the configuration says otherwise.
    - `background`, `conversation`, `prompt`: refused.
    - `tools`, `input`: functions and custom tools, messages, calls, their results and thoughts.
      Items of other types are left out, and `localspec.ignored` names them.
    """

    refuses: ClassVar[str] = "chat"

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
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
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
