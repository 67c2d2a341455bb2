"""What goes over the socket about pairs and pulls: /localspec/pairs, /pulls, /gc.

Sizes in bytes, contexts in tokens, times in Unix seconds. A pull's state
is the PullState of registry/pulls/state.py as it is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from localspec.protocol.reading import OrDefault, Request
from localspec.protocol.settings import Pooling, UpstreamKind

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Source = Annotated[str, Meta(min_length=1, max_length=1024)]
File = Annotated[str, Meta(min_length=1, max_length=4096)]

# ---------------------------------------------------------------------------- requests


Variable = Annotated[str, Meta(max_length=1 << 16)]  # lists of hosts grow long


class Network(Struct, rename="upper"):
    """The variables of the asking shell that say how the hub is reached; what is not set there is not set.

    Paths are absolute. Proxies by their names in upper case, in whichever case they were set.
    """

    hf_token: Variable | None = None
    hf_token_path: Variable | None = None
    hf_home: Variable | None = None
    hf_hub_disable_implicit_token: Variable | None = None
    hf_endpoint: Variable | None = None
    hf_hub_offline: Variable | None = None
    transformers_offline: Variable | None = None
    http_proxy: Variable | None = None
    https_proxy: Variable | None = None
    all_proxy: Variable | None = None
    no_proxy: Variable | None = None
    ssl_cert_file: Variable | None = None
    ssl_cert_dir: Variable | None = None
    requests_ca_bundle: Variable | None = None
    curl_ca_bundle: Variable | None = None

    def __repr__(self) -> str:
        return "Network(…)"  # a token and passwords of proxies


class PullRequest(Request):
    """Pull a pair of the catalogue, or any model of the hub.

    `name`: a pair's, or OWNER/REPO[:QUANT or FILE.gguf], also as the hub's address of it. `draft`: the same
    of a repository, to draft for it; where neither that nor `no_draft` is given, one is proposed and
    used. `pair`: what to call the pair. `limit_rate`: bytes per second, 0: as fast as it comes.

    `network` is the asking shell's, for this pull alone; without it the daemon's own environment counts.
    It is refused over TCP, as `endpoint` is. `endpoint`, `token` and `offline` go before both, and
    another endpoint than theirs gets `token` and no other.
    """

    name: Source
    draft: Source | None = None
    no_draft: OrDefault[bool] = False
    pair: Name | None = None
    limit_rate: OrDefault[Annotated[int, Meta(ge=0, le=1 << 40)]] = 0
    network: Network | None = None
    endpoint: str | None = None  # HF_ENDPOINT: an http or https address
    token: str | None = None  # HF_TOKEN; kept for this pull alone
    offline: OrDefault[bool] = False  # HF_HUB_OFFLINE


class AddRequest(Request):
    """Make a pair of files on this disk, named by absolute paths or by Ollama's names (`qwen2.5:7b`).

    `hash_now` false: they are hashed when the pair is first loaded. `pooling`: the target is for
    embeddings, and makes one row of numbers of a text's so, whatever its file says.
    """

    name: Name
    target: File
    draft: File | None = None
    roles: OrDefault[
        Annotated[tuple[Literal["chat", "fim"], ...], Meta(min_length=1, max_length=2)]
    ] = ("chat",)
    replace: OrDefault[bool] = False
    pooling: Literal["mean", "cls", "last"] | None = None
    hash_now: OrDefault[bool] = True


class AddUpstreamRequest(Request):
    """Make a pair that another server answers for: a table of models.toml, with these keys. Nobody is
    contacted. `key_file` and `ca` are absolute paths; a key itself is sent nowhere.
    """

    name: Name
    upstream: File
    upstream_model: OrDefault[str] = ""
    upstream_kind: OrDefault[UpstreamKind] = "auto"
    key_env: OrDefault[str] = ""
    key_file: OrDefault[str] = ""
    ca: OrDefault[str] = ""
    fallback: OrDefault[str] = ""
    roles: OrDefault[
        Annotated[tuple[Literal["chat", "fim"], ...], Meta(min_length=1, max_length=2)]
    ] = ("chat",)
    replace: OrDefault[bool] = False


class CollectRequest(Request):
    dry_run: OrDefault[bool] = False


# ---------------------------------------------------------------------------- answers


# What drafts: a model of its own; heads in the target's file or in one beside it; the text itself, which all
# have that write; nothing, for an embedding model writes none; whatever another server has.
DraftKind = Literal["model", "mtp-embedded", "mtp-sidecar", "ngram", "none", "upstream"]


class Original(Struct):
    """A model as its makers publish it, for engines that read no GGUF. `vocabulary`: rows of token
    embeddings, 0 where the catalogue does not say.
    """

    repo: str
    vocabulary: int = 0


class PairEntry(Struct):
    """One line of the list. `fits`: whether this machine's free memory holds it, by its size.

    "partly": the GPU's memory does not, but with main memory it does. `problem`: a sentence about a file
    that is missing or has changed. `notes`: harmless differences and doubts. `kind`: what drafts: a model,
    heads (MTP) in the target's file or in that of the draft, the text itself (ngram), or, of a model that
    writes none, nothing; "upstream": another server answers, at the address in `target`. `takes`: bytes of
    memory, and `since` (Unix time), of one that is loaded. `originals`: of the target and of what drafts
    for it, where the catalogue names them.
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


