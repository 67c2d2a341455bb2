"""The models of a pair: opened, compared with each other, and checked before they are used."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from localspec.compatibility import Compatibility, compare_tokenizers
from localspec.engine.cache.prefixes import CopyCost
from localspec.engine.llama import (
    Batch,
    Context,
    ContextSettings,
    DecodeError,
    Model,
    NotFinite,
    Vocab,
    gpus,
    llama_version,
    read_tensor_names,
)
from localspec.engine.pair.profile import hash_identity
from localspec.engine.speculation.cost import CostTable
from localspec.engine.speculation.drafters.draft_model import PREFILL_WIDTH
from localspec.engine.speculation.warm_start import MAX_TEXT_TOKENS, OTHER_TEXTS, TEXTS
from localspec.errors import LoadFailed
from localspec.model_traits import (
    HEADS_ONLY_REASON,
    ExpertTensor,
    explain_no_text,
    explain_unreadable_layers,
    explain_wrong_sidecar,
    explain_wrong_trunk,
    sidecar_kind,
)
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.protocol.settings import (
    CPU_PASS_ROWS,
    KV_BLOCK_SIZE,
    PICTURE_PASS_ROWS,
    FlashAttention,
    KvType,
)

SMALL_MODEL_PARAMETERS = 4_000_000
SAMPLE_STRIDE = 41  # tokens between the beginnings of measured passes: nearly MAX_TEXT_TOKENS
SAMPLE_TOKENS = 8  # length of the text of a target behind which something is measured
ROLLBACK_SNAPSHOTS = 8  # recurrent snapshots of a context; each costs a copy of the state
# Nanoseconds that a thread takes to skip a cell, per head of a layer and row. Measured on a CPU with 24
# layers of 14 heads, where a row takes 1.45 ms more beside 9 000 idle cells on two threads.
IDLE_CELL_NS = 1.0
# The same for a cell that is attended to: a token takes 34 ms in a text of 1 000 tokens beside another as
# long, and 27 ms without.
CELL_NS = 30.0
# Without flash attention nothing is skipped: every row attends to every cell, idle ones included.
UNFUSED_CELL_NS = 25.0


@dataclass(frozen=True)
class PairModels:
    """Both models, opened and compared with each other, and the settings of their contexts.

    compared: what their vocabularies share; None without a draft. opened: closes what was opened, in
    reverse order. n_ctx: tokens. parallel: sequences of the shared lane. threads: for a large model.
    rows: of a pass. attention: of the shared lane. machines: other machines with layers of the target.
    reads_pictures: whether the target has a projector.
    """

    target: Model
    draft: Model | None
    compared: Compatibility | None
    settings: EngineSettings
    n_ctx: int
    parallel: int
    threads: int
    rows: int
    opened: ExitStack
    attention: FlashAttention = "auto"
    machines: tuple[str, ...] = ()
    reads_pictures: bool = False

    @property
    def sidecar(self) -> bool:
        """Whether the draft is a sidecar, which reads states of the target."""
        return self.draft is not None and self.draft.sidecar is not None

    @property
    def on_gpu(self) -> bool:
        return is_on_gpu(self.settings, self.machines)

    def make_context(
        self,
        model: Model,
        *,
        sequences: int,
        outputs: int,
        chooses: bool = False,
        heads: bool = False,
        target: Context | None = None,
        exact: bool = False,
        rows: int = 0,
    ) -> Context:
        """Make a context of one of the two models, or of MTP heads.

        target: for heads, the context whose cache they read. exact: it is for the exact lane. rows: of its
        passes, if not as many as all others have. A draft that cannot have a cache of the chosen type gets
        one of f16.

        Raises OutOfMemory, LoadFailed.
        """
        given, types = self.settings, self.settings.kv_types
        needs_f16 = model is self.draft and why_kv_type_unsupported(model, types)
        attention, n_ubatch = given.flash_attention if exact else self.attention, given.n_batch
        if chooses and not exact:  # only the target's shared lane reads prompts in wide passes
            n_ubatch = given.n_ubatch or n_ubatch
        if attention != given.flash_attention:
            n_ubatch = min(n_ubatch, PICTURE_PASS_ROWS if self.reads_pictures else CPU_PASS_ROWS)
        settings = ContextSettings(
            n_ctx=self.n_ctx,
            n_batch=rows or self.rows,
            n_ubatch=n_ubatch,
            n_seq=sequences,
            n_outputs=outputs,
            n_threads=choose_thread_count(model, self.threads),
            kv_types=("f16", "f16") if needs_f16 else types,
            n_rollback=0 if model.cuttable or heads else ROLLBACK_SNAPSHOTS,
            flash_attention=attention,
            choose_on_device=chooses,
            heads=heads,
            target=target,
        )
        return self.opened.enter_context(Context(model, settings))


def usable_cores() -> int:
    """Return the number of cores for this process, hyper-threads included. More threads would only wait."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return n_cores or 1


