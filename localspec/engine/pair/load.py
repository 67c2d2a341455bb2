"""Loading a pair: opening its files, making contexts, measuring passes.

`load_pair` tries drafts until one is good enough, `load_with_draft` opens the models, and `assemble_pair`
makes the rest of them. Each step is a function of what the steps before it returned. If memory does not hold
what the settings ask for, it is tried again with less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
    read_tensor_names,
    why_no_heads,
)
from localspec.engine.pair import models as pair_models
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
from localspec.engine.pair.models import PairModels
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
from localspec.engine.speculation.drafters.ngram import CAPACITY_TOKENS
from localspec.engine.speculation.warm_start import (
    MAX_TEXT_TOKENS,
    TEXTS,
    compare_other_texts,
    warm_start,
)
from localspec.errors import LoadFailed
from localspec.model_traits import order_experts
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.protocol.settings import CPU_PASS_ROWS, PICTURE_PASS_ROWS, FlashAttention

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


class Drafting(NamedTuple):
    """The drafter and the costs of its steps, or the reason why there is none, as a clause."""

    drafter: DraftModel | None
    costs: Costs | None
    no_draft: str


def use_or_measure(
    known: PassTimes | None, measure: Callable[[], PassTimes], max_rows_each: int = 0
) -> Costs:
    """Return the costs that an earlier load has left, else measure now.

    If others disturbed that, it is measured again in idle time. max_rows_each: as in `CostTable`.
    """
    measured = known or measure()
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

    Raises LoadFailed if a file cannot be loaded, or the two tokenizers differ.
    """
    try:  # a value of the wrong type or size, which llama.cpp would not notice
        msgspec.convert(msgspec.to_builtins(settings), EngineSettings)
    except msgspec.ValidationError as error:
        raise LoadFailed(f"The engine's settings are wrong: {error}.") from None
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

    Raises DraftFailed if the draft cannot be loaded, or does not match the target. Raises OutOfMemory if
    nothing smaller is left to try. Raises LoadFailed if the target cannot be loaded.
    """
    concessions: dict[str, str] = {}  # what was reduced, with the last sentence about it
    while True:
        notes = list(concessions.values())
        layers = n_heads = 0
        n_ctx, remote = settings.n_ctx or DEFAULT_CONTEXT, Remote([], ())
        stack = ExitStack()  # closes contexts before the models they were made from
        try:
            threads = choose_threads(settings, notes)
            remote = find_remote_devices(job.files, settings, notes)
            target = open_target(job, stack, settings, remote)
            job.opened(target)
            layers, n_heads = target.n_layer, target.n_heads
            n_ctx = min(n_ctx, target.n_ctx_train or DEFAULT_CONTEXT)
            models = open_beside(job, stack, target, settings, n_ctx, threads, remote)
            return assemble_pair(job, models, notes)
        except OutOfMemory as error:
            stack.close()
            on_gpu = pair_models.is_on_gpu(settings, remote.machines)
            experts = order_experts(read_tensor_names(job.files.target)) if on_gpu else ()
            plan = pair_models.choose_smaller_plan(
                settings, layers, n_ctx, on_gpu, n_heads, experts
            )
            if plan is None:
                raise OutOfMemory(
                    f"{error.message} Nothing smaller is left to try; close other programs, or choose a "
                    "smaller pair (localspec catalogue --fits)."
                ) from error
            settings = plan.settings
            concessions.pop(plan.gives, None)
            concessions[plan.gives] = plan.told
            job.notice(f"{error.message} {plan.told}")
        except BaseException:
            stack.close()
            raise


def choose_threads(settings: EngineSettings, notes: list[str]) -> int:
    """Return the number of threads, and add a note if it is smaller than requested.

    Raises LoadFailed if `main_gpu` is none of this machine's GPUs.
    """
    if (n_gpus := len(gpus())) and settings.main_gpu >= n_gpus:
        raise LoadFailed(
            f"`main_gpu` is {settings.main_gpu}, and this machine has {n_gpus}: 0 is the first. To "
            "restore the default: localspec config unset main_gpu"
        )
    threads = settings.n_threads or pair_models.physical_cores()
    if threads > (n_cores := pair_models.usable_cores()):
        used = f"only {n_cores} are used: one per core"
        notes.append(f"{threads} threads were requested, but {used}.")
    return min(threads, n_cores)


def find_remote_devices(files: PairFiles, settings: EngineSettings, notes: list[str]) -> Remote:
    """Return what other machines have for the target, and add a note for each that cannot be reached.

    Raises LoadFailed if a machine is needed and cannot be reached.
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


