"""Requests of clients, OpenAI's and llama-server's, checked strictly.

A field of the wrong type or out of range is refused with its name and its limit. `fields.py` says
what happens to fields that are not declared. Null is read as a missing field.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from localspec.protocol.fields import Described
from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.settings import DrafterKind, DraftTokens, LoopGuardScope, VerificationRule

# The sampling parameters, each declared once: its type, its limits and its other names.
#
# Requests and frames inherit the fields of `SamplingParameters`, and everything else that names a parameter
# reads it from here. The same limits hold in a request and in a model's file. Within them every step
# stays finite in float32 for any logits. A penalty that divides by almost zero, or by a number that
# float32 rounds to zero, would leave no token to choose.
#
# To add a parameter: add its field here, its default in engine/sampling/settings.py beside the code
# that applies it, and its option in cli/options.py if `localspec ask` is to have it.


INT32 = (1 << 31) - 1

Count = Annotated[int, Meta(ge=0, le=INT32)]
LookBack = Annotated[int, Meta(ge=-1, le=INT32)]  # tokens; -1: all of the text
# -1: as many tokens as fit; -2: until the context is full, which is the same thing here.
TokenLimit = Annotated[int, Meta(ge=-2, le=INT32)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
# Logits are divided or multiplied by it, so either way they change by a factor of 1000 at most.
RepeatPenalty = Annotated[float, Meta(ge=0.001, le=100)]
# Standard deviations of all logits. Zero and below switch it off, as in llama-server.
Sigmas = Annotated[float, Meta(ge=-1, le=100)]
Exponent = Annotated[float, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]  # OpenAI's limits
DryMultiplier = Annotated[float, Meta(ge=0, le=100)]
# Below 1, llama.cpp's default is used, as in llama-server.
DryBase = Annotated[float, Meta(ge=0, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]  # OpenAI's limits


class OtherNames(NamedTuple):
    """What a parameter is called elsewhere."""

    gguf: str = ""  # key below `general.sampling.` with which a model's file sets its default
    sampler: str = ""  # the one of llama-server's `samplers` that the parameter belongs to
    off: float | None = None  # the value that switches that sampler off


class SamplingParameters(Struct):
    """Sampling parameters of a request, with llama.cpp's names and meanings.

    None stands for the model's own default (`general.sampling.*` in its file), or else llama.cpp's.
    A temperature of 0 is greedy.
    """

    temperature: Annotated[Temperature, OtherNames("temp", "temperature", 1.0)] | None = None
    top_k: Annotated[LookBack, OtherNames("top_k", "top_k", 0)] | None = None
    top_p: Annotated[Probability, OtherNames("top_p", "top_p", 1.0)] | None = None
    min_p: Annotated[Probability, OtherNames("min_p", "min_p", 0.0)] | None = None
    typical_p: Annotated[Probability, OtherNames("", "typ_p", 1.0)] | None = None
    top_n_sigma: Annotated[Sigmas, OtherNames("", "top_n_sigma", -1.0)] | None = None
    xtc_probability: Annotated[Probability, OtherNames("xtc_probability", "xtc", 0.0)] | None = None
    xtc_threshold: Annotated[Probability, OtherNames("xtc_threshold")] | None = None
    dynatemp_range: Annotated[Temperature, OtherNames("", "temperature", 0.0)] | None = None
    dynatemp_exponent: Exponent | None = None
    min_keep: Count | None = None
    repeat_penalty: (
        Annotated[RepeatPenalty, OtherNames("penalty_repeat", "penalties", 1.0)] | None
    ) = None
    repeat_last_n: Annotated[LookBack, OtherNames("penalty_last_n")] | None = None
    frequency_penalty: Annotated[Penalty, OtherNames("", "penalties", 0.0)] | None = None
    presence_penalty: Annotated[Penalty, OtherNames("", "penalties", 0.0)] | None = None
    dry_multiplier: Annotated[DryMultiplier, OtherNames("", "dry", 0.0)] | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: LookBack | None = None
    dry_sequence_breakers: Annotated[list[str], Meta(max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None


class Parameter(NamedTuple):
    """One field of `SamplingParameters`. `kind` is its type, including its limits."""

    name: str
    kind: Any
    other_names: OtherNames


@cache
def sampling_parameters() -> tuple[Parameter, ...]:
    """Return all sampling parameters in the order of the fields."""
    hints = get_type_hints(SamplingParameters, include_extras=True)
    result = []
    for name in SamplingParameters.__struct_fields__:
        kind = next(member for member in get_args(hints[name]) if member is not type(None))
        also = next((mark for mark in get_args(kind) if isinstance(mark, OtherNames)), OtherNames())
        result.append(Parameter(name, kind, also))
    return tuple(result)


# Fields of other servers' requests that are served here under names of ours.
#
# Clients of vLLM and SGLang send them (outlines, instructor, their own SDKs). A request may use only
# one name for each thing.


MAX_CHOICE_TEXTS = 1024  # texts in `choice`, one of which the answer has to be
MAX_STOP_TOKENS = 128  # token ids in `stop_token_ids`

ChoiceTexts = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)]


class StructuredOutputs(Request):
    """vLLM's constraint on an answer, of which exactly one kind may be set.

    - `json`: a schema, as an object or as its text.
    - `regex`, `grammar`: a regular expression or a grammar that the answer has to match.
    - `choice`: texts, one of which the answer has to be.
    - `json_object`: the answer has to be a JSON object.
    - `structural_tag`: refused.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: ChoiceTexts | None = None
    grammar: str | None = None
    json_object: OrDefault[bool] = False
    structural_tag: Any = None


