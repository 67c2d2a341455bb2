"""The models of a pair: opened, compared with each other, and tried before they are used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from localspec.compatibility import Compatibility, compare
from localspec.engine.cache.prefixes import CopyCost
from localspec.engine.llama import (
    Batch,
    Context,
    ContextSettings,
    DecodeError,
    Model,
    NotFinite,
    gpus,
    llama_version,
)
from localspec.engine.pair.profile import identity
from localspec.engine.speculation.cost import CostTable
from localspec.engine.speculation.drafters.model import PREFILL_WIDTH
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.protocol.settings import KV_BLOCK, SCORED_ROWS, FlashAttention, KvType
from localspec.purpose import is_sidecar, no_writer, not_its_sidecar

SMALL_MODEL = 4_000_000  # parameters
SOME_TEXT = 8  # tokens of a target's that something is measured behind
ROLLBACK = 8  # recurrent snapshots asked for: each costs a copy of the state
# Nanoseconds of a thread that one head of a layer takes to skip a cell in one row: measured on a CPU, with
# 24 layers of 14 heads, a row is 1.45 ms dearer beside 9 000 idle cells on two threads.
IDLE_CELL_NS = 1.0
# The same of a cell that is attended to: a text of 1 000 tokens is written at 34 ms each beside another as
# long and at 27 without.
CELL_NS = 30.0
# Without flash attention nothing is skipped: every row attends to every cell, and to idle ones in vain.
SCORED_CELL_NS = 25.0


@dataclass(frozen=True)
class Models:
    """Both models, opened and compared with each other, and what contexts are made with.

    compared: what their vocabularies share; None without a draft. opened: closes what was opened, in
    the other order. n_ctx: tokens; parallel: sequences of the shared lane; threads: of a large model;
    rows: of a pass; attention: of the shared lane. machines: others that have layers of the target.
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

    @property
    def sidecar(self) -> bool:
        """Are it MTP heads in a file of their own that draft?"""
        return self.draft is not None and is_sidecar(self.draft.architecture)

    def context(
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
        """A context of one of the two, or of the target's heads, in its file or beside it: then `target` is
        whose cache they read. A draft that does not take the cache's type has f16. exact: for that lane.
        rows: of its passes, where not as many as all others have.

        Raises:
            OutOfMemory, LoadFailed
        """
        types = self.settings.kv_types
        odd = model is self.draft and takes_not(model, types)
        attention = self.settings.flash_attention if exact else self.attention
        at_once = self.settings.n_batch
        if attention != self.settings.flash_attention:
            at_once = min(at_once, SCORED_ROWS)
        settings = ContextSettings(
            n_ctx=self.n_ctx,
            n_batch=rows or self.rows,
            n_ubatch=at_once,
            n_seq=sequences,
            n_outputs=outputs,
            n_threads=threads_for(model, self.threads),
            kv_types=("f16", "f16") if odd else types,
            n_rollback=0 if model.cuttable or heads else ROLLBACK,
            flash_attention=attention,
            chooses=chooses,
            heads=heads,
            target=target,
        )
        return self.opened.enter_context(Context(model, settings))


def usable_cores() -> int:
    """Cores this process may use, hyper-threads among them: more threads than these wait for each other."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def physical_cores() -> int:
    """Cores this process may use; hyper-threads do not help matrix products."""
    logical = usable_cores()
    try:
        pairs = set()
        for cpu in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
            pairs.add(cpu.read_text().strip())
        return max(1, min(logical, len(pairs) or logical))
    except OSError:
        return logical


def threads_for(model: Model, threads: int) -> int:
    """Small models are faster on one thread: waiting for the other ones costs more than they do."""
    return 1 if model.n_params < SMALL_MODEL else threads


def open_model(
    path: str,
    settings: EngineSettings,
    progress: Callable[[float], None],
    *,
    heads: bool = False,
    drafts: bool = False,
    devices: Sequence[int] = (),
) -> Model:
    """The model, its weights where the settings want them; `heads`: with its MTP heads. drafts: it is the
    draft of a pair, and may be heads alone. devices: in place of this machine's GPUs.

    Raises LoadFailed if it generates no text.
    """
    model = Model(
        path,
        n_gpu_layers=settings.n_gpu_layers,
        split_mode=settings.split_mode,
        main_gpu=settings.main_gpu,
        extra_buffers=settings.extra_buffers,
        heads=heads,
        devices=devices,
        progress=progress,
    )
    if reason := "" if drafts and is_sidecar(model.architecture) else _why_no_writer(model):
        model.close()
        raise LoadFailed(f"{path} cannot generate text: {reason}.")
    return model


def open_draft(
    opened: Callable[..., Model], settings: EngineSettings, elsewhere: Sequence[int]
) -> Model:
    """The draft on one GPU of this machine, whole: its steps are too short to be shared. A sidecar reads the
    target's cache, so it goes wherever the target's layers have: llama.cpp ends the process else.

    opened: opens it as `open_model` does, with such settings. elsewhere: the target's devices, if not ours.
    """
    there = msgspec.structs.replace(settings, n_gpu_layers=settings.draft_gpu_layers)
    draft = opened(msgspec.structs.replace(there, split_mode="none"), drafts=True)
    if is_sidecar(draft.architecture) and (elsewhere or len(gpus()) > 1):
        draft.close()
        draft = opened(there, drafts=True, devices=elsewhere)
    return draft


def _why_no_writer(model: Model) -> str:
    if model.vocab.size == 0:
        return "it has no tokens"
    architecture = model.metadata("general.architecture") or ""
    pooling = model.metadata(f"{architecture}.pooling_type") or ""
    reason = no_writer(
        architecture,
        kind=model.metadata("general.type") or "",
        causal=model.metadata(f"{architecture}.attention.causal") != "false",
        pooling=int(pooling) if pooling.isdecimal() else 0,
    )
    return reason or ("it has an encoder" if model.has_encoder else "")


def takes_not(model: Model, kv_types: tuple[KvType, KvType]) -> str:
    """Why the model's cache cannot be of these types, as a clause; empty where it can."""
    for length, kv_type in zip(model.head_lengths, kv_types, strict=True):
        if kv_type != "f16" and length % KV_BLOCK:
            return (
                f"its attention heads have {length} numbers, and {kv_type} keeps them in blocks of "
                f"{KV_BLOCK}"
            )
    return ""


def check_pair(target: Model, draft: Model) -> Compatibility:
    """What their vocabularies share. Raises LoadFailed where the draft cannot draft for the target."""
    found = compare(target.vocab.tokenizer(), draft.vocab.tokenizer())
    reason = "" if found.usable else found.reason
    if is_sidecar(draft.architecture):
        reason = _why_not_its_sidecar(target, draft) or reason
    if reason:
        raise LoadFailed(f"{draft.path} is not a matched draft for {target.path}: {reason}.")
    return found


def chooses_rightly(context: Context, batch: Batch) -> bool:
    """Does the device choose what the logits say? Not every backend has every operation."""
    run = runner(context, batch)
    try:
        context.choose_on_device(0, True)
        run(2)
        sampled = [context.sampled_token(row) for row in range(2)]
    except DecodeError:
        return False
    finally:
        context.choose_on_device(0, False)
    run(2)
    return sampled == [int(context.logits(row).argmax()) for row in range(2)]


def _why_not_its_sidecar(target: Model, sidecar: Model) -> str:
    """Why heads in a file of their own cannot read this target's states and cache, as a clause; empty: they
    can. llama.cpp compares neither, and would read beyond what is there.
    """
    if reason := not_its_sidecar(sidecar.architecture, target.architecture):
        return reason
    if sidecar.n_state != target.n_state:
        return f"its states have {sidecar.n_state} numbers, and the target's {target.n_state}"
    if sidecar.head_lengths != target.head_lengths:
        return "its attention heads have other lengths than the target's"
    return ""


@contextmanager
def some_text(target: Context, batch: Batch) -> Iterator[int]:
    """Have a text in the target's first sequence, for what reads its cache; how many tokens."""
    batch.clear()
    for at in range(SOME_TEXT):
        batch.add(at % 7, at, 0, True)
    target.decode(batch)
    target.synchronize()
    try:
        yield SOME_TEXT
    finally:
        target.clear()


def check_numbers(context: Context, batch: Batch, first: int = 0) -> None:
    """Does the model say anything? Raises LoadFailed where its logits are no numbers.

    Two tokens are tried, behind the `first` there are, then others: those that no text has may be
    anything in the file.
    """
    size = context.n_vocab
    for tokens in ((0, 1), (size // 3, size // 2)):
        batch.clear()
        for at, token in enumerate(tokens):
            batch.add(token, first + at, 0, True)
        context.decode(batch)
        context.synchronize()
        try:
            for row in range(len(tokens)):
                context.finite(row)
            return
        except NotFinite:
            continue
        finally:
            context.clear()  # of a NaN nothing may stay in the cells
    raise LoadFailed(
        f"{context.model.path} produces NaN or infinite values for any text: the file is "
        "damaged or was converted incorrectly. Download it again, or choose another."
    )


def runner(
    context: Context, batch: Batch, last_only: bool = False, first: int = 0
) -> Callable[[int], None]:
    """A pass of a given width over a sequence of `first` tokens, for measuring."""

    def run(width: int) -> None:
        batch.clear()
        for at in range(width):
            batch.add(at % 7, first + at, 0, not last_only or at == width - 1)
        context.decode(batch)
        context.synchronize()
        context.remove(0, first)

    return run


def key_of(files: PairFiles, models: Models, measured: Mapping[str, bool] | None = None) -> str:
    """A hash of what saved states depend on, or what is `measured`: files, settings, machine, build."""
    s = models.settings
    settings = {
        "threads": models.threads,
        "gpus": gpus(),
        "gpu_layers": [s.n_gpu_layers, s.draft_gpu_layers, s.split_mode, s.main_gpu],
        "flash_attention": models.attention,
        "kv": "/".join(dict.fromkeys(s.kv_types)),
        "extra_buffers": s.extra_buffers,
        **({"machines": models.machines} if models.machines else {}),
    }
    if measured is not None:
        settings |= {
            "batch": s.n_batch,
            "parallel": models.parallel,
            **measured,
        }
    elif models.target.turns_by_context:
        settings["n_ctx"] = models.n_ctx
    paths = [files.target] + ([files.draft] if files.draft else [])
    return identity(paths, settings, llama_version())


def why_no_rollback(target: Context, draft: Context | None) -> str | None:
    """Why drafts cannot be taken back, if they cannot."""
    for context, name in ((target, "target"), (draft, "draft")):
        if context is not None and not context.cuttable and context.n_rollback == 0:
            description = context.model.description
            return f"the {name} ({description}) cannot roll back tokens"
    return None


def copy_cost_of(models: Models, costs: CostTable, on_gpu: bool) -> CopyCost:
    """What it costs a pass that the texts of others stay in the target's cache, and to read them again."""
    target, flash = models.target, models.attention != "off"
    # What a GPU takes to skip cells was not measured.
    heads = 0 if on_gpu else target.n_layer * target.n_attention_heads
    threads = threads_for(target, models.threads)
    each = heads / threads / 1e6
    splits = flash and threads > 1 and models.settings.kv_types == ("f16", "f16")
    return CopyCost(
        partial(costs.per_token_ms, PREFILL_WIDTH),
        cell_ms=each * (IDLE_CELL_NS if flash else SCORED_CELL_NS),
        split_ms=each * CELL_NS if splits else 0.0,
    )
