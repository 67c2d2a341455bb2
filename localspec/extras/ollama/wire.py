"""Ollama's requests and responses: https://docs.ollama.com/api.

Times are nanoseconds, sizes are bytes. As in other requests, null is a missing field, and
`fields.py` says what happens to undeclared fields.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from localspec.protocol.answers import Extra, Unheeded
from localspec.protocol.pairs import Capability
from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.requests import (
    MAX_INPUTS,
    MAX_LOGPROBS,
    MAX_STOPS,
    MAX_TOOLS,
    Count,
    SamplingParameters,
    Stop,
    TokenLimit,
    Tool,
)

Think = bool | Literal["low", "medium", "high", "max"]
Name = Annotated[str, Meta(max_length=1024)]


class Options(SamplingParameters, Request):
    """Ollama's options.

    `num_ctx` requests a context, but its length is a setting of the configuration here. Ollama's
    other options have no effect on a single request: they are settings of the pair, or belong to
    samplers that do not exist here.
    """

    num_predict: TokenLimit | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    num_ctx: Count | None = None


class OllamaRequest(Request, kw_only=True):
    """The fields that chats and texts share."""

    refusal_table: ClassVar[str] = "chat"

    model: OrDefault[Name] = ""  # a name with or without a tag
    stream: OrDefault[bool] = True
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    # 0 unloads the model afterwards. Any other duration is left to the configuration.
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
    """A message. `tool_name`: the tool whose result a message of the role "tool" is."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[AskedCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """Ollama's /api/chat.

    Without `messages` it loads the model, or unloads it with a `keep_alive` of 0.
    """

    messages: Annotated[list[AskedMessage], Meta(max_length=10_000)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """Ollama's /api/generate.

    - `raw`: the prompt is used unchanged, without a template.
    - `suffix`: the text after the place to be filled in.

    Without both `prompt` and `suffix` it is the same as a chat without messages.
    """

    prompt: OrDefault[str] = ""
    suffix: OrDefault[str] = ""
    system: OrDefault[str] = ""
    raw: OrDefault[bool] = False
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class OllamaEmbedRequest(Request):
    """Ollama's /api/embed.

    - `input`: without it, the model is loaded, or unloaded with a `keep_alive` of 0.
    - `truncate`: if false, an input that is too long is refused.
    - `dimensions`: as in OpenAI's request.
    """

    refusal_table: ClassVar[str] = "vectors"

    model: OrDefault[Name] = ""
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    truncate: OrDefault[bool] = True
    dimensions: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsRequest(Request):
    """Ollama's older /api/embeddings, for one text. The vector is not normalized."""

    refusal_table: ClassVar[str] = "vectors"

    model: OrDefault[Name] = ""
    prompt: OrDefault[str] = ""
    keep_alive: float | str | None = None


class OllamaModelRequest(Request):
    """A request about one model, which older clients call `name`.

    - `stream`: whether the progress of a pull is sent as a stream.
    """

    model: OrDefault[Name] = ""
    name: OrDefault[Name] = ""
    stream: OrDefault[bool] = True


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


class OllamaOutputFunction(Struct):
    name: str
    arguments: dict[str, Any]


class Called(Struct):
    id: str
    function: OllamaOutputFunction


class Said(Struct, omit_defaults=True):
    content: str
    role: Literal["assistant"]
    thinking: str = ""
    tool_calls: list[Called] = []


class OllamaTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(OllamaTokenLogprob):
    top_logprobs: list[OllamaTokenLogprob] | UnsetType = UNSET


class OllamaLine(Struct, kw_only=True):
    """A line of a stream, or a whole answer. The last line has the fields that follow `done`."""

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


class OllamaChatLine(OllamaLine, kw_only=True):
    message: Said


class OllamaGenerateLine(OllamaLine, kw_only=True):
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
    """A model.

    - `expires_at`: when a loaded model is unloaded if there is no request.
    - `context_length`: tokens, of a loaded model.
    """

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
    """Everything about one model.

    - `template`: in the language Jinja.
    - `parameters`: one setting per line: the served context and the sampling parameters of the
      file.
    """

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
    """A line of a pull. `localspec` is in the last one only."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
    localspec: Unheeded | UnsetType = UNSET


class OllamaVersion(Struct):
    """The release of Ollama whose API this is.

    - `version`: clients refuse older releases.
    - `localspec`: our own version.
    """

    version: str
    localspec: str


class OllamaError(Struct):
    """Ollama's error, which is only a sentence."""

    error: str


# For the description (scripts/openapi.py).
REQUESTS = (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaEmbedRequest,
    OllamaEmbeddingsRequest,
    OllamaModelRequest,
)
ANSWERS = (
    OllamaError,
    OllamaChatLine,
    OllamaGenerateLine,
    OllamaEmbeddings,
    OllamaEmbedding,
    OllamaModels,
    OllamaProgress,
    OllamaShown,
    OllamaVersion,
)
