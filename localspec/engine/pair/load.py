"""Loading a pair: opening its files, making contexts, measuring passes.

`load_pair` tries drafts until one is good enough, `load_with_draft` opens the models, and `assemble_pair`
makes the rest of them. Each step is a function of what the steps before it returned. If memory does not hold
what the settings ask for, it is tried again with less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from localspec.engine.cache.prefixes import PrefixStore
from localspec.engine.cache.sessions import SessionStore
from localspec.engine.cache.slots import Slots
from localspec.engine.llama import (
    Batch,
    Context,
    Model,
    OutOfMemory,
    StateBatch,
    connect,
    devices,
    enable_keepalive,
    gpus,
    why_no_heads,
    wide_vectors,
)
from localspec.engine.pair import models as placement
from localspec.engine.pair import profile as measuring
from localspec.engine.pair.candidates import (
    POOR_AGREEMENT,
    DraftCandidates,
    DraftFailed,
    Verdict,
    judge_agreement,
)
from localspec.engine.pair.exact import ExactMode
from localspec.engine.pair.lane import Lane
from localspec.engine.pair.models import (
    PairModels,
    check_finite_logits,
    check_pair,
    estimate_copy_cost,
    hash_profile_key,
    hold_sample_text,
    make_pass_runner,
    open_draft,
    open_model,
    physical_cores,
    samples_correctly_on_device,
    usable_cores,
    why_kv_type_unsupported,
    why_no_rollback,
)
from localspec.engine.pair.pair import NO_DRAFT, LoadedPair
from localspec.engine.pair.profile import (
    HoldCpu,
    LearnedProfile,
    PassTimes,
    ProfileStore,
    StoredProfile,
)
from localspec.engine.speculation.acceptance import MAX_DRAFTS
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.depth import MAX_DEPTH
from localspec.engine.speculation.drafters.base import Drafter
from localspec.engine.speculation.drafters.block import BlockDraft, BlockDrafter
from localspec.engine.speculation.drafters.draft_model import (
    PREFILL_WIDTH,
    DraftModel,
    ModelDrafter,
    SharedTokens,
)
from localspec.engine.speculation.drafters.eagle import EagleDrafter, LayerHeads
from localspec.engine.speculation.drafters.mtp import Heads, MtpDrafter, Sidecar
from localspec.engine.speculation.drafters.ngram import CAPACITY_TOKENS, NgramMemory
from localspec.engine.speculation.warm_start import (
    MAX_TEXT_TOKENS,
    TEXTS,
    compare_other_texts,
    warm_start,
)
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles

# On a GPU, a pass may read this many times n_batch tokens of a prompt, because it goes on to the next part by
# itself. When each part was a pass of its own, an H100 read 10 200 tokens/s instead of 11 500.
GPU_BATCH_FACTOR = 4
LEFT_OUT = "this pair's drafts were left out, because memory is better used for the target"
DEFAULT_CONTEXT = 8192  # tokens, if the settings name no context and the model allows it
Progress = Callable[[str, float], None]
Notice = Callable[[str], None]


def _ignore(_: object) -> None:
    pass


@dataclass(frozen=True)
class LoadJob:
    """The arguments that all attempts with one draft share; see `load_pair`."""

    files: PairFiles
    progress: Progress
    notice: Notice
    turn: HoldCpu
    opened: Callable[[Model], None]


class Remote(NamedTuple):
    """The devices for the target's layers if other machines have some, and those machines' addresses."""

    devices: list[int]
    machines: tuple[str, ...]


class Costs(NamedTuple):
    """The costs of passes, and how much others disturbed their measurement, from 0 to 1."""

    table: CostTable
    noise: float


class DraftContext(NamedTuple):
    """The context of a draft model or of the target's heads, or why there is none, as a clause."""

    context: Context | None
    no_draft: str = NO_DRAFT


class DrafterAndCosts(NamedTuple):
    """The drafter and the costs of its steps, or the reason why there is none, as a clause."""

    drafter: DraftModel | None
    costs: Costs | None
    no_draft: str


