"""Ollama's requests and answers: https://docs.ollama.com/api. Times in nanoseconds, sizes in bytes.

As everywhere, null is a field that is not there; `fields.py` says what becomes of fields not declared here.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from localspec.protocol.answers import Extra, Unheeded
from localspec.protocol.pairs import Capability
from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.requests import MAX_INPUTS, MAX_LOGPROBS, MAX_STOPS, MAX_TOOLS, Stop, Tool
from localspec.protocol.sampling import Count, Sampled, TokenLimit

Think = bool | Literal["low", "medium", "high", "max"]
Name = Annotated[str, Meta(max_length=1024)]

# ---------------------------------------------------------------------------- requests


class Options(Sampled, Request):
    """`num_ctx` asks for a context; how long it is here, the configuration says. Ollama's others have no
    effect for one request: they are settings of the pair, or of samplers that are not here."""

    num_predict: TokenLimit | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    num_ctx: Count | None = None


class Asked(Request, kw_only=True):
    """What chats and texts share. `model` has a tag or not; `keep_alive` 0 unloads it afterwards, and any
    other duration is left to the configuration."""

    refuses: ClassVar[str] = "chat"

    model: OrDefault[Name] = ""
    stream: OrDefault[bool] = True
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: Think | None = None
    logprobs: OrDefault[bool] = False
    top_logprobs: OrDefault[Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]] = 0


class AskedCallFunction(Struct):
    name: str
    arguments: dict[str, Any] = {}


class AskedCall(Struct):
    function: AskedCallFunction
    id: str | None = None


class AskedMessage(Struct):
    """`tool_name`: whose result a message of the role "tool" is."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[AskedCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(Asked, kw_only=True):
    """Without `messages` it loads the model, or unloads it with a `keep_alive` of 0."""

    messages: Annotated[list[AskedMessage], Meta(max_length=10_000)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(Asked, kw_only=True):
    """`raw`: the prompt as it is, through no template. `suffix`: what follows the place to fill in.
    Without both `prompt` and `suffix` as a chat without messages."""

    prompt: OrDefault[str] = ""
    suffix: OrDefault[str] = ""
    system: OrDefault[str] = ""
    raw: OrDefault[bool] = False
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class OllamaEmbedRequest(Request):
    """Without an `input` it loads the model, or unloads it with a `keep_alive` of 0. `truncate` false: an
    input that is too long is refused. `dimensions`: as OpenAI's.
    """

    refuses: ClassVar[str] = "vectors"

    model: OrDefault[Name] = ""
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    truncate: OrDefault[bool] = True
    dimensions: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsRequest(Request):
    """The older one, of one text, whose vector stays as long as it is."""

    refuses: ClassVar[str] = "vectors"

    model: OrDefault[Name] = ""
    prompt: OrDefault[str] = ""
    keep_alive: float | str | None = None


class OllamaModelRequest(Request):
    """A model by its name, which older clients call `name`. `stream`: how a pull is told."""

    model: OrDefault[Name] = ""
    name: OrDefault[Name] = ""
    stream: OrDefault[bool] = True


# ---------------------------------------------------------------------------- answers


class OllamaEmbeddings(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    localspec: Unheeded | UnsetType = UNSET


class OllamaEmbedding(Struct):
    embedding: list[float]
    localspec: Unheeded | UnsetType = UNSET


class CalledFunction(Struct):
    name: str
    arguments: dict[str, Any]


class Called(Struct):
    id: str
    function: CalledFunction


class Said(Struct, omit_defaults=True):
    content: str
    role: Literal["assistant"]
    thinking: str = ""
    tool_calls: list[Called] = []


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob):
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET


class Line(Struct, kw_only=True):
    """A line of a stream, or all of an answer. The last line has what follows `done`."""

    model: str
    created_at: str
    logprobs: list[Logprob] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    localspec: Extra | UnsetType = UNSET


class OllamaChatLine(Line, kw_only=True):
    message: Said


class OllamaGenerateLine(Line, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class Details(Struct):
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    format: Literal["gguf"] = "gguf"
    parent_model: str = ""


class OllamaModel(Struct, kw_only=True):
    """Of a model that is loaded: `expires_at` when it is unloaded if nobody asks, `context_length` tokens."""

    name: str
    model: str
    modified_at: str | UnsetType = UNSET
    size: int
    digest: str
    details: Details
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaShown(Struct):
    """`template` is Jinja. `parameters`: a setting a line, the served context and the file's sampling."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str
    license: str | UnsetType = UNSET
    localspec: Unheeded | UnsetType = UNSET


class OllamaProgress(Struct):
    """A line of a pull. `localspec`: in the last."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
    localspec: Unheeded | UnsetType = UNSET


class OllamaVersion(Struct):
    """`version`: the release of Ollama whose API this is; clients refuse older ones. `localspec`: our own."""

    version: str
    localspec: str
