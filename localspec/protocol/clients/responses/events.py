"""The events of a response's stream, in the published order.

First come created and in_progress. For each item follow output_item.added, the events of its
content, and output_item.done. A text has content_part.added, its deltas, its done and
content_part.done. The stream ends with completed, incomplete or failed.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from localspec.protocol.answers import PromptProgress
from localspec.protocol.clients.responses.items import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
    SummaryText,
    TokenLogprob,
)
from localspec.protocol.frames import Timings


class Event(Struct, tag_field="type", kw_only=True):
    """Base of all events."""

    sequence_number: int = 0
    # llama-server's `timings`, at the end and, with `timings_per_token`, with each token.
    timings: Timings | UnsetType = UNSET


class OfResponse(Event, kw_only=True):
    response: ResponseObject


class Created(OfResponse, tag="response.created"):
    pass


class InProgress(OfResponse, tag="response.in_progress"):
    """The response is in progress. `prompt_progress` is llama-server's."""

    prompt_progress: PromptProgress | UnsetType = UNSET


class Completed(OfResponse, tag="response.completed"):
    pass


class Incompleted(OfResponse, tag="response.incomplete"):
    """The response ended at a limit, or was cancelled."""


class Failed(OfResponse, tag="response.failed"):
    pass


class ErrorEvent(Event, tag="error", kw_only=True):
    code: str
    message: str
    param: str | None = None


class OfItem(Event, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(OfItem, tag="response.output_item.added"):
    pass


class ItemDone(OfItem, tag="response.output_item.done"):
    pass


class InItem(Event, kw_only=True):
    item_id: str
    output_index: int


class InContent(InItem, kw_only=True):
    content_index: int = 0


class OfPart(InContent, kw_only=True):
    part: OutputText | ReasoningText


class PartAdded(OfPart, tag="response.content_part.added"):
    pass


class PartDone(OfPart, tag="response.content_part.done"):
    pass


class TextDelta(InContent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(InContent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(InContent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(InContent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class InSummary(InItem, kw_only=True):
    summary_index: int = 0


class OfSummary(InSummary, kw_only=True):
    part: SummaryText


class SummaryAdded(OfSummary, tag="response.reasoning_summary_part.added"):
    pass


class SummaryPartDone(OfSummary, tag="response.reasoning_summary_part.done"):
    pass


class SummaryDelta(InSummary, tag="response.reasoning_summary_text.delta", kw_only=True):
    delta: str


class SummaryDone(InSummary, tag="response.reasoning_summary_text.done", kw_only=True):
    text: str


class ArgumentsDelta(InItem, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(InItem, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str


class InputDelta(InItem, tag="response.custom_tool_call_input.delta", kw_only=True):
    delta: str


class InputDone(InItem, tag="response.custom_tool_call_input.done", kw_only=True):
    input: str


AnyEvent = (
    Created
    | InProgress
    | Completed
    | Incompleted
    | Failed
    | ErrorEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
)
