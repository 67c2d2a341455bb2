"""HTTP bodies: what clients may send, checked strictly, and what they get back.

Requests take OpenAI's names and llama-server's. A field of the wrong type or out of range is
refused with its name and its limit; fields nobody here knows are ignored, as everywhere.
Responses have OpenAI's shapes, plus llama-server's `timings` and ours under one key, `localspec`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from localspec.protocol.frames import Speculation, Timings

MAX_CHOICES = 4
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 16
_INT32 = (1 << 31) - 1

Count = Annotated[int, Meta(ge=0, le=_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LookBack = Annotated[int, Meta(ge=-1, le=_INT32)]


# ---------------------------------------------------------------------------- requests


class StreamOptions(Struct):
    include_usage: bool = False


class JsonSchema(Struct):
    """OpenAI's wrapper around a schema; `name` and `strict` change nothing here."""

    schema: dict[str, Any] = {}
    name: str = ""


class ResponseFormat(Struct):
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


class Prediction(Struct):
    """Text the caller expects in the answer; drafted from by lookup."""

    content: str | list[ContentPart]
    type: Literal["content"] = "content"


class SpeculativeOptions(Struct):
    """Ours: `depth` is a number of drafted tokens or "auto"."""

    enabled: bool = True
    depth: Annotated[int, Meta(ge=0, le=64)] | Literal["auto"] = "auto"
    kind: Literal["auto", "draft", "ngram"] = "auto"
    verification: Literal["auto", "match", "rejection"] = "auto"


class GenerationRequest(Struct):
    """What chat and text completions share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n_predict: LookBack | None = None  # llama-server's; -1: as many as fit
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: LookBack | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_last_n: LookBack | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: LookBack | None = None
    dry_sequence_breakers: Annotated[list[str], Meta(max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, Bias] | None = None
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None
    prediction: Prediction | None = None
    speculative: SpeculativeOptions | None = None
    exact: bool | None = None
    cache_prompt: bool = True
    reveal_draft: bool = False


class ChatRequest(GenerationRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = {}


class CompletionRequest(GenerationRequest, kw_only=True):
    """`prompt`: a text, token ids, or several of either."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeRequest(Struct):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Struct):
    tokens: list[Annotated[int, Meta(ge=0, le=_INT32)]]


class TemplateRequest(Struct):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    chat_template_kwargs: dict[str, Any] = {}


