"""Pairs and pulls as they are sent over HTTP: /localspec/pairs, /pulls, /gc.

Sizes are bytes, contexts are tokens, times are Unix seconds. The state of a pull is sent as the
`PullState` of registry/pulls/messages.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.settings import Pooling, UpstreamKind
from localspec.protocol.tuned import TunedDraft

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Source = Annotated[str, Meta(min_length=1, max_length=1024)]
_Roles = Annotated[tuple[Literal["chat", "fim"], ...], Meta(min_length=1, max_length=2)]
FileName = Annotated[str, Meta(min_length=1, max_length=4096)]

EnvironmentValue = Annotated[str, Meta(max_length=1 << 16)]  # lists of hosts can be long


class Network(Struct, rename="upper"):
    """Environment variables of the client's shell that say how the hub is reached.

    A variable that is missing counts as unset. Paths are absolute. Proxy variables are given by
    their upper-case names, even if the shell has them in lower case.
    """

    hf_token: EnvironmentValue | None = None
    hf_token_path: EnvironmentValue | None = None
    hf_home: EnvironmentValue | None = None
    hf_hub_disable_implicit_token: EnvironmentValue | None = None
    hf_endpoint: EnvironmentValue | None = None
    hf_hub_offline: EnvironmentValue | None = None
    transformers_offline: EnvironmentValue | None = None
    http_proxy: EnvironmentValue | None = None
    https_proxy: EnvironmentValue | None = None
    all_proxy: EnvironmentValue | None = None
    no_proxy: EnvironmentValue | None = None
    ssl_cert_file: EnvironmentValue | None = None
    ssl_cert_dir: EnvironmentValue | None = None
    requests_ca_bundle: EnvironmentValue | None = None
    curl_ca_bundle: EnvironmentValue | None = None

    def __repr__(self) -> str:
        return "Network(…)"  # a token and passwords of proxies


class PullRequest(Request):
    """Pull a pair of the catalogue, or any model of the hub.

    - `name`: the name of a pair, or OWNER/REPO[:QUANT or FILE.gguf], also as its address on the
      hub.
    - `draft`: the same form for a repository whose model is to draft for it. With neither `draft`
      nor `no_draft`, a draft is proposed and used.
    - `no_projector`: leave out the file by which the target reads pictures.
    - `pair`: the name of the new pair.
    - `limit_rate`: bytes per second; 0: no limit.
    - `network`: the variables of the client's shell, for this pull alone. Without it the daemon's
      own environment counts. It is refused over TCP, and so is `endpoint`.
    - `endpoint`, `token`, `offline`: these override both environments. An endpoint that differs
      from theirs gets `token` and no other.
    """

    name: Source
    draft: Source | None = None
    no_draft: OrDefault[bool] = False
    no_projector: OrDefault[bool] = False
    pair: Name | None = None
    limit_rate: OrDefault[Annotated[int, Meta(ge=0, le=1 << 40)]] = 0
    network: Network | None = None
    endpoint: str | None = None  # HF_ENDPOINT: an http or https address
    token: str | None = None  # HF_TOKEN; kept for this pull alone
    offline: OrDefault[bool] = False  # HF_HUB_OFFLINE


class AddRequest(Request):
    """Make a pair of files on this disk.

    - `target`, `draft`: absolute paths, or Ollama's names (`qwen2.5:7b`).
    - `no_draft`: use no draft, not even a sidecar that lies beside the target.
    - `projector`: the file by which the target reads pictures. Without it and `no_projector`, one
      that lies beside the target is used.
    - `hash_now`: if false, the files are hashed when the pair is first loaded.
    - `pooling`: the target is an embedding model that pools this way, whatever its file says.
    """

    name: Name
    target: FileName
    draft: FileName | None = None
    no_draft: OrDefault[bool] = False
    projector: FileName | None = None
    no_projector: OrDefault[bool] = False
    roles: OrDefault[_Roles] = ("chat",)
    replace: OrDefault[bool] = False
    pooling: Literal["mean", "cls", "last"] | None = None
    hash_now: OrDefault[bool] = True


class AddUpstreamRequest(Request):
    """Make a pair that another server answers for: a table of models.toml with these keys.

    The server is not contacted. `key_file` and `ca` are absolute paths; the key itself is never
    sent.
    """

    name: Name
    upstream: FileName
    upstream_model: OrDefault[str] = ""
    upstream_kind: OrDefault[UpstreamKind] = "auto"
    key_env: OrDefault[str] = ""
    key_file: OrDefault[str] = ""
    ca: OrDefault[str] = ""
    fallback: OrDefault[str] = ""
    roles: OrDefault[_Roles] = ("chat",)
    replace: OrDefault[bool] = False


class CollectRequest(Request):
    dry_run: OrDefault[bool] = False


# What drafts for a target: a model of its own; MTP heads in the target's file or in a separate one; another
# sidecar; the text itself, which every generating pair can use; nothing, of an embedding model; or whatever
# another server has.
DraftKind = Literal[
    "model",
    "mtp-embedded",
    "mtp-sidecar",
    "eagle3",
    "dflash",
    "dspark",
    "ngram",
    "none",
    "upstream",
]


class Original(Struct):
    """A model in its makers' format, for engines that do not read GGUF.

    - `vocabulary`: rows of token embeddings; 0 if the catalogue does not say.
    """

    repo: str
    vocabulary: int = 0


class Interval(Struct, frozen=True):
    """Tokens per second between bounds that four of five should keep. `likely`: null if it is unknown."""

    low: float
    likely: float | None
    high: float


class ForecastView(Struct, frozen=True):
    """What is expected of a pair on this machine, from its header, the plan and earlier loads.

    - `plain`: writing without drafts. `reading`: of a prompt; null if it is unknown.
    - `drafted`: writing with drafts; null without a draft. Where nobody has published how many of them are
      accepted, it reaches from none to 80 %, and nothing in it is likely.
    - `acceptance`: accepted tokens per drafted one by kind of work, as published; empty: unknown.
    - `loads`: the models loaded here that it was learned from; 0: the speeds of a usual workstation.
    """

    plain: Interval
    reading: Interval | None
    drafted: Interval | None
    acceptance: dict[str, float]
    loads: int


class PairEntry(Struct):
    """A pair as lists show it.

    - `here`: its files are on this disk.
    - `kind`: what drafts for the target: a model, heads (MTP) in the target's file or in that of
      the draft, the text itself (ngram), or nothing for a model that writes no text. "upstream":
      another server answers, at the address in `target`.
    - `fits`: whether its size fits into the free memory of this machine. "partly": not into GPU
      memory alone, but together with main memory.
    - `problem`: a sentence about a file that is missing or has changed.
    - `notes`: harmless differences and doubts.
    - `takes`: bytes of memory, of a loaded pair.
    - `since`: when it was loaded (Unix time).
    - `originals`: the original models of the target and of its draft, if the catalogue names them.
    - `forecast`: how fast it should be, in the list of the catalogue; null if that cannot be told.
    - `advice`: what of a pair that does not fit would.
    """

    name: str
    source: Literal["builtin", "hub", "own", "catalogue", "upstream"]
    here: bool
    loaded: bool = False
    summary: str = ""
    roles: tuple[str, ...] = ("chat",)
    licence: str = ""
    size: int | None = None
    target: str = ""
    draft: str | None = None
    aliases: tuple[str, ...] = ()
    memory: str = ""
    fits: Literal["yes", "partly", "no"] | None = None
    hybrid: bool = False
    reported: str = ""
    kind: DraftKind = "model"
    year: int = 0
    context: int = 0
    problem: str = ""
    notes: tuple[str, ...] = ()
    takes: int | None = None
    since: float | None = None
    originals: tuple[Original, ...] = ()
    forecast: ForecastView | None = None
    advice: str = ""


class PairList(Struct):
    """All pairs.

    - `problems`: one sentence for each record or catalogue that cannot be read.
    - `configured`: the pair that answers if a request names none.
    """

    pairs: list[PairEntry]
    problems: list[str]
    ram: int
    vram: int
    configured: str = ""


class TemplateView(Struct):
    """A chat template: its text, and what it appears to support. `length` is in characters."""

    sha256: str
    length: int
    tools: bool
    system: bool
    text: str


class ModelView(Struct):
    """One model of a pair.

    - `weights`, `cache`, `compute`: memory at the shown context.
    - `types`: bytes of weights by tensor type.
    - `licence`: as the file states it.
    - `fim`: it has the tokens needed for fill-in-the-middle.
    - `heads`: layers that predict further tokens (MTP).
    - `pooling`: how an embedding model makes one vector of a text; "rank" for a reranker.
    - `width`: elements of a token's vector, and of an embedding.
    """

    file: str
    path: str
    repo: str
    revision: str
    sha256: str
    architecture: str
    parameters: int
    layers: int
    context: int
    vocabulary: int
    size: int
    rollback: Literal["full", "short", "snapshots", "none"]
    has_template: bool
    weights: int
    cache: int
    compute: int
    quantization: str
    types: dict[str, int]
    licence: str
    template: TemplateView | None
    fim: bool
    heads: int
    pooling: Pooling | None = None
    width: int = 0


class ContextView(Struct):
    """The memory that a pair needs with this many tokens of context. `fits` is as in a list."""

    context: int
    needed: int
    fits: Literal["yes", "partly", "no"]


class NeedView(Struct, frozen=True):
    """Memory of one model: its weights, its cache, and the buffers of a pass."""

    weights: int = 0
    cache: int = 0
    compute: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute


class FitView(Struct):
    """The plan of a load: what the free memory of this machine allows.

    - `gpu_layers`: layers on the GPU; -1: all.
    - `cpu_moe_layers`: the first layers whose experts lie in main memory, in whole or in part, although the
      layers are on the GPU.
    - `rate`: the estimated tokens per second.
    - `needed`: all memory: of both models, of `prefixes` and of the engine itself.
    - `on_gpu`: the part of it in GPU memory.
    - `prefixes`: memory for prompts that have no slot.
    - `others`: types of cache that would allow a longer context, with that context.
    """

    context: int
    draft: bool
    gpu_layers: int
    needed: int
    free: int
    target: NeedView
    drafting: NeedView
    prefixes: int
    others: dict[str, int]
    on_gpu: int = 0
    cpu_moe_layers: int = 0
    rate: float = 0.0


# Ollama's names.
Capability = Literal["completion", "insert", "tools", "thinking", "vision", "embedding", "rerank"]


class ProjectorView(Struct):
    """The file by which a target reads pictures. `kind`: its type in llama.cpp."""

    file: str
    path: str
    repo: str
    size: int
    kind: str


class PairView(Struct):
    """Everything about one pair.

    - `fit`: null if the pair does not fit; `fit_notes` then says why.
    - `kind`: as in a list. An "upstream" pair has no files, and `target.path` is the server's
      address.
    - `contexts`: each twice the one before, up to the context that the models were trained for.
    - `problem`: a sentence about a file that has changed.
    - `calls`: how tool calls are written; "" without a chat template.
    - `tuned`: the draft that `localspec tune` made, and that is used in place of the pair's own.
    - `projector`: the file by which the target reads pictures.
    - `rpc`: the machines that hold layers of the target, as models.toml names them.
    - `forecast`: how fast it should be; null if it does not fit, or that cannot be told.
    """

    name: str
    source: Literal["builtin", "hub", "own", "upstream"]
    summary: str
    licence: str
    roles: tuple[str, ...]
    created: float
    size: int
    target: ModelView
    draft: ModelView | None
    matched: bool | None
    reason: str
    notes: tuple[str, ...]
    context: int
    needed: int
    fit: FitView | None
    fit_notes: tuple[str, ...]
    loaded: bool
    kind: DraftKind
    contexts: list[ContextView]
    problem: str
    calls: str = ""
    tuned: TunedDraft | None = None
    projector: ProjectorView | None = None
    rpc: tuple[str, ...] = ()
    forecast: ForecastView | None = None

    @property
    def capabilities(self) -> list[Capability]:
        """What the pair can be used for."""
        if pooling := self.target.pooling:
            return ["rerank" if pooling == "rank" else "embedding"]
        capabilities: list[Capability] = ["completion"]
        if self.kind == "upstream":
            return ["completion", "insert", "tools"] if self.target.fim else ["completion", "tools"]
        template = self.target.template
        if self.target.fim:
            capabilities.append("insert")
        if template:
            # A template without support for tools still gets them, in the text of the question.
            capabilities.append("tools")
            if "think" in template.text or "reasoning" in template.text:
                capabilities.append("thinking")
        if self.projector:
            capabilities.append("vision")
        return capabilities


class RemovedView(Struct):
    """The result of removing a pair. `kept` lists files that stay, each with the reason."""

    name: str
    freed: int
    kept: tuple[str, ...]


class CollectedView(Struct):
    freed: int
    files: tuple[str, ...]
    dry_run: bool


class FileReport(Struct):
    """The result of checking one file.

    - `problem`: empty if the file is intact, as far as is known.
    - `hashed`: false if there is no hash to compare it with.
    """

    role: str
    file: str
    problem: str
    hashed: bool = True


class Verifying(Struct):
    """An event of /verify.

    - `done`: bytes hashed so far.
    - `files`: only in the last event.
    - `remedy`: what to do if a file has a problem.
    - `news`: files of the user's own that have changed.
    """

    name: str
    done: int
    size: int
    files: list[FileReport] | None = None
    remedy: str = ""
    news: str = ""


# Models on this disk as they are sent over HTTP: /localspec/disk, /drafts. Sizes in bytes.


class DiskRequest(Request):
    """A request for the models on this disk.

    - `folders`: absolute paths that are searched in addition to the places where programs keep
      models.
    - `environment`: the variables of the client's shell that say where those places are.
    """

    folders: OrDefault[Annotated[list[FileName], Meta(max_length=64)]] = field(default_factory=list)
    environment: OrDefault[dict[str, str]] = field(default_factory=dict)


class DraftsRequest(Request):
    """A request for the models that could draft for a target.

    - `target`: the name of a pair, whose target is meant, an absolute path, or a name of Ollama's.
    """

    target: FileName
    folders: OrDefault[Annotated[list[FileName], Meta(max_length=64)]] = field(default_factory=list)
    measure: OrDefault[bool] = False


class DraftGain(Struct):
    """The measured benefit of a draft, with 95 % intervals.

    - `acceptance`: per drafted token.
    - `speed_up`: over the target alone, at `depth`, the depth that pays best. If it is below 1 at
      every depth, the daemon does not draft.
    - `low`, `high`: the interval of `speed_up`.
    """

    acceptance: float
    acceptance_low: float
    acceptance_high: float
    speed_up: float
    low: float
    high: float
    depth: int


class DraftView(Struct):
    """A possible draft: a model, a sidecar, or the target's own MTP heads.

    - `path`, `size`: the draft's file and its bytes of weights. For the target's own heads, the
      target's file, and what the heads take of it.
    - `ratio`: the target's bytes of weights divided by the draft's.
    - `reason`: why it does not match, if it does not.
    - `gain`: present if it was measured.
    - `tied`: the measurement does not distinguish it from the one before it.
    - `file`: the name that `add` takes for it: its name in Ollama, or its path. It is empty for
      the target's own heads, which draft where no other draft is named.
    - `kind`: what it drafts with.
    - `forecast`: how fast the target should be with it, for one that matches and fits.
    """

    name: str
    path: str
    origin: str
    size: int
    ratio: float
    matched: bool
    reason: str
    notes: tuple[str, ...] = ()
    gain: DraftGain | None = None
    tied: bool = False
    file: str = ""
    kind: DraftKind = "model"
    forecast: ForecastView | None = None


class Drafts(Struct):
    """An event of /drafts: the draft being measured, or in the last one the list, best first.

    - `plain`: the speed of the target alone in tokens per second, if it was measured.
    - `file`: the name that `add` takes for the target.
    - `pair`: a free name for a pair of it.
    """

    target: str
    measuring: str = ""
    plain: float | None = None
    drafts: list[DraftView] | None = None
    file: str = ""
    pair: str = ""


class DiskModel(Struct):
    """A model on this disk.

    - `origin`: the program that put it there.
    - `size`: bytes of weights.
    - `problem`: why it cannot be used.
    - `drafts`: paths of the models that can draft for it, the best first as far as is known without
      measuring.
    """

    name: str
    path: str
    origin: str
    size: int
    problem: str = ""
    drafts: tuple[str, ...] = ()


class Disk(Struct):
    """An event of /disk: the folder being searched, or in the last one everything found.

    - `pairs`: pairs worth making, each in the form that POST /localspec/pairs takes.
    - `problems`: one sentence for each place that could not be searched.
    """

    looking: str = ""
    models: list[DiskModel] | None = None
    pairs: list[AddRequest] = []
    problems: list[str] = []