class PairList(Struct):
    """`problems`: one sentence each: records and catalogues that cannot be read. `configured`: the pair that
    answers where none is named.
    """

    pairs: list[PairEntry]
    problems: list[str]
    ram: int
    vram: int
    configured: str = ""


class TemplateView(Struct):
    """A chat template: its text, and what that seems to have a place for. `length` in characters."""

    sha256: str
    length: int
    tools: bool
    system: bool
    text: str


class ModelView(Struct):
    """One model of a pair. `weights`, `cache` and `compute`: memory at the shown context.

    `types`: bytes of weights by tensor type. `licence`: as the file states it. `fim`: whether it has the
    tokens that filling in needs. `heads`: layers that predict further tokens (MTP). `pooling`: of an
    embedding model, how it makes one row of numbers of a text's; "rank": of a reranker.
    `width`: numbers of a token, and of an embedding.
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
    """The memory a pair needs with so many tokens of context. `fits` as in a list."""

    context: int
    needed: int
    fits: Literal["yes", "partly", "no"]


class NeedView(Struct):
    """Memory of one model: its weights, its cache, and what a pass needs."""

    weights: int = 0
    cache: int = 0
    compute: int = 0


class FitView(Struct):
    """What this machine's free memory allows, and the plan of a load. `gpu_layers` −1: all.

    `needed` is all of it: of both models, `prefixes` for prompts that have no slot, and the engine's own;
    `on_gpu` is what of it lies there. `others`: the context by types of cache that would allow a longer one.
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


# In Ollama's words.
Capability = Literal["completion", "insert", "tools", "thinking", "embedding", "rerank"]


class PairView(Struct):
    """Everything about one pair. `fit` None: it does not fit, and `fit_notes` says why.

    `kind` as in a list; of an "upstream" there are no files, and `target.path` is the server's address.
    `contexts`: doubling, up to what the models were trained for. `problem`: a
    sentence about a file that has changed. `calls`: how calls of tools are written; "" without a chat
    template.
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

    @property
    def capabilities(self) -> list[Capability]:
        """What it can be asked for."""
        if pooling := self.target.pooling:
            return ["rerank" if pooling == "rank" else "embedding"]
        found: list[Capability] = ["completion"]
        if self.kind == "upstream":
            return ["completion", "insert", "tools"] if self.target.fim else ["completion", "tools"]
        template = self.target.template
        if self.target.fim:
            found.append("insert")
        if template:
            found.append("tools")  # a template that knows none is told of them in the question
            if "think" in template.text or "reasoning" in template.text:
                found.append("thinking")
        return found


class RemovedView(Struct):
    """`kept`: files that stay although the pair is gone, each with the reason."""

    name: str
    freed: int
    kept: tuple[str, ...]


class CollectedView(Struct):
    freed: int
    files: tuple[str, ...]
    dry_run: bool


class FileReport(Struct):
    """`problem` is empty when the file is whole, as far as it is known: `hashed` is false where there is no
    hash to compare it with."""

    role: str
    file: str
    problem: str
    hashed: bool = True


class Verifying(Struct):
    """An event of /verify: bytes hashed so far; `files` only in the last one.

    `remedy`: what to do when one of them has a problem. `news`: own files that have changed.
    """

    name: str
    done: int
    size: int
    files: list[FileReport] | None = None
    remedy: str = ""
    news: str = ""