class Earlier(NamedTuple):
    """The profile of an earlier load, and the share of the processors that other programs use now."""

    stored: StoredProfile
    contention: float

    def costs(
        self,
        known: PassTimes | None,
        measure: Callable[[], PassTimes],
        max_rows_each: int = 0,
    ) -> Costs:
        """Return the table of an earlier load if it is good enough, else measure now.

        max_rows_each: as in `CostTable`.
        """
        measured = self.stored.use_or_measure(known, self.contention, measure)
        table = CostTable(measured.ms, max_rows_each=max_rows_each, change=measured.change)
        return Costs(table, measured.noise)


def load_pair(
    files: PairFiles,
    settings: EngineSettings,
    progress: Progress,
    notice: Notice = _ignore,
    turn: HoldCpu = nullcontext,
    opened: Callable[[Model], None] = _ignore,
) -> LoadedPair:
    """Load both models and measure their costs, with the first candidate for a draft that is good enough.

    notice: called with sentences for the log, from any thread. turn: each pass is made inside one. opened:
    called with the target each time that its file is open, while everything else is yet to be loaded.

    Raises:
        LoadFailed: A file cannot be loaded, or the two tokenizers differ.
    """
    _check_settings(settings)
    candidates = DraftCandidates(files, settings.state_dir)
    while True:
        draft = candidates.choose()
        chosen = msgspec.structs.replace(files, draft=draft)
        try:
            with candidates.trying(draft):
                pair = load_with_draft(LoadJob(chosen, progress, notice, turn, opened), settings)
        except (DraftFailed, OutOfMemory) as error:
            candidates.discard(draft, error)
            notice(error.message)
            continue
        candidates.record(draft, pair.verdict)
        if candidates.choose() == draft:
            pair.notes.extend(candidates.describe(draft, drafting=pair.drafter is not None))
            return pair
        pair.close()


def load_with_draft(job: LoadJob, settings: EngineSettings) -> LoadedPair:
    """Load both models and measure their costs. If memory does not hold them, less is tried.

    Raises:
        DraftFailed: The draft cannot be loaded, or does not match the target.
        OutOfMemory: Nothing smaller is left to try.
        LoadFailed: The target cannot be loaded.
    """
    files = job.files
    concessions: dict[str, str] = {}  # what was reduced, with the last sentence about it
    while True:
        contention, notes = measuring.Contention(), list(concessions.values())
        layers = n_heads = 0
        n_ctx, remote = settings.n_ctx or DEFAULT_CONTEXT, Remote([], ())
        stack = ExitStack()  # closes contexts before the models they were made from
        try:
            threads = choose_threads(settings, notes)
            remote = find_remote_devices(files, settings, notes)
            open_with = partial(_open_model, stack, job.progress)
            target = open_target(open_with, files, settings, remote)
            job.opened(target)
            layers, n_heads = target.n_layer, target.n_heads
            n_ctx = min(n_ctx, target.n_ctx_train or DEFAULT_CONTEXT)
            with _blaming_draft():
                open_file = partial(open_with, "draft", files.draft)
                draft = open_draft(open_file, settings, remote.devices) if files.draft else None
                models = plan_contexts(target, draft, settings, n_ctx, threads, remote, stack)
                models = replace(models, reads_pictures=files.projector is not None)
            return assemble_pair(job, models, notes, contention)
        except OutOfMemory as error:
            stack.close()
            plan = placement.choose_smaller_plan(
                settings, layers, n_ctx, is_on_gpu(settings, remote.machines), n_heads
            )
            if plan is None:
                raise _nothing_smaller(error) from error
            settings = plan.settings
            concessions.pop(plan.gives, None)
            concessions[plan.gives] = plan.told
            job.notice(f"{error.message} {plan.told}")
        except BaseException:
            stack.close()
            raise


def _check_settings(settings: EngineSettings) -> None:
    """Raise LoadFailed if a value has the wrong type or size, which llama.cpp would not notice."""
    try:
        msgspec.convert(msgspec.to_builtins(settings), EngineSettings)
    except msgspec.ValidationError as error:
        raise LoadFailed(f"The engine's settings are wrong: {error}.") from None


@contextmanager
def _blaming_draft() -> Iterator[None]:
    """Raise DraftFailed in place of LoadFailed."""
    try:
        yield
    except OutOfMemory:
        raise
    except LoadFailed as error:
        raise DraftFailed(error.message) from error


def _nothing_smaller(error: OutOfMemory) -> OutOfMemory:
    return OutOfMemory(
        f"{error.message} Nothing smaller is left to try; close other programs, or choose a smaller pair "
        "(localspec catalogue --fits)."
    )