class AliasFields(SamplingParameters):
    """Fields of vLLM and SGLang that text generation serves."""

    # vLLM's constraints, in their older form (`guided_…`) and their newer one.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    ebnf: str | None = None  # SGLang's name of `grammar`
    repetition_penalty: RepeatPenalty | None = None  # `repeat_penalty` in vLLM and SGLang
    # Before this many tokens neither the model's own end nor `stop_token_ids` may end the
    # answer. A stop string still may, and so does a constraint that allows no further token.
    min_tokens: Count | None = None
    # Token ids that end the answer and are not shown.
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, le=INT32)]], Meta(max_length=MAX_STOP_TOKENS)]
        | None
    ) = None


MAX_CHOICES = 4
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 16
MAX_TOOLS = 128
MAX_INPUTS = 2048  # texts of one request for embeddings; OpenAI's limit
PING_INTERVAL_S = 30  # seconds
# The length is limited because every token of an answer is compared with the beginnings of all stop strings.
Stop = Annotated[str, Meta(max_length=1024)]


class StreamOptions(Request):
    include_usage: OrDefault[bool] = False


class JsonSchema(Request):
    """OpenAI's wrapper around a schema.

    - `name`: has no effect here.
    - `strict`: the schema is refused if one of its keywords cannot be enforced. Otherwise that
      keyword is left out.
    """

    schema: OrDefault[dict[str, Any]] = field(default_factory=dict)
    name: OrDefault[str] = ""
    strict: Any = None


class ResponseFormat(Request):
    """The format of an answer: OpenAI's `json_schema` wrapper, or llama-server's `schema` directly."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    strict: Any = None


class PictureParam(Struct):
    url: Any = None


class FileParam(Struct):
    file_data: Any = None
    filename: Any = None
    file_id: Any = None  # refused where it is read


Picture = Annotated[dict[str, Any], Described(lambda: {"": PictureParam})]
File = Annotated[dict[str, Any], Described(lambda: {"": FileParam})]


class ContentPart(Struct):
    """A part of a message. An assistant's part of the type `refusal` has its text in that field.

    - `image_url`: of a part of that type, a picture as a data URL, alone or as `url` of an object.
    - `file`: of a part of that type, a PDF document or a text. `file_data` is a data URL or base64, and
      `filename` its name.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | Picture | None = None
    file: File | None = None