def open_target(job: LoadJob, stack: ExitStack, settings: EngineSettings, remote: Remote) -> Model:
    """Open the target. Raises LoadFailed if its cache cannot be of the type in the settings, OutOfMemory."""
    files, heads = job.files, job.files.draft is None and settings.own_heads
    progress = partial(job.progress, "target")
    target = pair_models.open_model(
        files.target, settings, progress, heads=heads, devices=remote.devices
    )
    stack.enter_context(target)
    if remote.machines:
        enable_keepalive(remote.machines)
    if reason := pair_models.why_kv_type_unsupported(target, settings.kv_types):
        of_values = not pair_models.why_kv_type_unsupported(target, (settings.type_kv, "f16"))
        key = "kv_type_v" if of_values and settings.type_v != "same" else "kv_type"
        kind = settings.kv_types[key == "kv_type_v"]
        raise LoadFailed(
            f"{files.target} does not take `{key}` {kind}: {reason}. To use f16: "
            f"localspec config set {key} f16"
        )
    return target


def open_beside(
    job: LoadJob,
    stack: ExitStack,
    target: Model,
    settings: EngineSettings,
    n_ctx: int,
    threads: int,
    remote: Remote,
) -> PairModels:
    """Open the draft, compare both models, and return them with the sizes of their contexts.

    Raises DraftFailed if the draft cannot be loaded, or does not match the target. Raises OutOfMemory.
    """
    path, draft, compared = job.files.draft, None, None
    try:
        if path is not None:
            progress = partial(job.progress, "draft")
            open_file = partial(pair_models.open_model, path, progress=progress)
            draft = stack.enter_context(pair_models.open_draft(open_file, settings, remote.devices))
            compared = pair_models.check_pair(target, draft)
    except OutOfMemory:
        raise
    except LoadFailed as error:
        raise DraftFailed(error.message) from error
    # Before llama.cpp chooses flash attention by itself, it asks each device whether it has the operation,
    # and its RPC backend says yes for every device. A worker whose GPU has no kernel for heads of such
    # lengths ends at the first pass, and this process with it. A quantized cache of values needs flash
    # attention.
    is_automatic = settings.flash_attention == "auto" and settings.kv_types[1] == "f16"
    if remote.machines and is_automatic and not target.supports_flash_attention:
        settings = msgspec.structs.replace(settings, flash_attention="off")
    on_gpu = pair_models.is_on_gpu(settings, remote.machines)
    reads_pictures = job.files.projector is not None
    attention, rows = choose_attention(target, draft, settings, n_ctx, on_gpu, reads_pictures)
    return PairModels(
        target,
        draft,
        compared,
        settings,
        n_ctx=n_ctx,
        parallel=settings.parallel if target.multi_sequence else 1,
        threads=threads,
        rows=rows,
        opened=stack,
        attention=attention,
        machines=remote.machines,
        reads_pictures=reads_pictures,
    )


