"""Responses to clients: OpenAI's forms, llama-server's `timings`, and our own under `localspec`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from localspec.protocol.frames import PassCosts, Speculation, Timings, Verified
from localspec.protocol.pairs import Capability, FitView, ForecastView


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """One embedding: a list of numbers, or little-endian float32 in base64."""

    embedding: list[float] | str
    index: int
    object: Literal["embedding"] = "embedding"


class Unheeded(Struct):
    """Extensions of localspec in answers with no others: fields of the request without effect."""

    ignored: list[str]


class EmbeddingList(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
    localspec: Unheeded | UnsetType = UNSET


class NativeEmbedding(Struct):
    """llama-server's form of an embedding, with one row.

    `localspec` is in the first one only.
    """

    index: int
    embedding: list[list[float]]
    localspec: Unheeded | UnsetType = UNSET


class Ranked(Struct, omit_defaults=True):
    """One ranked document. `index`: its position in the request. `document`: on request."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RankedText(Struct, omit_defaults=True):
    """One ranked text. `localspec` is in the first one only."""

    index: int
    score: float
    text: str | None = None
    localspec: Unheeded | UnsetType = UNSET


class RankedList(Struct):
    """Ranked documents, the best first."""

    results: list[Ranked]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
    localspec: Unheeded | UnsetType = UNSET


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
    """Log-probabilities of a text.

    The first token of a prompt follows nothing, so its log-probabilities are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """vLLM's log-probability of a prompt's token or of a likelier one. `rank`: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class CalledFunction(Struct):
    """The function of a tool call. `arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class CustomInput(Struct):
    input: str
    name: str | UnsetType = UNSET


class CustomCall(Struct):
    """A call of a custom tool, in place of a `ToolCall`. In a stream it has an `index`."""

    custom: CustomInput
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


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
    function_call: CalledFunction | UnsetType = UNSET  # if the request has `functions`


class ChatChoice(Struct):
    index: int
    message: ChatAnswer
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: CalledDelta | UnsetType = UNSET


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
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class PromptProgress(Struct):
    """llama-server's progress of a prompt.

    - `total`: tokens of the prompt.
    - `cache`: tokens found in a cache.
    - `processed`: tokens prefilled by now, including cached ones.
    - `time_ms`: milliseconds since prefill began.
    - `remaining_ms`: the expected milliseconds of the rest, by what tokens at its depth have taken.
    """

    total: int
    cache: int
    processed: int
    time_ms: int
    remaining_ms: int | UnsetType = UNSET


class Ahead(Struct):
    """The work that precedes a request.

    - `position`: waiting requests before it.
    - `requests`: those and the running ones.
    - `prompt_tokens`: tokens of their prompts that are not prefilled yet.
    - `seconds`: the expected wait, estimated from earlier requests; null if nothing is known yet.
    """

    position: int
    requests: int
    prompt_tokens: int
    seconds: int | None


class Progress(Struct):
    """What an answer waits for before it begins.

    - `state`: "queued": other requests (`ahead`). "waiting": another pair that answers or loads.
      "loading": its own pair. "measuring": how long passes of its own pair take, at the end of its load.
      "reading": its prompt.
    - `pair`: the pair that it waits for.
    - `done`: 0…1, while loading or reading.
    - `prompt_tokens`: tokens of its prompt.
    - `seconds`: the time that reading still takes if no other prompt is read.
    """

    state: Literal["queued", "waiting", "loading", "measuring", "reading"]
    pair: str
    done: float = 0.0
    ahead: Ahead | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    seconds: int | UnsetType = UNSET


class ControlResult(Struct, omit_defaults=True):
    """The answer of /v1/chat/completions/control. `message`: why it had no effect."""

    success: bool
    message: str = ""


class StreamState(Struct):
    """A resumable stream, as llama-server describes it.

    - `started_at`, `completed_at`: Unix times; the second is 0 while the stream is written.
    """

    conversation_id: str
    is_done: bool
    total_bytes: int
    started_at: int
    completed_at: int


LengthLimit = Literal["tokens", "context", "loop"]


class Extra(Struct):
    """Extensions of localspec in an answer.

    - `news`: a change of the pair's files, or a problem in the configuration. It is reported once,
      with one answer.
    - `drafted`: (start, end) character spans of this chunk that came from a draft.
    - `not_kept`: why a complete answer was not saved in its conversation.
    - `limit`: the cause of the `finish_reason` "length": the requested number of tokens, a full
      context, or a loop.
    - `loop`: where the answer repeated itself without progress. Thoughts were then closed, and the
      answer went on; text was ended.
    - `ignored`: fields of the request without effect.
    - `passes`: with `timings_per_token`, for each target pass that produced tokens: drafted and
      accepted tokens, and the kind of the drafts ("" for none).
    """

    speculation: Speculation | UnsetType = UNSET
    note: str | UnsetType = UNSET
    news: str | UnsetType = UNSET
    drafted: list[tuple[int, int]] | UnsetType = UNSET
    conversation: str | UnsetType = UNSET
    not_kept: str | UnsetType = UNSET
    limit: LengthLimit | UnsetType = UNSET
    loop: Literal["thoughts", "text"] | UnsetType = UNSET
    progress: Progress | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    passes: list[Verified] | UnsetType = UNSET


Choices = list[ChatChoice] | list[ChunkChoice] | list[TextChoice]


class Completion(Struct):
    """A chat.completion, chat.completion.chunk or text_completion, as `object` says."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: Choices
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    localspec: Extra | UnsetType = UNSET