class FunctionCall(Struct):
    """A call in OpenAI's form that is older than tools. `arguments` is JSON."""

    name: str
    arguments: str | None = None


class CalledFunction(Struct):
    name: Any = None
    arguments: Any = None


Called = Annotated[dict[str, Any], Described(lambda: {"": CalledFunction})]


class CalledTool(Struct):
    name: Any = None
    input: Any = None


CalledCustom = Annotated[dict[str, Any], Described(lambda: {"": CalledTool})]


class CallParam(Struct):
    id: Any = None
    type: Any = None
    function: Called = {}
    custom: CalledCustom = {}


CallObject = Annotated[dict[str, Any], Described(lambda: {"": CallParam})]


class ReasoningDetail(Struct):
    """A part of OpenRouter's form of thoughts; only text and summaries can be read."""

    type: Any = None
    text: Any = None
    summary: Any = None
    data: Any = None
    signature: Any = None
    id: Any = None
    format: Any = None
    index: Any = None


class ChatMessage(Struct, dict=True):
    """A message of a chat.

    `reasoning` (vLLM, OpenRouter) and `reasoning_details` (OpenRouter) are other names of
    `reasoning_content`, which they become.
    `function_call`, and the role "function" of its result, are OpenAI's older form of tool calls.
    """

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    # A missing field becomes None as well. Only an error message distinguishes it from null.
    content: str | list[ContentPart] | None = UNSET  # type: ignore[assignment]
    name: str | None = None
    tool_calls: list[CallObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: FunctionCall | None = None
    reasoning: str | None = None
    reasoning_details: list[ReasoningDetail] | None = None

    def __post_init__(self) -> None:
        if self.reasoning is not None or self.reasoning_details is not None:
            details = [part.text or part.summary for part in self.reasoning_details or []]
            joined = "".join(text for text in details if isinstance(text, str))
            self.reasoning_content = self.reasoning_content or self.reasoning or joined or None
            self.reasoning = self.reasoning_details = None
        if cast(object, self.content) is UNSET:
            self.content = None
            self.__dict__["lacks_content"] = True

    @property
    def lacks_content(self) -> bool:
        """Whether the field was left out; false if it is null."""
        return bool(self.__dict__.get("lacks_content"))


class Function(Request, omit_defaults=True):
    """A tool's function. `parameters` is a JSON Schema; with `strict` it is enforced or refused."""

    name: str
    description: OrDefault[str] = ""
    parameters: dict[str, Any] | None = None
    strict: Any = None


class CustomGrammar(Struct):
    definition: str
    syntax: str


class CustomFormat(Struct):
    """The format of a custom tool's input: any text, or what a grammar describes."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomTool(Request):
    """A tool whose input is a text. The model is told its grammar, and not held to it."""

    name: str
    description: OrDefault[str] = ""
    format: CustomFormat | None = None


class Tool(Request, dict=True):
    """A function or, of the type "custom", a tool whose input is a text."""

    function: OrDefault[Function] = field(default_factory=lambda: Function(""))
    type: OrDefault[Literal["function", "custom"]] = "function"
    custom: CustomTool | UnsetType | None = UNSET

    def template_object(self) -> dict[str, Any]:
        """Return the caller's own object, which is what a chat template writes.

        It has the caller's keys in their order, including those that no struct declares. Null
        counts as a missing key, except inside a function's parameters.
        """
        original = self.__dict__.get("own") or msgspec.to_builtins(self)
        function = {key: value for key, value in original["function"].items() if value is not None}
        given_keys = {key: value for key, value in original.items() if value is not None}
        default_type = {} if "type" in given_keys else {"type": self.type}
        return {**default_type, **given_keys, "function": function}


class NamedFunction(Struct):
    name: str


AllowedFunction = Annotated[dict[str, Any], Described(lambda: {"": NamedFunction})]


class AllowedTool(Struct):
    type: Any = None
    function: AllowedFunction = {}
    custom: AllowedFunction = {}


class AllowedTools(Struct):
    """The tools that may be called. `mode` "required" demands a call."""

    mode: Literal["auto", "required"]
    tools: list[AllowedToolObject]


AllowedToolObject = Annotated[dict[str, Any], Described(lambda: {"": AllowedTool})]


class ToolChoice(Request):
    """The one tool that must be called, or the `allowed_tools`."""

    function: OrDefault[NamedFunction] = field(default_factory=lambda: NamedFunction(""))
    type: OrDefault[Literal["function", "custom", "allowed_tools"]] = "function"
    custom: NamedFunction | UnsetType | None = UNSET
    allowed_tools: AllowedTools | UnsetType | None = UNSET


class Prediction(Request):
    """Text that the caller expects in the answer; drafts are looked up in it.

    A text longer than the context is cut to it, since no answer can be longer.
    """

    content: str | list[ContentPart]
    type: OrDefault[Literal["content"]] = "content"


class SpeculativeOptions(Request):
    """An extension of localspec: how to speculate. `depth` is a number of drafted tokens, or "auto"."""

    enabled: OrDefault[bool] = True
    depth: OrDefault[DraftTokens | Literal["auto"]] = "auto"
    kind: OrDefault[DrafterKind] = "auto"
    verification: OrDefault[VerificationRule] = "auto"


# What an answer is for. Statistics group answers by it.
AnswerKind = Literal["ask", "chat", "complete", "edit", "json", "cmd", "commit", "explain", "other"]


class LocalspecOptions(Request):
    """Extensions of localspec.

    - `conversation`: of a chat: "new", "last" or an id. The question and the answer are saved in
      that conversation.
    - `kind`: what the answer is for. It is saved with the answer. Without a conversation it is
      saved with the answer's figures alone (tokens, times, drafts) and none of its text.
    - `title`: the title of a new conversation in lists; only its first line counts. Without it, the
      first line of the question is used.
    - `progress`: before the answer begins, a stream reports what it waits for, in chunks without
      choices. Errors of that time then come in the stream, too.
    - `private`: no file stores the state that the engine computes for the prompt, and no log its
      text. Otherwise states of long prompts are stored, so that they need not be prefilled again.
      What is held of it in memory goes with DELETE /localspec/conversations/private.
    - `ahead`: the question is only begun, in a conversation that exists, or /infill only announces
      the text around the cursor: it is read while nobody waits, and nothing is answered or saved.
      Any other request ends that.
    - `agent`: with `ahead`, instead of a conversation: the agent whose requests this process
      forwards. What its last session began with is read, if one was seen.
    """

    conversation: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    kind: AnswerKind | None = None
    title: Annotated[str, Meta(max_length=1000)] | None = None
    progress: OrDefault[bool] = False
    private: OrDefault[bool] = False
    ahead: OrDefault[bool] = False
    agent: Annotated[str, Meta(max_length=64)] | None = None


# Length in tokens from which a cached chunk may be moved to another position; 0: none may be moved.
CacheReuse = Annotated[int, Meta(ge=0, le=INT32)]


class GenerationRequest(AliasFields, Request):
    """The fields that chat and text completions share.

    `mirostat` (except 0), `adaptive_target` (except negative values) and `lora` are refused.
    """

    refusal_table: ClassVar[str] = "text"  # key of the table in fields.py that lists refused fields

    model: OrDefault[str] = ""
    stream: OrDefault[bool] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n_predict: TokenLimit | None = None  # llama-server's name of `max_tokens`
    n_cmpl: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None  # llama-server's name of `n`
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    # Biases of token ids, or of every token of a text. It is an object or, as in llama-server, a
    # list of pairs. False forbids the token.
    logit_bias: dict[str, Bias | bool] | list[tuple[int | str, Bias | bool]] | None = None
    ignore_eos: OrDefault[bool] = False
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    regex: str | None = None
    prediction: Prediction | None = None
    speculative: SpeculativeOptions | None = None
    exact: bool | None = None
    loop_guard: LoopGuardScope | None = None
    cache_prompt: OrDefault[bool] = True
    n_cache_reuse: OrDefault[CacheReuse] = 0
    reveal_draft: OrDefault[bool] = False
    timings_per_token: OrDefault[bool] = False  # chunks have llama-server's `timings`
    return_progress: OrDefault[bool] = False  # a stream reports how much of the prompt is prefilled
    # Seconds after which a silent stream gets a ping; 0 or -1: never.
    sse_ping_interval: OrDefault[Annotated[int, Meta(ge=-1, le=86_400)]] = PING_INTERVAL_S
    post_sampling_probs: OrDefault[bool] = False  # log-probabilities after all samplers
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    adaptive_target: Annotated[float, Meta(ge=-1, le=1)] | None = None
    lora: list[Any] | None = None
    localspec: LocalspecOptions | None = None

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        self.n = self.n or self.n_cmpl
        if self.repeat_penalty is None:
            self.repeat_penalty = self.repetition_penalty


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingTokens = Annotated[int, Meta(ge=-1, le=INT32)]


class ThinkingSwitch(Struct):
    """The switch of GLM, DeepSeek and Kimi. Without `budget_tokens` thoughts have no limit."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: ThinkingTokens | None = None


class ReasoningSwitch(Struct):
    """OpenRouter's switch. `max_tokens` is a budget."""

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingTokens | None = None
    enabled: bool | None = None


# Names that chat templates have for the switch of thoughts.
TEMPLATE_SWITCHES = ("enable_thinking", "thinking")


def _settle_thinking(request: ChatRequest | TemplateRequest) -> None:
    """Turn the switches of thoughts that other servers have into `reasoning_budget_tokens` and an effort."""
    thinking, reasoning = request.thinking, request.reasoning or ReasoningSwitch()
    switches = [request.enable_thinking, reasoning.enabled]
    switches += [thinking.type != "disabled"] if thinking else []
    # A template's arguments reach the template as they are, so of these only a no has to be known here.
    in_template = [request.chat_template_kwargs.get(name) for name in TEMPLATE_SWITCHES]
    budgets = [
        request.reasoning_budget_tokens,
        request.thinking_budget_tokens,
        request.thinking_token_budget,
        request.thinking_budget,
        thinking.budget_tokens if thinking else None,
        reasoning.max_tokens,
    ]
    budget = next((tokens for tokens in budgets if tokens is not None), None)
    request.reasoning_effort = request.reasoning_effort or reasoning.effort
    if any(switch is False for switch in [*switches, *in_template]):
        budget = 0
    elif budget is None and request.reasoning_effort is None and any(switches):
        budget = -1
    request.reasoning_budget_tokens = budget


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions.

    - `continue_final_message`: the answer continues the last message, which is the assistant's. It
      defaults to true if there is such a message. "reasoning_content" continues its thoughts. With
      it, and without `messages`, the last answer of a saved conversation continues where it was cut
      off.
    - `reasoning_budget_tokens`, `thinking_budget_tokens`, `thinking_token_budget`: after this many
      tokens of thoughts the model's own closing marker ends them; 0: no thoughts, -1: no limit. The
      first two names are llama-server's, the third is vLLM's.
    - `reasoning_effort`: passed to templates that support it, and turned into a budget if none is
      given. Without either, the template decides.
    - `enable_thinking`, `thinking_budget` (Qwen), `thinking` (GLM, DeepSeek, Kimi), `reasoning`
      (OpenRouter): the same under the names of other servers. Whichever says no wins.
    - `reasoning_control`: accepted as llama-server does. Thoughts can be ended in any case, see
      /v1/chat/completions/control.
    - `parse_special`: special tokens that are spelled out in messages and tools (`<|im_end|>`) are
      parsed as such. Otherwise they are text, and only the chat template writes special tokens.
    - `functions`, `function_call`: OpenAI's older form of `tools` and `tool_choice`. The answer
      then has a `function_call`.
    - `documents`: passed to templates that support them.
    """

    refusal_table: ClassVar[str] = "chat"

    messages: Annotated[list[ChatMessage], Meta(max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    chat_template_kwargs: OrDefault[dict[str, Any]] = field(default_factory=dict)
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning_control: OrDefault[bool] = False
    reasoning_format: OrDefault[Literal["none", "auto", "deepseek"]] = "auto"
    reasoning_budget_tokens: ThinkingTokens | None = None
    thinking_budget_tokens: ThinkingTokens | None = None
    parse_special: OrDefault[bool] = False
    thinking_token_budget: ThinkingTokens | None = None  # vLLM's name
    enable_thinking: bool | None = None
    thinking_budget: ThinkingTokens | None = None
    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningSwitch | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_INPUTS)] | None = None

    def __post_init__(self) -> None:
        GenerationRequest.__post_init__(self)
        _settle_thinking(self)


class PromptObject(Request):
    """llama-server's form of a prompt. `multimodal_data` is refused, since no model here reads any."""

    prompt_string: str | Annotated[list[str | int], Meta(min_length=1)]
    multimodal_data: list[Any] | None = None


OnePrompt = str | list[str | int] | PromptObject
Prompts = (
    str
    | PromptObject
    | Annotated[list[str | int | list[str | int] | PromptObject], Meta(min_length=1)]
)


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions.

    - `prompt`: a text, token ids, texts and ids mixed, or several of these.
    - `echo`: the answer begins with the prompt, and `logprobs` include its tokens.
    - `prompt_logprobs`: vLLM's field: log-probabilities of the prompt alone, in a field of their
      own.
    - `best_of`: may not exceed `n`.
    """

    prompt: Prompts
    suffix: str | None = None
    echo: OrDefault[bool] = False
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class InputObject(Request):
    """llama-server's other forms of one input: `prompt_string`, or `content` as in a message."""

    prompt_string: str | Annotated[list[str | int], Meta(min_length=1)] | None = None
    content: str | list[ContentPart] | None = None
    multimodal_data: list[Any] | None = None


# Texts, token ids, or texts and ids mixed, of one input; or a list with one of these for each input.
Inputs = Annotated[list[str | int | list[str | int] | InputObject], Meta(min_length=1)]


class LoadRequest(Request):
    """A request to load a pair. `model` is its name; empty: the configured pair."""

    model: OrDefault[str] = ""


class TokenizeRequest(Request):
    content: str
    model: OrDefault[str] = ""
    add_special: OrDefault[bool] = False
    parse_special: OrDefault[bool] = True
    with_pieces: OrDefault[bool] = False


class ControlRequest(Request):
    """POST /v1/chat/completions/control, as of llama-server.

    - `id`: of a running chat completion, as its chunks have it.
    - `action`: "reasoning_end" ends its thoughts, so that its answer follows.
    """

    id: str
    action: Literal["reasoning_end"]
    model: OrDefault[str] = ""


class StreamLookup(Request):
    """POST /v1/streams/lookup, as of llama-server.

    - `conversation_ids`: values of X-Conversation-Id. Each also means those that begin with it and "::".
    """

    conversation_ids: Annotated[list[str], Meta(max_length=1000)]


class DetokenizeRequest(Request):
    tokens: list[Annotated[int, Meta(ge=0, le=INT32)]]
    model: OrDefault[str] = ""


class TemplateRequest(Request):
    refusal_table: ClassVar[str] = "template"

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=10_000)]
    model: OrDefault[str] = ""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    chat_template_kwargs: OrDefault[dict[str, Any]] = field(default_factory=dict)
    reasoning_effort: ReasoningEffort | None = None
    reasoning_budget_tokens: ThinkingTokens | None = None
    thinking_budget_tokens: ThinkingTokens | None = None
    parse_special: OrDefault[bool] = False
    thinking_token_budget: ThinkingTokens | None = None
    enable_thinking: bool | None = None
    thinking_budget: ThinkingTokens | None = None
    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningSwitch | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_INPUTS)] | None = None

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        _settle_thinking(self)