# ------------------------------------------------------------------------ models


def is_on_gpu(settings: EngineSettings, machines: tuple[str, ...]) -> bool:
    """Return whether the target computes on a GPU, or on other machines, which count as one."""
    return settings.n_gpu_layers != 0 and bool(gpus() or machines)


def choose_threads(settings: EngineSettings, notes: list[str]) -> int:
    """Return the number of threads, and add a note if it is smaller than requested.

    Raises:
        LoadFailed: `main_gpu` is none of this machine's GPUs.
    """
    if (n_gpus := len(gpus())) and settings.main_gpu >= n_gpus:
        raise LoadFailed(
            f"`main_gpu` is {settings.main_gpu}, and this machine has {n_gpus}: 0 is the first. To "
            "restore the default: localspec config unset main_gpu"
        )
    threads = settings.n_threads or physical_cores()
    if threads > (n_cores := usable_cores()):
        notes.append(
            f"{threads} threads were requested, but only {n_cores} are used: one per core."
        )
        return n_cores
    return threads


def find_remote_devices(files: PairFiles, settings: EngineSettings, notes: list[str]) -> Remote:
    """Return what other machines have for the target, and add a note for each that cannot be reached.

    Raises:
        LoadFailed: A machine is needed and cannot be reached.
    """
    if not files.rpc or not settings.n_gpu_layers:
        return Remote([], ())
    reached, problems = connect(files.rpc)
    if problems and settings.rpc_needed:
        raise LoadFailed(
            f"{'; '.join(problems)}. Without it the target does not fit into memory. To serve its "
            "layers there: localspec rpc-worker"
        )
    notes += [f"{problem}: its layers are on this machine." for problem in problems]
    remote = [device for devices_there in reached.values() for device in devices_there]
    return Remote([*remote, *devices(gpus=True)] if remote else [], tuple(reached))


def _open_model(
    opened: ExitStack,
    progress: Progress,
    stage: str,
    path: str,
    settings: EngineSettings,
    **options: Any,
) -> Model:
    return opened.enter_context(open_model(path, settings, partial(progress, stage), **options))


def open_target(
    open_with: Callable[..., Model], files: PairFiles, settings: EngineSettings, remote: Remote
) -> Model:
    """Open the target. Raises LoadFailed if its cache cannot be of the type in the settings, OutOfMemory."""
    heads = files.draft is None and settings.own_heads
    target = open_with("target", files.target, settings, heads=heads, devices=remote.devices)
    if remote.machines:
        enable_keepalive(remote.machines)
    if reason := why_kv_type_unsupported(target, settings.kv_types):
        key = (
            "kv_type" if why_kv_type_unsupported(target, (settings.type_kv, "f16")) else "kv_type_v"
        )
        key = key if settings.type_v != "same" else "kv_type"
        kind = settings.kv_types[key == "kv_type_v"]
        raise LoadFailed(
            f"{files.target} does not take `{key}` {kind}: {reason}. To use f16: "
            f"localspec config set {key} f16"
        )
    return target


def plan_contexts(
    target: Model,
    draft: Model | None,
    settings: EngineSettings,
    n_ctx: int,
    threads: int,
    remote: Remote,
    opened: ExitStack,
) -> PairModels:
    """Compare both models with each other, and return them with the sizes of their contexts.

    Raises:
        LoadFailed: The draft does not match the target.
    """
    on_gpu = is_on_gpu(settings, remote.machines)
    if remote.machines:
        settings = _settings_for_workers(target, settings)
    compared = check_pair(target, draft) if draft else None
    has_states = target.n_heads or (draft is not None and draft.sidecar is not None)
    attention = settings.flash_attention
    if not on_gpu and not has_states and target.cuttable:
        attention = settings.cpu_flash_attention(n_ctx, wide=wide_vectors())
    return PairModels(
        target,
        draft,
        compared,
        settings,
        n_ctx=n_ctx,
        parallel=settings.parallel if target.multi_sequence else 1,
        threads=threads,
        rows=settings.n_batch * (GPU_BATCH_FACTOR if on_gpu and not has_states else 1),
        opened=opened,
        attention=attention,
        machines=remote.machines,
    )


