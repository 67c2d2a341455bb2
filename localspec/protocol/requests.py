"""What clients ask, OpenAI's requests and llama-server's, checked strictly.

A field of the wrong type or out of range is refused with its name and its limit; `fields.py` says what
becomes of fields that are not declared, and null is read as a field that is not there.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import UNSET, Meta, Struct, field

from localspec.protocol.aliases import Aliases
from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.sampling import INT32, Bias, Count, TokenLimit
from localspec.protocol.settings import Drafted

MAX_CHOICES = 4
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 16
MAX_TOOLS = 128
MAX_INPUTS = 2048  # texts of one request for embeddings, as OpenAI has it
PING_INTERVAL = 30
# Each token of an answer is compared with the beginnings of all stop strings.
Stop = Annotated[str, Meta(max_length=1024)]


# ---------------------------------------------------------------------------- OpenAI's, and ours


class StreamOptions(Request):
    include_usage: OrDefault[bool] = False


class JsonSchema(Request):
    """OpenAI's wrapper around a schema; `name` changes nothing here. `strict`: the schema is refused if a
    keyword of it cannot be enforced; else the keyword is left out."""

    schema: OrDefault[dict[str, Any]] = field(default_factory=dict)
    name: OrDefault[str] = ""
    strict: Any = None


class ResponseFormat(Request):
    """OpenAI's `json_schema` wrapper, or llama-server's `schema` directly."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    strict: Any = None


class ContentPart(Struct):
    """`refusal`: the text of a part of that type, which an assistant's message may have."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct):
    """OpenAI's call before there were tools; `arguments` is JSON."""

    name: str
    arguments: str | None = None


class ChatMessage(Struct, dict=True):
    """`function_call`, and the role "function" of its result, are OpenAI's older form of calls."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    # Left out it is None after all: only an error tells the two apart.
    content: str | list[ContentPart] | None = UNSET  # type: ignore[assignment]
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: FunctionCall | None = None

    def __post_init__(self) -> None:
        if cast(object, self.content) is UNSET:
            self.content = None
            self.__dict__["lacks_content"] = True

    @property
    def lacks_content(self) -> bool:
        """Whether the field was left out, and is not null."""
        return bool(self.__dict__.get("lacks_content"))


class Function(Request, omit_defaults=True):
    """A tool's function; `parameters` is a JSON Schema. strict: it is held to, or refused."""

    name: str
    description: OrDefault[str] = ""
    parameters: dict[str, Any] | None = None
    strict: Any = None


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
    depth: OrDefault[Drafted | Literal["auto"]] = "auto"
    kind: OrDefault[Literal["auto", "draft", "mtp", "ngram"]] = "auto"
    verification: OrDefault[Literal["auto", "match", "rejection"]] = "auto"


# What an answer is for, as statistics tell it.
Kind = Literal["ask", "chat", "complete", "edit", "json", "cmd", "commit", "explain", "other"]


class LocalspecOptions(Request):
    """Ours. `conversation`, of a chat: "new", "last" or an id: question and answer are kept there.
    `kind` says what the answer is for: it is kept with the answer, or, where no conversation is, with
    the answer's figures alone (tokens, times, drafts) and none of its text. `title` is what lists
    call a new conversation (its first line counts); without it the question's first line is.
    `progress`: a stream says what it waits for before the answer begins, in chunks without choices; errors
    of that time come in the stream too then. `private`: no file keeps what the engine makes of the prompt,
    as is done for long ones, so that they need not be read again.
    """

    conversation: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    kind: Kind | None = None
    title: Annotated[str, Meta(max_length=1000)] | None = None
    progress: OrDefault[bool] = False
    private: OrDefault[bool] = False


# Least tokens of a chunk of the cache that may be moved; 0: none may be.
CacheReuse = Annotated[int, Meta(ge=0, le=INT32)]