def choose_attention(
    target: Model,
    draft: Model | None,
    settings: EngineSettings,
    n_ctx: int,
    on_gpu: bool,
    reads_pictures: bool,
) -> tuple[FlashAttention, int]:
    """Return whether the shared lane has flash attention, and the rows of its passes."""
    has_states = target.n_heads or (draft is not None and draft.sidecar is not None)
    attention, rows = settings.flash_attention, settings.n_batch
    if on_gpu:
        return attention, rows if has_states else rows * GPU_BATCH_FACTOR
    if target.cuttable:
        attention = settings.cpu_flash_attention(n_ctx)
    if has_states and attention != settings.flash_attention:
        # Only the states of rows that are computed at once can be read.
        rows = min(rows, PICTURE_PASS_ROWS if reads_pictures else CPU_PASS_ROWS)
    return attention, rows


def assemble_pair(job: LoadJob, models: PairModels, notes: list[str]) -> LoadedPair:
    """Make the contexts of opened models, measure their passes, and put the pair together.

    notes: sentences about what was reduced; those about the draft are added.
    """
    job.progress("profile", 0.0)
    context, batch = make_target_context(models), Batch(models.rows)
    draft, no_draft = make_draft_context(models, context, notes)
    with job.turn():
        pair_models.check_finite_logits(context, batch)
    no_rollback = pair_models.why_no_rollback(context, draft)
    chooses = can_choose_on_device(models, context, batch)
    key = pair_models.hash_profile_key(job.files, models, measured={"choose_on_device": chooses})
    profile = ProfileStore(_folder(models.settings.state_dir), key)
    stored = StoredProfile.of(profile.read())
    costs = measure_target(context, batch, stored, job.turn)
    prefixes, sessions = make_prefixes(job, models, costs.table)
    slots = make_slots(models, context, draft, prefixes)
    exact = ExactMode(models, draft, costs.table, prefixes, stored.exact_width)
    drafting = Drafting(None, None, no_draft)
    if draft is not None and no_rollback is None:
        make_room = slots.evict if draft.borrows else partial(_evict_draft, slots, exact)
        held = pair_models.hold_sample_text(context, batch) if draft.borrows else nullcontext(0)
        with held as n_before:
            drafting = make_drafter(job, models, draft, make_room, n_before, stored, notes)
    learned = make_learned(costs, drafting.costs, stored)
    exact.draft_with(drafting.drafter, learned.calibrations.answers)
    pair = LoadedPair(
        files=job.files,
        models=models,
        shared=make_lane(models, context, batch, slots, costs.table, stored),
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
    )
    pair.verdict = compare_draft(pair, job.turn)
    for conversation, tokens in sessions.load_texts(CAPACITY_TOKENS, models.target.vocab.size):
        pair.memory.add(tokens, conversation)
    job.progress("profile", 1.0)
    return pair


def _folder(path: str) -> Path | None:
    return Path(path) if path else None


def make_target_context(models: PairModels) -> Context:
    return models.make_context(
        models.target,
        sequences=models.parallel + _count_more_sequences(models.target, models.parallel),
        outputs=models.parallel * (MAX_DEPTH + 1) + MAX_DRAFTS,
        chooses=True,
    )


def _count_more_sequences(target: Model, parallel: int) -> int:
    """Return the number of sequences of the target besides those of the slots.

    One is for moving cached text. With a sliding window, one per slot keeps the cells behind the window.
    """
    if not target.cuttable:
        return 0
    return parallel if target.n_swa else 1


def make_slots(
    models: PairModels, context: Context, draft: Context | None, prefixes: PrefixStore
) -> Slots:
    n_slots, windowed = models.parallel, models.target.n_swa > 0
    first_more = n_slots if _count_more_sequences(models.target, n_slots) else None
    spare, first_pin = (None, first_more) if windowed else (first_more, None)
    return Slots(context, draft, 0, n_slots, prefixes, spare=spare, first_pin=first_pin)