def _settings_for_workers(target: Model, settings: EngineSettings) -> EngineSettings:
    """Return the settings without flash attention if a worker's GPU may not have it for this target.

    Before llama.cpp chooses flash attention by itself, it asks each device whether it has the operation, and
    its RPC backend says yes for every device. A worker whose GPU has no kernel for heads of such lengths ends
    at the first pass, and this process with it. A quantized cache of values needs flash attention.
    """
    is_automatic = settings.flash_attention == "auto" and settings.kv_types[1] == "f16"
    if not is_automatic or target.supports_flash_attention:
        return settings
    return msgspec.structs.replace(settings, flash_attention="off")


# ------------------------------------------------------------------------ pair


def assemble_pair(
    job: LoadJob, models: PairModels, notes: list[str], contention: measuring.Contention
) -> LoadedPair:
    """Make the contexts of opened models, measure their passes, and put the pair together.

    notes: sentences about what was reduced; those about the draft are added. contention: observed since the
    attempt began.
    """
    context, batch = make_target_context(models), Batch(models.rows)
    draft, no_draft = make_draft_context(models, context, notes)
    with job.turn():
        check_finite_logits(context, batch)
    no_rollback = why_no_rollback(context, draft)
    chooses = can_choose_on_device(models, context, batch)
    job.progress("profile", 0.0)
    profile = open_profile(job.files, models, chooses)
    earlier = Earlier(StoredProfile.of(profile.read()), contention.share)
    costs = measure_target(context, batch, earlier, job.turn)
    prefixes, sessions = make_prefixes(job, models, costs.table)
    slots = make_slots(models, context, draft, prefixes)
    exact = ExactMode(models, draft, costs.table, prefixes, earlier.stored.exact_width)
    drafting = DrafterAndCosts(None, None, no_draft)
    if draft is not None and no_rollback is None:
        make_room = slots.evict if draft.borrows else partial(_evict_draft, slots, exact)
        with hold_sample_text(context, batch) if draft.borrows else nullcontext(0) as n_before:
            drafting = make_drafter(job, models, draft, make_room, n_before, earlier, notes)
    learned = make_learned(costs, drafting, earlier.stored)
    exact.draft_with(drafting.drafter, learned.calibrations.answers)
    usable = no_rollback is None
    verdict = compare_draft(context, batch, drafting, learned, job.turn) if usable else None
    pair = LoadedPair(
        files=job.files,
        models=models,
        shared=make_lane(models, context, batch, slots, costs.table, earlier.stored),
        exact=exact,
        drafter=drafting.drafter,
        no_rollback=no_rollback,
        no_draft=drafting.no_draft,
        chooses_on_device=chooses,
        learned=learned,
        profile=profile,
        prefixes=prefixes,
        sessions=sessions,
        notes=notes,
        verdict=verdict,
        memory=load_memory(sessions, models.target.vocab.size),
    )
    job.progress("profile", 1.0)
    return pair


def make_slots(
    models: PairModels, context: Context, draft: Context | None, prefixes: PrefixStore
) -> Slots:
    """Make the slots of the shared lane."""
    first_more = models.parallel if _count_more_sequences(models) else None
    windowed = models.target.n_swa > 0
    return Slots(
        context,
        draft,
        0,
        models.parallel,
        prefixes,
        spare=None if windowed else first_more,
        first_pin=first_more if windowed else None,
    )


def make_target_context(models: PairModels) -> Context:
    """Make the context of the shared lane."""
    return models.make_context(
        models.target,
        sequences=models.parallel + _count_more_sequences(models),
        outputs=models.parallel * (MAX_DEPTH + 1) + MAX_DRAFTS,
        chooses=True,
    )