class ErrorDetail(Struct):
    """An error.

    `n_prompt_tokens` and `n_ctx` are given for a prompt that is too long, as in llama-server.
    """

    message: str
    type: str
    param: str | None
    code: str
    n_prompt_tokens: int | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class ErrorBody(Struct):
    error: ErrorDetail


class ModelMeta(Struct):
    """llama-server's `meta`: the served and the trained context in tokens, parameters, and bytes."""

    n_ctx: int
    n_ctx_train: int
    n_params: int
    size: int


class ModelStatus(Struct):
    """The status of a pair. `value` is as in llama-server.

    - `since`: when it was loaded (Unix time).
    - `memory`: bytes that it uses.
    """

    value: Literal["loaded", "loading", "unloaded"]
    since: int | UnsetType = UNSET
    memory: int | UnsetType = UNSET


class Model(Struct):
    """A pair in the list of models.

    `context_length` (tokens) and `capabilities` are given for pairs whose files can be read.
    """

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "localspec"
    context_length: int | UnsetType = UNSET
    capabilities: list[Capability] | UnsetType = UNSET
    meta: ModelMeta | UnsetType = UNSET
    status: ModelStatus | UnsetType = UNSET


class ModelList(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Figures(Struct):
    """Performance since the daemon started, of one pair or of all.

    - `first_text_ms`: median wait for the first text of an answer.
    - `cache_hits`: prompts whose beginning was in a slot, in memory or on disk, and those of which
      parts were moved ("shift").
    - `mean_depth`: drafts per target pass.
    - `accepted_at`: the fraction of each pass's first, second, … drafts that were accepted.
    - `speed_up`: over plain decoding, of answers with `measured_tokens` tokens altogether.
    - `prompt_per_second`: prefill rate at the beginning of a text, in tokens per second; of one pair
      always, the one used last.
    - `full_prompt_per_second`: prefill rate at the end of a full context.
    """

    first_text_ms: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_hits: dict[str, int] = {}
    mean_depth: float | None = None
    accepted_at: list[float] = []
    speed_up: float | None = None
    measured_tokens: int = 0
    prompt_per_second: float | None = None
    full_prompt_per_second: float | None = None


class PairStatus(Struct):
    """The status of a pair.

    - `progress`: 0…1 while loading.
    - `plan`: the memory that was free at the load, and how the pair uses it.
    - `memory`: bytes in use; null if not known.
    - `since`: when it was loaded (Unix time).
    - `running`, `waiting`: numbers of its requests.
    - `unloads_in`: seconds until it is unloaded if there is no request; null: never.
    - `keep`: it is not unloaded to make room for another pair.
    - `costs`: null for a model that generates no text.
    - `forecast`: what was expected of it before the load; null if it is unknown.
    - `plain_per_second`: its answers without drafts, as far as they had the engine for themselves; measured,
      or estimated beside drafts.
    - `figures`: of its answers since the daemon first used it.
    """

    name: str
    state: Literal["unloaded", "loading", "ready", "set_aside"]
    stage: str | None = None
    progress: float | None = None
    target: str | None = None
    draft: str | None = None
    n_ctx: int | None = None
    backend: str | None = None
    note: str | None = None
    plan: FitView | None = None
    pid: int | None = None
    since: float | None = None
    memory: int | None = None
    running: int = 0
    waiting: int = 0
    unloads_in: float | None = None
    keep: bool = False
    costs: PassCosts | None = None
    forecast: ForecastView | None = None
    plain_per_second: float | None = None
    figures: Figures = field(default_factory=Figures)


class UpstreamStatus(Struct):
    """A pair on another server, and its requests since the daemon started.

    - `kind`, `model`: null until the server was asked.
    - `away`: the server did not answer. It is tried again, and `fallback` answers meanwhile
      (`fallbacks` times so far).
    - `problem`: why it did not answer the last time.
    - `tokens_per_pass`: of the answers whose speculation was reported; null if there were none.
    """

    name: str
    place: str
    kind: str | None = None
    model: str | None = None
    away: bool = False
    problem: str = ""
    fallback: str | None = None
    running: int = 0
    requests: int = 0
    failed: int = 0
    fallbacks: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens_per_pass: float | None = None


class Counts(Struct):
    """Counters since the daemon started.

    - `requests`, `failed`, `cancelled`: generations.
    - `embeddings`: answered requests for vectors or rankings, with `embedded_texts` texts and
      `embedded_tokens` tokens.
    """

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    worker_starts: int = 0
    worker_deaths: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    embeddings: int = 0
    embedded_texts: int = 0
    embedded_tokens: int = 0


class Hashing(Struct):
    """A file that is being read for its SHA-256. `done` and `size` are bytes."""

    file: str
    done: int
    size: int


class Configured(Struct):
    """The configuration after it was read again.

    - `problems`: errors in it, and what could not be done.
    - `notes`: settings that the pair cannot have on this machine.
    - `origin`: environment variables and flags that override the file, by key.
    - `listen`, `token_file`: as in Status.
    """

    problems: list[str]
    notes: list[str]
    origin: dict[str, str]
    listen: str | None = None
    token_file: str | None = None


class Status(Struct):
    """The daemon's status, as /localspec/status returns it. Times are seconds.

    - `configured`: the pair that answers if a request names none.
    - `pair`: of the pairs in memory the one used last, or else the configured one. `worker_pid` is
      the process of its engine.
    - `pairs`: all pairs in memory or being loaded, in the same order.
    - `upstreams`: pairs on other servers that were used.
    - `running`, `waiting`, `counts`, `figures`: of all pairs. Each pair has its own.
    - `memory`: bytes that pairs may use; null: all free memory.
    - `pulls`: number of running pulls.
    - `problems`: edited files that cannot be read.
    - `hashing`: the file that a load or an addition waits for.
    - `listen`: URL of the TCP listener.
    - `token_file`: file with its bearer token.
    - `ahead`: the work that would precede a request for `pair` sent now.
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
    ahead: Ahead = field(default_factory=lambda: Ahead(0, 0, 0, 0))
    pairs: list[PairStatus] = []
    upstreams: list[UpstreamStatus] = []
    memory: int | None = None
    configured: str = ""