class GenerationRequest(Aliases, Request):
    """What chat and text completions share.

    `logit_bias`: of token ids, or of every token of a text; an object or, as llama-server has it, a
    list of pairs. false: never. `timings_per_token`: every chunk of a stream has llama-server's `timings`.
    `return_progress`: a stream says in chunks of their own how much of the prompt is read.
    `sse_ping_interval`: seconds after which a stream that is silent gets a comment; 0 or -1: never.
    `post_sampling_probs`: log-probabilities are those of the draw, after bias, penalties, truncation and
    temperature. `mirostat` (but for 0), `adaptive_target` (but for a negative one) and `lora` are refused.
    """

    refuses: ClassVar[str] = "text"  # the table of fields.py for what is not declared

    model: OrDefault[str] = ""
    stream: OrDefault[bool] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n_predict: TokenLimit | None = None  # llama-server's
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None  # `n`, for llama-server
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, Bias | bool] | list[tuple[int | str, Bias | bool]] | None = None
    ignore_eos: OrDefault[bool] = False
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None
    prediction: Prediction | None = None
    speculative: SpeculativeOptions | None = None
    exact: bool | None = None
    cache_prompt: OrDefault[bool] = True
    n_cache_reuse: OrDefault[CacheReuse] = 0
    reveal_draft: OrDefault[bool] = False
    timings_per_token: OrDefault[bool] = False
    return_progress: OrDefault[bool] = False
    sse_ping_interval: OrDefault[Annotated[int, Meta(ge=-1, le=86_400)]] = PING_INTERVAL
    post_sampling_probs: OrDefault[bool] = False
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    adaptive_target: Annotated[float, Meta(ge=-1, le=1)] | None = None
    lora: list[Any] | None = None
    localspec: LocalspecOptions | None = None

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        self.n = self.n or self.n_cmpl
        if self.repeat_penalty is None:
            self.repeat_penalty = self.repetition_penalty


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingTokens = Annotated[int, Meta(ge=-1, le=INT32)]


class ChatRequest(GenerationRequest, kw_only=True):
    """`continue_final_message`: the answer goes on with the last message, which is the assistant's;
    true, unless said otherwise, where it is. "reasoning_content" goes on with its thoughts. With it,
    and without `messages`, the last answer of a kept conversation goes on where it was cut off.

    `reasoning_budget_tokens` (and llama-server's other name for it): so many tokens of thoughts, then they
    are ended with the model's own closing marker; 0: none, -1: any number. `reasoning_effort` is told to
    templates that know it, and is a budget where none is given. Without any, the template decides.

    `parse_special`: special tokens that are spelled in messages and tools (`<|im_end|>`) are read as such;
    without it they are text, and the chat template alone writes special tokens.
    `functions` and `function_call`: OpenAI's older form of `tools` and `tool_choice`; the answer then has a
    `function_call`. `documents` are shown to templates that know them.
    """

    refuses: ClassVar[str] = "chat"

    messages: Annotated[list[ChatMessage], Meta(max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    chat_template_kwargs: OrDefault[dict[str, Any]] = field(default_factory=dict)
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_format: OrDefault[Literal["none", "auto", "deepseek"]] = "auto"
    reasoning_effort: Effort | None = None
    reasoning_budget_tokens: ThinkingTokens | None = None
    thinking_budget_tokens: ThinkingTokens | None = None
    parse_special: OrDefault[bool] = False
    thinking_token_budget: ThinkingTokens | None = None  # vLLM's name
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_INPUTS)] | None = None


class PromptObject(Request):
    """llama-server's; `multimodal_data` is refused, since no model here reads any."""

    prompt_string: str | Annotated[list[str | int], Meta(min_length=1)]
    multimodal_data: list[Any] | None = None


OnePrompt = str | list[str | int] | PromptObject
Prompts = (
    str
    | PromptObject
    | Annotated[list[str | int | list[str | int] | PromptObject], Meta(min_length=1)]
)


class CompletionRequest(GenerationRequest, kw_only=True):
    """`prompt`: a text, token ids, texts and ids mixed, or several of these. With `echo` the answer
    begins with the prompt, and `logprobs` are of its tokens, too. `prompt_logprobs`, vLLM's: the prompt's
    alone, in a field of their own. `best_of` may be no more than `n`."""

    prompt: Prompts
    suffix: str | None = None
    echo: OrDefault[bool] = False
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class InputObject(Request):
    """llama-server's other forms of one input: `prompt_string`, or `content` in a message's parts."""

    prompt_string: str | Annotated[list[str | int], Meta(min_length=1)] | None = None
    content: str | list[ContentPart] | None = None
    multimodal_data: list[Any] | None = None


# Texts; token ids, or texts and ids mixed, of one input; or lists of these, one for each input.
Inputs = Annotated[list[str | int | list[str | int] | InputObject], Meta(min_length=1)]


class LoadRequest(Request):
    """`model` is a pair's name; empty for the configured one."""

    model: OrDefault[str] = ""


class TokenizeRequest(Request):
    content: str
    model: OrDefault[str] = ""
    add_special: OrDefault[bool] = False
    parse_special: OrDefault[bool] = True
    with_pieces: OrDefault[bool] = False