def make_draft_context(models: PairModels, context: Context, notes: list[str]) -> DraftContext:
    """Make a context of the draft model, or else of the target's heads.

    context: the target's, which is still empty. It emits its states if heads read them.
    notes: gets a sentence if the draft has less than planned.
    """
    sequences = models.parallel + 2  # one for the exact lane, one for probes
    outputs = max(models.parallel + 1, 16)
    if models.draft is not None and models.draft.block_size:
        outputs = (models.parallel + 1) * (MAX_DEPTH + 1)
    elif models.draft is not None and models.draft.target_layers:
        outputs = LayerHeads.count_outputs(models.parallel + 1)
    make = partial(models.make_context, sequences=sequences, outputs=outputs)
    draft = models.draft
    if draft is not None and not models.sidecar:
        if reason := why_kv_type_unsupported(draft, models.settings.kv_types):
            notes.append(f"The draft's KV cache is f16: {reason}.")
        return DraftContext(make(draft))
    model = models.target if draft is None else draft
    target = context if model.reads_target_cache or model.target_layers else None
    if draft is None and not models.settings.own_heads:
        return DraftContext(None, LEFT_OUT)
    if draft is None and not model.n_heads:
        return DraftContext(None)
    if reason := why_no_heads(model):
        return DraftContext(None, reason)
    try:
        heads = make(model, heads=True, target=target)
    except OutOfMemory:
        raise
    except LoadFailed as error:
        notes.append(f"No drafts: {error.message}")
        return DraftContext(None, "llama.cpp cannot make a context of this model's MTP heads")
    context.emit_states(model.target_layers)
    return DraftContext(heads)


def can_choose_on_device(models: PairModels, context: Context, batch: Batch) -> bool:
    """Return whether the device chooses greedy tokens, so that no row of logits leaves the GPU.

    Over a network all rows of a pass travel together, and each token chosen there would need journeys of
    its own. With 5 ms each way, a pass of 8 rows took 228 ms, and one of 5 rows with logits 56 ms.
    """
    is_wanted = models.settings.choose_on_device
    if is_wanted is None:
        is_wanted = is_on_gpu(models.settings, ()) and not models.machines
    return is_wanted and samples_correctly_on_device(context, batch)


def open_profile(files: PairFiles, models: PairModels, chooses_on_device: bool) -> ProfileStore:
    """Open the profile of costs, with what an earlier load has left there."""
    folder = models.settings.state_dir
    key = hash_profile_key(files, models, measured={"choose_on_device": chooses_on_device})
    return ProfileStore(Path(folder) if folder else None, key)


def measure_target(context: Context, batch: Batch, earlier: Earlier, turn: HoldCpu) -> Costs:
    """Return the costs of the target's passes."""
    run, budget_s = make_pass_runner(context, batch), measuring.BUDGET_S * 0.7
    max_rows_each = 0 if context.model.cuttable else context.n_rollback + 1
    measure = partial(measuring.measure_widths, run, budget_s, turn)
    return earlier.costs(earlier.stored.target, measure, max_rows_each)


def measure_draft(
    context: Context, batch: Batch, n_before: int, earlier: Earlier, turn: HoldCpu
) -> Costs:
    """Return the costs of the draft's passes behind `n_before` tokens."""
    deadline = time.monotonic() + measuring.BUDGET_S * 0.3
    run, model = make_pass_runner(context, batch, True, n_before), context.model
    # llama.cpp ends the process at a pass that is wider than the block of a selector.
    widest = model.block_size if model.n_selected else PREFILL_WIDTH
    widths = dict.fromkeys(min(width, widest) for width in (1, PREFILL_WIDTH, 2, 4, 16))
    measure = partial(measuring.measure_passes, run, widths, deadline, turn=turn)
    return earlier.costs(earlier.stored.draft, measure)


def make_drafter(
    job: LoadJob,
    models: PairModels,
    context: Context,
    make_room: Callable[[], bool],
    n_before: int,
    earlier: Earlier,
    notes: list[str],
) -> DrafterAndCosts:
    """Return the draft model, or heads, and what their steps cost.

    n_before: the number of tokens in the context's first sequence. notes: gets a sentence if the model is of
    no use.
    """
    heads = context.heads
    reads_states = heads and not context.model.block_size
    batch = StateBatch(models.rows, context.n_state) if reads_states else Batch(models.rows)
    try:
        with job.turn():
            check_finite_logits(context, batch, n_before)
    except LoadFailed as error:
        called = _DRAFTERS[_drafter_kind(context).kind].called
        notes.append(f"No drafts: {error.message}")
        return DrafterAndCosts(None, None, f"NaN or infinite values from {called}")
    costs = measure_draft(context, batch, n_before, earlier, job.turn)
    shared = SharedTokens()
    if models.compared is not None:
        shared = SharedTokens.of(models.target.vocab, context.model.vocab, models.compared)
    drafter = _drafter_kind(context)(
        context,
        batch,
        costs.table,
        make_room,
        models.parallel + 1,
        shared,
        pass_s=models.settings.pass_s,
        gap_s=models.settings.gap_s,
    )
    return DrafterAndCosts(drafter, costs, "")