def make_draft_context(
    models: PairModels, context: Context, notes: list[str]
) -> tuple[Context | None, str]:
    """Make a context of the draft model, or else of the target's heads, or return why there is none.

    context: the target's, which is still empty. It emits its states if heads read them.
    notes: gets a sentence if the draft has less than planned.
    """
    draft, n_texts = models.draft, models.parallel + 1  # one for the exact lane
    outputs = max(n_texts, 16)
    if draft is not None and draft.block_size:
        outputs = n_texts * (MAX_DEPTH + 1)
    elif draft is not None and draft.target_layers:
        outputs = LayerHeads.count_outputs(n_texts)
    make = partial(models.make_context, sequences=n_texts + 1, outputs=outputs)  # one for probes
    if draft is not None and not models.sidecar:
        if reason := pair_models.why_kv_type_unsupported(draft, models.settings.kv_types):
            notes.append(f"The draft's KV cache is f16: {reason}.")
        return make(draft), NO_DRAFT
    model = models.target if draft is None else draft
    if draft is None and not models.settings.own_heads:
        return None, LEFT_OUT
    if draft is None and not model.n_heads:
        return None, NO_DRAFT
    if reason := why_no_heads(model):
        return None, reason
    target = context if model.reads_target_cache or model.target_layers else None
    try:
        heads = make(model, heads=True, target=target)
    except OutOfMemory:
        raise
    except LoadFailed as error:
        notes.append(f"No drafts: {error.message}")
        return None, "llama.cpp cannot make a context of this model's MTP heads"
    context.emit_states(model.target_layers)
    return heads, NO_DRAFT


def can_choose_on_device(models: PairModels, context: Context, batch: Batch) -> bool:
    """Return whether the device chooses greedy tokens, so that no row of logits leaves the GPU.

    Over a network all rows of a pass travel together, and each token chosen there would need journeys of
    its own. With 5 ms each way, a pass of 8 rows took 228 ms, and one of 5 rows with logits 56 ms.
    """
    is_wanted = models.settings.choose_on_device
    if is_wanted is None:
        is_wanted = models.on_gpu and not models.machines
    return is_wanted and pair_models.samples_correctly_on_device(context, batch)


def measure_target(context: Context, batch: Batch, stored: StoredProfile, turn: HoldCpu) -> Costs:
    run, budget_s = pair_models.make_pass_runner(context, batch), measuring.BUDGET_S * 0.7
    measure = partial(measuring.measure_widths, run, budget_s, turn)
    max_rows_each = 0 if context.model.cuttable else context.n_rollback + 1
    return use_or_measure(stored.target, measure, max_rows_each)


def measure_draft(
    context: Context, batch: Batch, n_before: int, stored: StoredProfile, turn: HoldCpu
) -> Costs:
    """Return the costs of the draft's passes behind `n_before` tokens."""
    deadline = time.monotonic() + measuring.BUDGET_S * 0.3
    run, model = pair_models.make_pass_runner(context, batch, True, n_before), context.model
    # llama.cpp ends the process at a pass that is wider than the block of a selector.
    widest = model.block_size if model.n_selected else PREFILL_WIDTH
    widths = dict.fromkeys(min(width, widest) for width in (1, PREFILL_WIDTH, 2, 4, 16))
    measure = partial(measuring.measure_passes, run, widths, deadline, turn=turn)
    return use_or_measure(stored.draft, measure)


def make_drafter(
    job: LoadJob,
    models: PairModels,
    context: Context,
    make_room: Callable[[], bool],
    n_before: int,
    stored: StoredProfile,
    notes: list[str],
) -> Drafting:
    """Return the draft model, or heads, and what their steps cost.

    n_before: the number of tokens in the context's first sequence. notes: gets a sentence if the model is of
    no use.
    """
    kind = _choose_class(context)
    reads_states = context.heads and not context.model.block_size
    batch = StateBatch(models.rows, context.n_state) if reads_states else Batch(models.rows)
    try:
        with job.turn():
            pair_models.check_finite_logits(context, batch, n_before)
    except LoadFailed as error:
        notes.append(f"No drafts: {error.message}")
        called = _DRAFTERS[kind.kind].called
        return Drafting(None, None, f"NaN or infinite values from {called}")
    costs = measure_draft(context, batch, n_before, stored, job.turn)
    shared = SharedTokens()
    if models.compared is not None:
        shared = SharedTokens.of(models.target.vocab, context.model.vocab, models.compared)
    drafter = kind(
        context,
        batch,
        costs.table,
        make_room,
        models.parallel + 1,
        shared,
        pass_s=models.settings.pass_s,
        gap_s=models.settings.gap_s,
    )
    return Drafting(drafter, costs, "")