class DetokenizeRequest(Request):
    tokens: list[Annotated[int, Meta(ge=0, le=INT32)]]
    model: OrDefault[str] = ""


class TemplateRequest(Request):
    refuses: ClassVar[str] = "template"

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    model: OrDefault[str] = ""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    chat_template_kwargs: OrDefault[dict[str, Any]] = field(default_factory=dict)
    reasoning_effort: Effort | None = None
    reasoning_budget_tokens: ThinkingTokens | None = None
    thinking_budget_tokens: ThinkingTokens | None = None
    parse_special: OrDefault[bool] = False
    thinking_token_budget: ThinkingTokens | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_INPUTS)] | None = None


# ---------------------------------------------------------------------------- embeddings


class EmbeddingRequest(Request):
    """OpenAI's, and llama-server's /embedding. `input`, or `content`: a text, token ids, texts and ids mixed,
    or several of these. `dimensions`: of each vector so many of the first numbers, made of length 1 again.
    `truncate`: of an input that is too long the beginning is read; else it is refused. `embd_normalize`:
    2 makes vectors of length 1, another p > 0 does so by the p-norm, 0 makes the largest number 32760, -1
    leaves them as they are. `truncate_prompt_tokens`, vLLM's: of each input so many tokens are read, with -1
    as many as the model reads.
    """

    refuses: ClassVar[str] = "vectors"

    input: str | InputObject | Inputs | None = None
    content: str | InputObject | Inputs | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    model: OrDefault[str] = ""
    encoding_format: OrDefault[Literal["float", "base64"]] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    truncate: OrDefault[bool] = False
    embd_normalize: OrDefault[Annotated[int, Meta(ge=-1, le=64)]] = 2


class DocumentText(Request):
    """Jina's other way of writing a document."""

    text: str


class RerankRequest(Request):
    """Jina's; and, with `texts` in place of `documents`, that of Hugging Face's Text Embeddings Inference,
    which gets its answer. `top_n`: so many of the best; without it all. `truncate`: as for embeddings.
    `max_tokens_per_doc`, Cohere's: of each document so many tokens are read at most.
    """

    refuses: ClassVar[str] = "scores"

    query: str
    documents: Annotated[list[str | DocumentText], Meta(max_length=MAX_INPUTS)] | None = None
    texts: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    top_n: Annotated[int, Meta(ge=1, le=INT32)] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=INT32)] | None = None
    model: OrDefault[str] = ""
    return_documents: OrDefault[bool] = False
    return_text: OrDefault[bool] = False
    truncate: OrDefault[bool] = False


# ---------------------------------------------------------------------------- llama-server's

_SLOT = Annotated[int, Meta(ge=-1, le=INT32)]
_MILLISECONDS = Annotated[float, Meta(ge=-1, le=1e9)]


class NativeRequest(GenerationRequest, kw_only=True):
    """What both share.

    `samplers` names those that work; "infill" among them ends a completion where
    writing on is not likely.
    `response_fields` picks fields of the answer by path; the paths become its keys.
    `id_slot` chooses no slot here (the longest cached prefix does); with `user` it tells editors apart.
    `t_max_prompt_ms` is taken and, as in llama-server, changes nothing: a warm-up that sends 1 wants its
    prompt read.
    """

    samplers: list[str] | str | None = None
    n_probs: OrDefault[Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]] = 0
    n_indent: Count | None = None
    t_max_prompt_ms: _MILLISECONDS | None = None
    t_max_predict_ms: _MILLISECONDS | None = None
    response_fields: list[str] | None = None
    return_tokens: OrDefault[bool] = False
    id_slot: OrDefault[_SLOT] = -1
    user: str | None = None


class NativeCompletionRequest(NativeRequest, kw_only=True):
    """`prompt`: a text, token ids, texts and ids mixed, or several of these."""

    prompt: Prompts


class ExtraFile(Request):
    """A piece of another file."""

    text: str
    filename: OrDefault[str] = "tmp"


class InfillRequest(NativeRequest, kw_only=True):
    """`prompt` is the part of the cursor's line before it, `input_prefix` the lines above.

    `n_cache_reuse`, off elsewhere: an edit above the cursor need not have all that follows read again.
    """

    n_cache_reuse: OrDefault[CacheReuse] = 32

    input_prefix: OrDefault[str] = ""
    input_suffix: OrDefault[str] = ""
    input_extra: OrDefault[Annotated[list[ExtraFile], Meta(max_length=10_000)]] = field(
        default_factory=list
    )
    prompt: OrDefault[str] = ""