_DRAFTERS = {kind.kind: kind for kind in (ModelDrafter, MtpDrafter, EagleDrafter, BlockDrafter)}


def _drafter_kind(context: Context) -> type[DraftModel]:
    """Return the class of what drafts with a context."""
    if context.model.block_size:
        return BlockDraft
    if context.model.target_layers:
        return LayerHeads
    return Sidecar if context.borrows else Heads if context.heads else DraftModel


def _evict_draft(slots: Slots, exact: ExactMode) -> bool:
    """Empty the draft's memory of an idle slot, of the exact lane if no other has any."""
    return slots.evict_draft() or (exact.made is not None and exact.made.slots.evict_draft())


def make_learned(costs: Costs, drafting: DrafterAndCosts, stored: StoredProfile) -> LearnedProfile:
    """Return the costs, and what earlier loads have learned of each kind of drafts."""
    steps = drafting.costs
    profile = CostProfile(costs.table, steps.table if steps else None, stored.overhead_ms)
    noise = max(costs.noise, steps.noise if steps else 0.0)
    calibrations = stored.load_calibrations(Drafter.kinds)
    return LearnedProfile(profile, calibrations, noise)


def compare_draft(
    context: Context,
    batch: Batch,
    drafting: DrafterAndCosts,
    learned: LearnedProfile,
    turn: HoldCpu,
) -> Verdict | None:
    """Estimate the acceptance of a new draft and judge it, if that takes no longer than measuring.

    This is not possible with heads that read the target's cache, which has a text only in a slot.
    """
    drafter = drafting.drafter
    if drafter is None:
        reason = drafting.no_draft
        return Verdict(0.0, f"A draft cannot be used: {reason}.") if reason != NO_DRAFT else None
    calibration = learned.calibrations.answers[drafter.kind]
    token_ms = learned.costs.target.per_token_ms(PREFILL_WIDTH) + drafter.token_prefill_ms
    if drafter.context.borrows or not calibration.is_unused:
        return None
    if token_ms * MAX_TEXT_TOKENS * len(TEXTS) > 1e3 * measuring.BUDGET_S:
        return None
    agreement = warm_start(context, batch, drafter, calibration, turn)
    if agreement.share < POOR_AGREEMENT:
        agreement += compare_other_texts(context, batch, drafter, turn)
    called = _DRAFTERS[drafter.kind].called
    return judge_agreement(called, agreement.share, heads=drafter.context.heads)


def make_prefixes(
    job: LoadJob, models: PairModels, costs: CostTable
) -> tuple[PrefixStore, SessionStore]:
    """Make the stores for texts that lose their slot: memory, and from there the disk."""
    settings = models.settings
    copy_cost = estimate_copy_cost(models, costs, is_on_gpu(settings, models.machines))
    prefixes = PrefixStore(settings.prefix_bytes, copy_cost)
    folder = Path(settings.states_dir) if settings.states_dir else None
    key = hash_profile_key(job.files, models)
    sessions = SessionStore(folder, key, settings.states_bytes, job.notice)
    prefixes.dropped = sessions.save_dropped
    return prefixes, sessions


def load_memory(sessions: SessionStore, n_vocab: int) -> NgramMemory:
    """Return the earlier texts to draft from, as they were when the pair was unloaded."""
    memory = NgramMemory()
    for conversation, tokens in sessions.load_texts(CAPACITY_TOKENS, n_vocab):
        memory.add(tokens, conversation)
    return memory


def make_lane(
    models: PairModels,
    context: Context,
    batch: Batch,
    slots: Slots,
    costs: CostTable,
    stored: StoredProfile,
) -> Lane:
    """Make the lane that many sequences share."""
    return Lane(
        context,
        batch,
        slots,
        costs,
        pass_s=models.settings.pass_s,
        gap_s=models.settings.gap_s,
        attention=stored.attention,
        on_gpu=is_on_gpu(models.settings, models.machines),
    )


def _count_more_sequences(models: PairModels) -> int:
    """Return the number of sequences of the target besides those of the slots.

    One is for moving cached text. With a sliding window, one per slot keeps the cells behind the window.
    """
    if not models.target.cuttable:
        return 0
    return models.parallel if models.target.n_swa else 1