_DRAFTERS = {kind.kind: kind for kind in (ModelDrafter, MtpDrafter, EagleDrafter, BlockDrafter)}


def _choose_class(context: Context) -> type[DraftModel]:
    if context.model.block_size:
        return BlockDraft
    if context.model.target_layers:
        return LayerHeads
    return Sidecar if context.borrows else Heads if context.heads else DraftModel


def _evict_draft(slots: Slots, exact: ExactMode) -> bool:
    """Empty the draft's memory of an idle slot, of the exact lane if no other has any."""
    return slots.evict_draft() or (exact.made is not None and exact.made.slots.evict_draft())


def make_learned(costs: Costs, steps: Costs | None, stored: StoredProfile) -> LearnedProfile:
    """Return the costs of passes and drafts, and what earlier loads have learned of each kind of drafts."""
    return LearnedProfile(
        CostProfile(costs.table, steps.table if steps else None, stored.overhead_ms),
        stored.load_calibrations(Drafter.kinds),
        max(costs.noise, steps.noise if steps else 0.0),
    )


def compare_draft(pair: LoadedPair, turn: HoldCpu) -> Verdict | None:
    """Estimate the acceptance of a new draft and judge it, if that takes no longer than measuring.

    This is not possible with heads that read the target's cache, which has a text only in a slot.
    """
    drafter, lane = pair.drafter, pair.shared
    if drafter is None:
        if pair.no_draft == NO_DRAFT or pair.no_rollback is not None:
            return None
        return Verdict(0.0, f"A draft cannot be used: {pair.no_draft}.")
    calibration = pair.learned.calibrations.answers[drafter.kind]
    token_ms = lane.costs.per_token_ms(PREFILL_WIDTH) + drafter.token_prefill_ms
    if drafter.context.borrows or not calibration.is_unused:
        return None
    if token_ms * MAX_TEXT_TOKENS * len(TEXTS) > 1e3 * measuring.BUDGET_S:
        return None
    agreement = warm_start(lane.context, lane.batch, drafter, calibration, turn)
    if agreement.share < POOR_AGREEMENT:
        agreement += compare_other_texts(lane.context, lane.batch, drafter, turn)
    called = _DRAFTERS[drafter.kind].called
    return judge_agreement(called, agreement.share, heads=drafter.context.heads)


def make_prefixes(
    job: LoadJob, models: PairModels, costs: CostTable
) -> tuple[PrefixStore, SessionStore]:
    """Make the stores for texts that lose their slot: memory, and from there the disk."""
    settings = models.settings
    prefixes = PrefixStore(settings.prefix_bytes, pair_models.estimate_copy_cost(models, costs))
    key = pair_models.hash_profile_key(job.files, models)
    sessions = SessionStore(_folder(settings.states_dir), key, settings.states_bytes, job.notice)
    prefixes.dropped = sessions.save_dropped
    return prefixes, sessions


def make_lane(
    models: PairModels,
    context: Context,
    batch: Batch,
    slots: Slots,
    costs: CostTable,
    stored: StoredProfile,
) -> Lane:
    return Lane(
        context,
        batch,
        slots,
        costs,
        pass_s=models.settings.pass_s,
        gap_s=models.settings.gap_s,
        attention=stored.attention,
        on_gpu=models.on_gpu,
        reading=stored.reading,
    )