class EmbeddingRequest(Request):
    """OpenAI's request for embeddings, and llama-server's /embedding.

    - `input`, `content`: a text, token ids, texts and ids mixed, or several of these.
    - `dimensions`: only this many leading elements of each vector, normalized to length 1 again.
    - `truncate`: of an input that is too long only the beginning is read. Otherwise it is refused.
    - `embd_normalize`: 2 makes vectors of length 1; another p > 0 normalizes by the p-norm; 0
      scales the largest element to 32760; -1 changes nothing.
    - `truncate_prompt_tokens`: vLLM's field: tokens that are read of each input; -1: as many as the
      model can read.
    """

    refusal_table: ClassVar[str] = "vectors"

    input: str | InputObject | Inputs | None = None
    content: str | InputObject | Inputs | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    model: OrDefault[str] = ""
    encoding_format: OrDefault[Literal["float", "base64"]] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    truncate: OrDefault[bool] = False
    embd_normalize: OrDefault[Annotated[int, Meta(ge=-1, le=64)]] = 2


class DocumentText(Request):
    """Jina's other form of a document."""

    text: str


class RerankRequest(Request):
    """Jina's request for a ranking, also in the form of Text Embeddings Inference.

    - `texts`: with it in place of `documents`, the answer has the form of Text Embeddings
      Inference.
    - `top_n`: only this many of the best documents; without it, all.
    - `truncate`: as for embeddings.
    - `max_tokens_per_doc`: Cohere's field: tokens that are read of each document at most.
    """

    refusal_table: ClassVar[str] = "scores"

    query: str
    documents: Annotated[list[str | DocumentText], Meta(max_length=MAX_INPUTS)] | None = None
    texts: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    top_n: Annotated[int, Meta(ge=1, le=INT32)] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=INT32)] | None = None
    model: OrDefault[str] = ""
    return_documents: OrDefault[bool] = False
    return_text: OrDefault[bool] = False
    truncate: OrDefault[bool] = False