class BadBody(ValueError):
    """A request body that is not what was declared. `param` is the field, when one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


Body = TypeVar("Body", bound=Struct)
_decoders: dict[type[Struct], msgspec.json.Decoder[Any]] = {}


def decode(body: bytes, kind: type[Body]) -> Body:
    """The request in `body`.

    Raises:
        BadBody: one sentence that names the field and what it may be.
    """
    decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        request: Body = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refused(str(error), kind) from None
    except RecursionError:
        raise BadBody("The request body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, error) from None
    if rb"\u0000" in body:  # rare: only then is it worth reading twice
        for path, value in _leaves(json.loads(body)):
            if isinstance(value, str) and "\0" in value:
                raise BadBody(f"'{path}' contains a NUL character, which no text has.", path)
    return request


_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_LENGTH = re.compile(r"Expected `(\w+)` of length (<=|>=) (\d+)$")
_LIMIT = re.compile(r"Expected `[^`]+` (<=|>=|<|>) (\S+)$")
_TYPE = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`)?$")
_ENUM = re.compile(r"Invalid enum value (.+)$", re.DOTALL)
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
_WANTED = {
    "float": "a number",
    "int": "a whole number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_FOUND = {**_WANTED, "float": "a number with a fraction", "null": "null"}


def _refused(message: str, kind: type[Struct]) -> BadBody:
    """msgspec says "Expected `float` <= 2.0 - at `$.temperature`"; people read the name first."""
    found = _AT.match(message)
    assert found is not None
    what, path = found["what"], found["path"] or ""
    if missing := _MISSING.match(what):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadBody(f"'{path}' is missing.", path)
    subject = f"'{path}'" if path else "The request body"
    return BadBody(f"{subject} {_sentence(what, kind, path)}.", path or None)


def _sentence(what: str, kind: type[Struct], path: str) -> str:
    """What follows "'temperature' …"."""
    if found := _LIMIT.match(what):
        return f"must be {_BOUNDS[found[1]]} {found[2].removesuffix('.0')}"
    if what.lower().endswith("out of range"):  # 1e999: infinite, or an integer beyond 64 bits
        return "must be a finite number"
    if found := _LENGTH.match(what):
        unit = "character" if found[1] == "str" else "item"
        plural = "" if found[3] == "1" else "s"
        return f"must have {_BOUNDS[found[2]]} {found[3]} {unit}{plural}"
    if found := _TYPE.match(what):
        wanted = [name for name in found[1].split(" | ") if name != "null"]
        but = f", not {_named([found[2]], _FOUND)}" if found[2] else ""
        return f"must be {_named(wanted, _WANTED)}{but}"
    if found := _ENUM.match(what):
        choices = " or ".join(_choices(kind, path))
        return f"must be {choices}, not {found[1]}" if choices else f"may not be {found[1]}"
    return f"is refused: {what[:1].lower()}{what[1:]}"


def _named(kinds: list[str], names: dict[str, str]) -> str:
    return " or ".join(names.get(kind, kind) for kind in kinds)


def _choices(kind: type[Struct], path: str) -> list[str]:
    """What the Literal at `path` allows, from the declaration."""
    types: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(kind)]
    for name in re.findall(r"\w+|\[", path):
        types = [deeper for each in types for deeper in _inside(each, name)]
    return [
        f"'{value}'"
        for each in types
        if isinstance(each, msgspec.inspect.LiteralType)
        for value in each.values
    ]


def _inside(each: msgspec.inspect.Type, name: str) -> list[msgspec.inspect.Type]:
    """The members of field `name`, or of an item when `name` is "["; unions taken apart."""
    found: msgspec.inspect.Type | None = None
    if isinstance(each, msgspec.inspect.ListType) and name == "[":
        found = each.item_type
    elif isinstance(each, msgspec.inspect.StructType):
        found = next((field.type for field in each.fields if field.encode_name == name), None)
    if isinstance(found, msgspec.inspect.Metadata):
        found = found.type
    if isinstance(found, msgspec.inspect.UnionType):
        return list(found.types)
    return [found] if found else []


def _malformed(body: bytes, error: Exception) -> BadBody:
    """Why `body` is no JSON. Python's reader takes NaN and lone surrogates, so it finds them."""
    try:
        value = json.loads(body)
    except RecursionError:
        return BadBody("The request body is nested too deeply.")
    except UnicodeDecodeError:
        return BadBody("The request body is not valid UTF-8.")
    except ValueError as plain:
        return BadBody(f"The request body is not valid JSON: {plain}.")
    for path, leaf in _leaves(value):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return BadBody(f"'{path}' must be a finite number, not {leaf}.", path)
        if isinstance(leaf, str) and any("\ud800" <= char <= "\udfff" for char in leaf):
            return BadBody(f"'{path}' contains half a surrogate pair, which is no character.", path)
    return BadBody(f"The request body is not valid JSON: {error}.")


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key and scalar in `value` with its path, without recursion."""
    rest = [(path, value)]
    while rest:
        path, value = rest.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                here = f"{path}.{key}" if path else key
                yield here.encode("utf-8", "replace").decode(), key
                rest.append((here, item))
        elif isinstance(value, list):
            rest.extend((f"{path}[{index}]", item) for index, item in enumerate(value))
        else:
            yield path.encode("utf-8", "replace").decode(), value


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


class ChatAnswer(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatAnswer
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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
    """Ours. `drafted`: (start, end) character spans of this chunk that came from the draft."""

    speculation: Speculation | UnsetType = UNSET
    note: str | UnsetType = UNSET
    drafted: list[tuple[int, int]] | UnsetType = UNSET


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
    message: str
    type: str
    param: str | None
    code: str


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


class Status(Struct):
    """/localspec/status. Times in seconds. `pulls` run; `problems`: files edited and not readable."""

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
