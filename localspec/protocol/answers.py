"""What clients get back: OpenAI's shapes, plus llama-server's `timings` and ours under `localspec`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from localspec.protocol.frames import Speculation, Timings, Verified
from localspec.protocol.pairs import Capability, FitView


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """`embedding`: numbers, or the bytes of float32, little-endian, in base64."""

    embedding: list[float] | str
    index: int
    object: Literal["embedding"] = "embedding"


class Unheeded(Struct):
    """Ours, in answers that have no more of it: fields of the request that changed nothing."""

    ignored: list[str]


class EmbeddingList(Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
    localspec: Unheeded | UnsetType = UNSET


class NativeEmbedding(Struct):
    """llama-server's: one row, since the rows of a text's tokens become one. `localspec`: in the first."""

    index: int
    embedding: list[list[float]]
    localspec: Unheeded | UnsetType = UNSET


class Ranked(Struct, omit_defaults=True):
    """`index`: of the document in the request; it is repeated where that was asked for."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RankedText(Struct, omit_defaults=True):
    """`localspec`: in the first."""

    index: int
    score: float
    text: str | None = None
    localspec: Unheeded | UnsetType = UNSET


class RankedList(Struct):
    """The best document first."""

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
    """The first token of a prompt follows nothing, so that its log-probabilities are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct):
    """vLLM's, of a token of a prompt or of one that is likelier there; `rank` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


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
    function_call: CalledFunction | UnsetType = UNSET  # where `functions` were sent


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
    """llama-server's: tokens of a prompt, those found in a cache, those read by now with them, and
    milliseconds since it was begun.
    """

    total: int
    cache: int
    processed: int
    time_ms: int


class Ahead(Struct):
    """What is before a request: `position` others that wait, `requests` with those that run, and of their
    prompts so many tokens that are still to be read. `seconds`: until it gets a place, as expected by what
    others took; null: nothing is known yet.
    """

    position: int
    requests: int
    prompt_tokens: int
    seconds: int | None


class Progress(Struct):
    """What an answer waits for: other requests ("queued", `ahead`), another pair that answers or loads
    ("waiting", and `pair` is that one), its own that loads (`done`: 0…1), or its prompt ("reading", `done`
    of `prompt_tokens`; `seconds`: what that still takes if nobody else's is read).
    """

    state: Literal["queued", "waiting", "loading", "reading"]
    pair: str
    done: float = 0.0
    ahead: Ahead | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    seconds: int | UnsetType = UNSET


class Extra(Struct):
    """Ours. `drafted`: (start, end) character spans of this chunk that came from the draft.

    `news`: what happened to the pair's files, or is wrong in the configuration, said with one answer and
    not again. `not_kept`: why the answer is not in its conversation, said when it is complete. `limit`:
    what a `finish_reason` of "length" means, as many tokens as were asked for or a full context. `ignored`:
    fields of the request that changed nothing. `passes`: under `timings_per_token`, of each target pass that
    wrote how many tokens were drafted and accepted, and the drafts' kind ("": it had none).
    """

    speculation: Speculation | UnsetType = UNSET
    note: str | UnsetType = UNSET
    news: str | UnsetType = UNSET
    drafted: list[tuple[int, int]] | UnsetType = UNSET
    conversation: str | UnsetType = UNSET
    not_kept: str | UnsetType = UNSET
    limit: Literal["tokens", "context"] | UnsetType = UNSET
    progress: Progress | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    passes: list[Verified] | UnsetType = UNSET


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
    prompt_progress: PromptProgress | UnsetType = UNSET
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


class OllamaError(Struct):
    """Ollama's, with no more than a sentence."""

    error: str


class ModelMeta(Struct):
    """llama-server's: the context that is served and the one that was trained for, in tokens; bytes."""

    n_ctx: int
    n_ctx_train: int
    n_params: int
    size: int


class ModelStatus(Struct):
    """`value` as llama-server has it; of a pair that is loaded `since` (Unix time) and `memory` in bytes."""

    value: Literal["loaded", "loading", "unloaded"]
    since: int | UnsetType = UNSET
    memory: int | UnsetType = UNSET


class Model(Struct):
    """`context_length`, in tokens, and `capabilities` are told of pairs whose files can be read."""

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


class PassCosts(Struct):
    """What passes of the target and of the draft cost at load, in milliseconds by their width in tokens, and
    what a round costs beside them.
    """

    target_ms: dict[int, float]
    draft_ms: dict[int, float]
    overhead_ms: float


class PairStatus(Struct):
    """`state`: unloaded, loading, ready or set_aside; `progress` 0…1 while loading. `plan`: the memory
    that was free at the load, and what of it the pair is to use; `memory`: bytes of that, null where it is
    not known. `since`: Unix time. `running` and `waiting`: its requests. `unloads_in`: seconds, if nobody
    asks; null: never. `keep`: it leaves for no other pair. `costs`: null of a model that writes nothing.
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


class UpstreamStatus(Struct):
    """A pair that another server answers for, and its requests since the daemon started. `kind` and
    `model`: null until it was asked. `away`: it did not answer and is tried again, and `fallback` answers
    (`fallbacks` times so far); `problem`: why it did not, the last time. `tokens_per_pass`: of the answers
    whose speculation was told; null: of none.
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
    """Since the daemon started. `requests` to `cancelled`: generations. `embeddings`: requests for vectors
    or rankings that were answered, with so many texts and their tokens.
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


class Figures(Struct):
    """How answers went since the daemon started.

    `first_text_ms`: median wait for an answer's first text. `cache_hits`: prompts that began in a
    slot, in memory or on the disk, and those of which parts were moved ("shift"). `mean_depth`:
    drafts per target pass. `accepted_at`: the share of each pass's first, second, … drafts that
    were accepted. `speed_up`: over plain decoding, of answers with `measured_tokens` together.
    `prompt_per_second`: tokens of prompts that are
    read, at a text's beginning; `full_prompt_per_second`: where the context is full.
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


class Hashing(Struct):
    """A file that is read whole for its SHA-256, in bytes."""

    file: str
    done: int
    size: int


class Configured(Struct):
    """The configuration after it was read again.

    `problems`: what is wrong in it or could not be done. `notes`: what of it the pair does not get on this
    machine. `origin`: variables and flags that come before the file, by key. `listen`, `token_file`: as
    in Status.
    """

    problems: list[str]
    notes: list[str]
    origin: dict[str, str]
    listen: str | None = None
    token_file: str | None = None


class Status(Struct):
    """/localspec/status. Times in seconds. `pulls` run; `problems`: files edited and not readable.
    `hashing`: what a pair that is to be loaded or added waits for.

    `configured`: the pair that answers where none is named. `pair` is the one that was asked last of those
    in memory, else the configured one; `worker_pid` its engine's. `pairs`: all that are in memory or being
    loaded, the same order. `running`, `waiting`: of all pairs. `upstreams`: those of other servers that
    were asked. `memory`: bytes that pairs may have, null: as many as are free.

    `listen`: the URL of the TCP listener, and `token_file` where its bearer token lies. `ahead`: of a
    request for `pair` that came now.
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