def physical_cores() -> int:
    """Return the number of physical cores for this process. Hyper-threads do not help matrix products."""
    n_logical, cpus = usable_cores(), Path("/sys/devices/system/cpu")
    try:
        siblings = cpus.glob("cpu[0-9]*/topology/thread_siblings_list")
        n_physical = len({file.read_text().strip() for file in siblings})
    except OSError:
        return n_logical
    return min(n_logical, n_physical or n_logical)


def is_on_gpu(settings: EngineSettings, machines: tuple[str, ...]) -> bool:
    """Return whether the target computes on a GPU, or on other machines, which count as one."""
    return settings.n_gpu_layers != 0 and bool(gpus() or machines)


def choose_thread_count(model: Model, threads: int) -> int:
    """Return the number of threads for a model. A small model is fastest on one, because threads wait."""
    return 1 if model.n_params < SMALL_MODEL_PARAMETERS else threads


def open_model(
    path: str,
    settings: EngineSettings,
    progress: Callable[[float], None],
    *,
    heads: bool = False,
    drafts: bool = False,
    devices: Sequence[int] = (),
) -> Model:
    """Open a model, with its weights where the settings want them.

    heads: with its MTP heads. drafts: it is the draft of a pair, and may consist of heads alone. devices:
    used in place of this machine's GPUs.

    Raises LoadFailed if it generates no text.
    """
    if drafts and sidecar_kind("", read_tensor_names(path)) == "mtp":
        heads = True  # It has nothing else.
    model = Model(
        path,
        n_gpu_layers=settings.n_gpu_layers,
        cpu_experts=settings.cpu_experts,
        split_mode=settings.split_mode,
        main_gpu=settings.main_gpu,
        extra_buffers=settings.extra_buffers,
        heads=heads,
        devices=devices,
        progress=progress,
    )
    if reason := "" if drafts and model.sidecar else _why_no_writer(model):
        model.close()
        raise LoadFailed(f"{path} cannot generate text: {reason}.")
    return model


def open_draft(
    open_with: Callable[..., Model], settings: EngineSettings, target_devices: Sequence[int]
) -> Model:
    """Open the draft as a whole on one GPU of this machine, because its steps are too short to be shared.

    Heads that read the target's cache go where the target's layers are. Otherwise llama.cpp would end the
    process.

    open_with: opens the draft as `open_model` does, with the given settings. target_devices: the target's
    devices, if they are on other machines.
    """
    draft_settings = msgspec.structs.replace(
        settings, n_gpu_layers=settings.draft_gpu_layers, cpu_experts=settings.draft_cpu_experts
    )
    draft = open_with(msgspec.structs.replace(draft_settings, split_mode="none"), drafts=True)
    if draft.reads_target_cache and (target_devices or len(gpus()) > 1):
        draft.close()
        draft = open_with(draft_settings, drafts=True, devices=target_devices)
    return draft


def _why_no_writer(model: Model) -> str:
    if model.vocab.size == 0:
        return "it has no tokens"
    if model.sidecar == "mtp" and not model.reads_target_cache:
        return HEADS_ONLY_REASON
    reason = explain_no_text(
        model.architecture,
        kind=model.metadata("general.type") or "",
        causal=model.attends_causally,
        pooling=model.read_int("pooling_type", 0),
    )
    return reason or ("it has an encoder" if model.has_encoder else "")


def why_kv_type_unsupported(model: Model, kv_types: tuple[KvType, KvType]) -> str:
    """Return why the model's cache cannot be of these types, as a clause; empty if it can."""
    for length, kv_type in zip(model.head_lengths, kv_types, strict=True):
        if kv_type != "f16" and length % KV_BLOCK_SIZE:
            return (
                f"its attention heads have {length} numbers, and {kv_type} keeps them in blocks of "
                f"{KV_BLOCK_SIZE}"
            )
    return ""


def check_pair(target: Model, draft: Model) -> Compatibility:
    """Return what the vocabularies share. Raises LoadFailed if the draft does not match the target."""
    compatibility = compare_tokenizers(target.vocab.tokenizer(), draft.vocab.tokenizer())
    reason = "" if compatibility.usable else compatibility.reason
    if draft.sidecar is not None:
        reason = _why_not_its_sidecar(target, draft) or reason
    if reason:
        raise LoadFailed(f"{draft.path} is not a matched draft for {target.path}: {reason}.")
    return compatibility