_SLOT = Annotated[int, Meta(ge=-1, le=INT32)]
_MILLISECONDS = Annotated[float, Meta(ge=-1, le=1e9)]


class NativeRequest(GenerationRequest, kw_only=True):
    """The fields that llama-server's /completion and /infill share."""

    # Names of the samplers to use. With "infill" among them, a completion ends where it is not
    # likely to go on.
    samplers: list[str] | str | None = None
    n_probs: OrDefault[Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]] = 0
    n_indent: Count | None = None
    # It is accepted and, as in llama-server, has no effect: a warm-up that sends 1 wants its
    # prompt prefilled.
    t_max_prompt_ms: _MILLISECONDS | None = None
    t_max_predict_ms: _MILLISECONDS | None = None
    response_fields: list[str] | None = None  # paths of fields to return, which become the keys
    return_tokens: OrDefault[bool] = False
    id_slot: OrDefault[_SLOT] = -1  # chooses no slot; with `user` it distinguishes editors
    user: str | None = None


class NativeCompletionRequest(NativeRequest, kw_only=True):
    """llama-server's /completion. `prompt`: a text, token ids, both mixed, or several of these."""

    prompt: Prompts


class ExtraFile(Request):
    """A piece of another file."""

    text: str
    filename: OrDefault[str] = "tmp"


class InfillRequest(NativeRequest, kw_only=True):
    """llama-server's /infill: text for the cursor's place in a file.

    - `prompt`: the part of the cursor's line that precedes the cursor.
    - `input_prefix`: the lines above.
    - `n_cache_reuse`: off in other requests; here an edit above the cursor should not require
      prefilling everything below it again.
    """

    n_cache_reuse: OrDefault[CacheReuse] = 32

    input_prefix: OrDefault[str] = ""
    input_suffix: OrDefault[str] = ""
    input_extra: OrDefault[Annotated[list[ExtraFile], Meta(max_length=10_000)]] = field(
        default_factory=list
    )
    prompt: OrDefault[str] = ""