def samples_correctly_on_device(context: Context, batch: Batch) -> bool:
    """Whether the device samples the token that the logits say. Not every backend has every operation."""
    try:
        context.choose_on_device(0, True)
        make_pass_runner(context, batch)(2)
        sampled = [context.sampled_token(row) for row in range(2)]
    except DecodeError:
        return False
    finally:
        context.choose_on_device(0, False)
    # Each runner's first pass of a width has the same tokens.
    make_pass_runner(context, batch)(2)
    return sampled == [int(context.logits(row).argmax()) for row in range(2)]


def _why_not_its_sidecar(target: Model, sidecar: Model) -> str:
    """Return why a sidecar cannot read this target, as a clause; empty if it can.

    llama.cpp compares neither states nor caches, and would read beyond their end.
    """
    if sidecar.sidecar != "mtp":
        layers, width = sidecar.target_layers, sidecar.target_width
        if not layers:
            return ""  # This build does not show layers, which is said where drafts are made.
        shape = target.architecture, target.n_layer, target.n_embd
        return explain_unreadable_layers(*shape, layers, width)
    if reason := explain_wrong_sidecar(sidecar.architecture, target.architecture):
        return reason
    if sidecar.n_state != target.n_state:
        return f"its states have {sidecar.n_state} numbers, and the target's {target.n_state}"
    if not sidecar.reads_target_cache:
        return explain_wrong_trunk(sidecar.n_layer, target.n_layer)
    if sidecar.head_lengths != target.head_lengths:
        return "its attention heads have other lengths than the target's"
    return ""


@contextmanager
def hold_sample_text(target: Context, batch: Batch) -> Iterator[int]:
    """Put a text into the target's first sequence while its cache is needed, and yield its length."""
    batch.clear()
    for position in range(SAMPLE_TOKENS):
        batch.add(position % 7, position, 0, True)
    target.decode(batch)
    target.synchronize()
    try:
        yield SAMPLE_TOKENS
    finally:
        target.clear()


def check_finite_logits(context: Context, batch: Batch, n_before: int = 0) -> None:
    """Check that the model computes logits. Raises LoadFailed if they are NaN or infinite.

    Two tokens are tried, behind `n_before` others, and then two more: a file may hold anything for tokens
    that occur in no text.
    """
    size = context.n_vocab
    for tokens in ((0, 1), (size // 3, size // 2)):
        batch.clear()
        for offset, token in enumerate(tokens):
            batch.add(token, n_before + offset, 0, True)
        context.decode(batch)
        context.synchronize()
        try:
            for row in range(len(tokens)):
                context.finite_logits(row)
            return
        except NotFinite:
            continue
        finally:
            context.clear()  # no NaN may stay in the cells
    raise LoadFailed(
        f"{context.model.path} produces NaN or infinite values for any text: the file is "
        "damaged or was converted incorrectly. Download it again, or choose another."
    )


_samples = WeakKeyDictionary[Vocab, list[int]]()


def make_pass_runner(
    context: Context, batch: Batch, last_only: bool = False, n_before: int = 0, sequence: int = 0
) -> Callable[[int], None]:
    """Return a function that makes a pass of a given width, for measuring.

    It is behind the `n_before` tokens that the sequence holds. Its rows are consecutive tokens of texts of
    several kinds: which experts they choose, and how many in common, is a part of what a pass costs. Each
    pass of a width has other ones, and all widths have them at the same places.
    """
    tokens = _sample_tokens(context.model)
    counts = Counter[int]()

    def run(width: int) -> None:
        batch.clear()
        start = counts[width] * SAMPLE_STRIDE
        counts[width] += 1
        for offset in range(width):
            logits = not last_only or offset == width - 1
            token = tokens[(start + offset) % len(tokens)]
            batch.add(token, n_before + offset, sequence, logits)
        context.decode(batch)
        context.synchronize()
        context.remove(sequence, n_before)

    return run


def _sample_tokens(model: Model) -> list[int]:
    """Return tokens of code, prose, records, a dialogue and Chinese; any if the model has no vocabulary."""
    vocab = model.vocab
    if vocab not in _samples:
        texts = [
            vocab.tokenize(text, add_special=False, parse_special=False)[:MAX_TEXT_TOKENS]
            for text in (*TEXTS, *OTHER_TEXTS)
        ]
        tokens = [token for text in texts for token in text]
        _samples[vocab] = tokens or list(range(min(7, vocab.size)))
    return _samples[vocab]


def hash_profile_key(
    files: PairFiles, models: PairModels, measured: Mapping[str, bool] | None = None
) -> str:
    """Return a hash of what saved states, or `measured` costs, depend on: files, settings, machine, build."""
    given = models.settings
    gpu_layers = given.n_gpu_layers, given.draft_gpu_layers, given.split_mode, given.main_gpu
    cpu_experts = given.cpu_experts, given.draft_cpu_experts
    settings: dict[str, Any] = {
        "threads": models.threads,
        "gpus": gpus(),
        "gpu_layers": gpu_layers,
        **({} if given.own_heads else {"own_heads": False}),
        **({"cpu_experts": cpu_experts} if any(cpu_experts) else {}),
        "flash_attention": models.attention,
        "kv": "/".join(dict.fromkeys(given.kv_types)),
        "extra_buffers": given.extra_buffers,
        **({"machines": models.machines} if models.machines else {}),
    }
    if measured is not None:
        settings |= {"batch": given.n_batch, "parallel": models.parallel, **measured}
    elif models.target.rope_depends_on_context:
        settings["n_ctx"] = models.n_ctx
    return hash_identity(filter(None, (files.target, files.draft)), settings, llama_version())


def why_no_rollback(target: Context, draft: Context | None) -> str | None:
    """Return why drafts cannot be rolled back; None if they can."""
    for context, name in ((target, "target"), (draft, "draft")):
        if context is not None and not context.cuttable and context.n_rollback == 0:
            return f"the {name} ({context.model.description}) cannot roll back tokens"
    return None


def estimate_copy_cost(models: PairModels, costs: CostTable) -> CopyCost:
    """Return the cost of leaving other texts in the target's cache, and of reading them again."""
    target, has_flash = models.target, models.attention != "off"
    # The time that a GPU takes to skip cells was not measured.
    heads = 0 if models.on_gpu else target.n_layer * target.n_attention_heads
    threads = choose_thread_count(target, models.threads)
    heads_per_thread_ms = heads / threads / 1e6
    can_split = has_flash and threads > 1 and models.settings.kv_types == ("f16", "f16")
    return CopyCost(
        partial(costs.per_token_ms, PREFILL_WIDTH),
        cell_ms=heads_per_thread_ms * (IDLE_CELL_NS if has_flash else UNFUSED_CELL_NS),
        split_ms=heads_per_thread_ms * CELL_NS if can_split else 0.0,
    )


# What to try if memory does not hold what was planned: less and less, until it fits.
#
# The daemon plans by arithmetic on the files' headers (registry/header/fit.py). Only the driver knows how
# much memory is really free, so a load that fails for lack of memory is tried again with a smaller plan. The
# target's experts leave the GPU first, because a pass reads few of them. Then its layers do, because each
# step of the draft delays every token.

MIN_CONTEXT = 2048  # tokens
ASSUMED_LAYERS = 48  # if the target could not even be opened


class SmallerPlan(NamedTuple):
    """The next plan, what it reduces, and a sentence that says so."""

    settings: EngineSettings
    gives: Literal["experts", "layers", "context", "draft", "heads"]
    told: str


def choose_smaller_plan(
    settings: EngineSettings,
    layers: int,
    context: int,
    gpu: bool,
    heads: int = 0,
    experts: Sequence[ExpertTensor] = (),
) -> SmallerPlan | None:
    """Return the next plan; None if nothing is left to reduce.

    layers: of the target; 0: not known. context: the number of tokens that did not fit. heads: the target's
    own MTP heads that are loaded. experts: of the target, as `order_experts` returns them.
    """
    replace = msgspec.structs.replace
    n_apart, n_experts = settings.cpu_experts, len(experts)
    if gpu and settings.n_gpu_layers and n_apart < n_experts:
        # Little is missing at first, as the daemon's plan should fit. Each attempt takes a whole load.
        n_apart = min(n_apart + max(-(-n_experts // 16), n_apart // 2), n_experts)
        n_layers = len({expert.layer for expert in experts[:n_apart]})
        told = f"The experts of {n_layers} layers lie in main memory, because the GPU's is full."
        return SmallerPlan(replace(settings, cpu_experts=n_apart), "experts", told)
    if gpu and settings.n_gpu_layers:
        n_layers = (layers or ASSUMED_LAYERS) + 1  # the output counts as one
        n_placed = n_layers if settings.n_gpu_layers < 0 else min(settings.n_gpu_layers, n_layers)
        n_fewer = n_placed * 3 // 4 if n_placed > 4 else 0
        told = f"Only {n_fewer} layers of the target are on the GPU, because its memory is full."
        return SmallerPlan(replace(settings, n_gpu_layers=n_fewer), "layers", told)
    if context > MIN_CONTEXT:
        n_ctx = max(MIN_CONTEXT, context // 2)
        sentence = f"The context is limited to {n_ctx} tokens, because memory is full."
        return SmallerPlan(replace(settings, n_ctx=n_ctx), "context", sentence)
    if gpu and settings.draft_gpu_layers:
        sentence = "The draft runs on the CPU: the GPU is full."
        return SmallerPlan(replace(settings, draft_gpu_layers=0), "draft", sentence)
    if heads and settings.own_heads:
        sentence = "The model's MTP heads are left out, because memory is full."
        return SmallerPlan(replace(settings, own_heads=False), "heads", sentence)
    return None
