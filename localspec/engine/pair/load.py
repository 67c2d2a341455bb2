"""Loading a pair: opening its files, making contexts, measuring passes.

If memory does not hold what the settings ask for, it is tried again with less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

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
from localspec.engine.speculation.drafters.draft_model import (
    PREFILL_WIDTH,
    DraftModel,
    ModelDrafter,
    SharedTokens,
)
from localspec.engine.speculation.drafters.mtp import Heads, MtpDrafter, Sidecar
from localspec.engine.speculation.warm_start import MAX_TEXT_TOKENS, TEXTS, warm_start
from localspec.errors import LoadFailed
from localspec.model_traits import is_sidecar
from localspec.protocol.frames import EngineSettings, PairFiles

# On a GPU, a pass may read this many times n_batch tokens of a prompt, because it goes on to the next part by
# itself. When each part was a pass of its own, an H100 read 10 200 tokens/s instead of 11 500.
GPU_BATCH_FACTOR = 4
DEFAULT_CONTEXT = 8192  # tokens, if the settings name no context and the model allows it
Progress = Callable[[str, float], None]
Notice = Callable[[str], None]


def _ignore(_: object) -> None:
    pass


def load_pair(
    files: PairFiles,
    settings: EngineSettings,
    progress: Progress,
    notice: Notice = _ignore,
    turn: HoldCpu = nullcontext,
    opened: Callable[[Model], None] = _ignore,
) -> LoadedPair:
    """Load both models and measure their costs. If memory does not hold them, less is tried.

    notice: called with sentences for the log, from any thread. turn: each pass is made inside one. opened:
    called with the target each time that its file is open, while everything else is yet to be loaded.

    Raises:
        LoadFailed: A file cannot be loaded, or the two tokenizers differ.
    """
    try:
        msgspec.convert(msgspec.to_builtins(settings), EngineSettings)
    except msgspec.ValidationError as error:  # llama.cpp would not check the value
        raise LoadFailed(f"The engine's settings are wrong: {error}.") from None
    concessions: dict[str, str] = {}  # what was reduced, with the last sentence about it
    while True:
        attempt = _LoadAttempt(files, settings, progress, list(concessions.values()), turn, opened)
        try:
            return attempt.pair(notice)
        except OutOfMemory as error:
            attempt.opened.close()
            plan = placement.choose_smaller_plan(
                settings, attempt.layers, attempt.n_ctx, attempt.on_gpu
            )
            if plan is None:
                raise LoadFailed(
                    f"{error.message} Nothing smaller is left to try; close other programs, or choose "
                    "a smaller pair (localspec catalogue --fits)."
                ) from error
            settings = plan.settings
            concessions.pop(plan.gives, None)
            concessions[plan.gives] = plan.told
            notice(f"{error.message} {plan.told}")
        except BaseException:
            attempt.opened.close()
            raise


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


class _LoadAttempt:
    """One attempt to load a pair.

    opened: must be closed if it fails. layers, n_ctx: of the target, as far as they are known.
    """

    def __init__(
        self,
        files: PairFiles,
        settings: EngineSettings,
        progress: Progress,
        notes: list[str],
        turn: HoldCpu,
        target_opened: Callable[[Model], None],
    ) -> None:
        self.opened = ExitStack()  # closes contexts before the models they were made from
        self.layers, self.n_ctx = 0, settings.n_ctx or DEFAULT_CONTEXT
        self._files = files
        self._settings = settings
        self._progress = progress
        self._notes = notes
        self._turn = turn
        self._target_opened = target_opened
        self._no_draft = NO_DRAFT
        self._contention = measuring.Contention()
        self._stored = StoredProfile(None, None, 1.0)
        self._contention_share = 0.0  # share of the processors that others use
        self._noise = 0.0  # of what is measured
        self._machines: tuple[str, ...] = ()  # other machines, which have layers of the target

    def pair(self, notice: Notice) -> LoadedPair:
        """Load the pair: all steps, in the order in which they depend on each other."""
        models = self._open_models()
        context, batch = self._make_target_context(models), Batch(models.rows)
        draft = self._make_draft_context(models, context)
        if draft is not None and draft.heads:
            context.emit_states()
        with self._turn():
            check_finite_logits(context, batch)
        no_rollback = why_no_rollback(context, draft)
        chooses = self._chooses_on_device(context, batch)
        self._progress("profile", 0.0)
        profile = self._open_profile(
            hash_profile_key(self._files, models, measured={"choose_on_device": chooses})
        )
        costs = self._target_costs(context, batch)
        prefixes, sessions = self._make_prefixes(costs, models, notice)
        spare_sequence = models.parallel if _can_move(models.target) else None
        slots = Slots(context, draft, 0, models.parallel, prefixes, spare=spare_sequence)
        borrows = draft is not None and draft.borrows
        with hold_sample_text(context, batch) if borrows else nullcontext(0) as n_before:
            drafter, steps = self._make_drafter(
                models,
                draft if no_rollback is None else None,
                slots.evict
                if borrows
                else lambda: any(lane.slots.evict_draft() for lane in pair.lanes),
                n_before,
            )
        learned = self._make_learned(costs, steps)
        if drafter is not None:
            self._warm_start(context, batch, drafter, learned)
        pair = LoadedPair(
            files=self._files,
            models=models,
            shared=self._make_lane(context, batch, slots, costs),
            exact=ExactMode(models, draft, costs, prefixes, self._stored.exact_width, drafter),
            drafter=drafter,
            no_rollback=no_rollback,
            no_draft=self._no_draft,
            chooses_on_device=chooses,
            learned=learned,
            profile=profile,
            prefixes=prefixes,
            sessions=sessions,
            notes=self._notes,
        )
        self._progress("profile", 1.0)
        return pair

    def _make_lane(self, context: Context, batch: Batch, slots: Slots, costs: CostTable) -> Lane:
        """Make the lane that many sequences share."""
        return Lane(
            context,
            batch,
            slots,
            costs,
            pass_s=self._settings.pass_s,
            gap_s=self._settings.gap_s,
            attention=self._stored.attention,
            on_gpu=self.on_gpu,
        )

    def _open_models(self) -> PairModels:
        """Open both models and compare them with each other. Raises LoadFailed, OutOfMemory."""
        files, settings = self._files, self._settings
        if (n_gpus := len(gpus())) and settings.main_gpu >= n_gpus:
            raise LoadFailed(
                f"`main_gpu` is {settings.main_gpu}, and this machine has {n_gpus}: 0 is the first. To "
                "restore the default: localspec config unset main_gpu"
            )
        threads = settings.n_threads or physical_cores()
        if threads > (n_cores := usable_cores()):
            self._notes.append(
                f"{threads} threads were requested, but only {n_cores} are used: one per core."
            )
            threads = n_cores
        heads = files.draft is None  # the target's own heads draft only if no other model does
        remote = self._find_remote_devices()
        target = self._open_model("target", files.target, settings, heads=heads, devices=remote)
        self._target_opened(target)
        if self._machines:
            enable_keepalive(self._machines)
            settings = _settings_for_workers(target, settings)
        self.layers = target.n_layer
        if reason := why_kv_type_unsupported(target, settings.kv_types):
            key = (
                "kv_type"
                if why_kv_type_unsupported(target, (settings.type_kv, "f16"))
                else "kv_type_v"
            )
            key = key if settings.type_v != "same" else "kv_type"
            kind = settings.kv_types[key == "kv_type_v"]
            raise LoadFailed(
                f"{files.target} does not take `{key}` {kind}: {reason}. To use f16: "
                f"localspec config set {key} f16"
            )
        draft = None
        if files.draft:
            draft = open_draft(partial(self._open_model, "draft", files.draft), settings, remote)
        compared = check_pair(target, draft) if draft else None
        self.n_ctx = min(self.n_ctx, target.n_ctx_train or DEFAULT_CONTEXT)
        parallel = settings.parallel if target.multi_sequence else 1
        has_states = target.n_heads or (draft is not None and is_sidecar(draft.architecture))
        rows = settings.n_batch * (GPU_BATCH_FACTOR if self.on_gpu and not has_states else 1)
        attention = settings.flash_attention
        if not self.on_gpu and not has_states and target.cuttable:
            attention = settings.cpu_flash_attention(self.n_ctx, wide=wide_vectors())
        context = self.n_ctx, parallel, threads, rows, self.opened, attention, self._machines
        return PairModels(target, draft, compared, settings, *context)

    def _find_remote_devices(self) -> list[int]:
        """Return the devices for the target's layers if other machines have some, else [].

        Raises:
            LoadFailed: A machine is needed and cannot be reached.
        """
        if not self._files.rpc or not self._settings.n_gpu_layers:
            return []
        reached, problems = connect(self._files.rpc)
        if problems and self._settings.rpc_needed:
            raise LoadFailed(
                f"{'; '.join(problems)}. Without it the target does not fit into memory. To serve its "
                "layers there: localspec rpc-worker"
            )
        self._notes += [f"{problem}: its layers are on this machine." for problem in problems]
        self._machines = tuple(reached)
        remote = [device for devices_there in reached.values() for device in devices_there]
        return [*remote, *devices(gpus=True)] if remote else []

    def _open_model(self, stage: str, path: str, settings: EngineSettings, **options: Any) -> Model:
        progress = partial(self._progress, stage)
        return self.opened.enter_context(open_model(path, settings, progress, **options))

    def _make_draft_context(self, models: PairModels, context: Context) -> Context | None:
        """Make a context of the draft model, or else of the target's heads; None if there is neither.

        context: the target's, which is still empty.
        """
        sequences = models.parallel + 2  # one for the exact lane, one for probes
        make = partial(
            models.make_context, sequences=sequences, outputs=max(models.parallel + 1, 16)
        )
        draft = models.draft
        if draft is not None and not models.sidecar:
            if reason := why_kv_type_unsupported(draft, self._settings.kv_types):
                self._notes.append(f"The draft's KV cache is f16: {reason}.")
            return make(draft)
        model, target = (draft, context) if draft is not None else (models.target, None)
        if draft is None and not model.n_heads:
            return None
        if reason := why_no_heads(model):
            self._no_draft = reason
            return None
        try:
            return make(model, heads=True, target=target)
        except OutOfMemory:
            raise
        except LoadFailed as error:
            self._no_draft = "llama.cpp cannot make a context of this model's MTP heads"
            self._notes.append(f"No drafts: {error.message}")
            return None

    def _make_target_context(self, models: PairModels) -> Context:
        sequences = models.parallel + _can_move(models.target)
        outputs = models.parallel * (MAX_DEPTH + 1) + MAX_DRAFTS
        return models.make_context(
            models.target,
            sequences=sequences,
            outputs=outputs,
            chooses=True,
        )

    @property
    def on_gpu(self) -> bool:
        return self._settings.n_gpu_layers != 0 and bool(gpus() or self._machines)

    def _chooses_on_device(self, context: Context, batch: Batch) -> bool:
        """Whether the device chooses greedy tokens, so that no row of logits leaves the GPU.

        Over a network all rows of a pass travel together, and each token chosen there would need journeys of
        its own. With 5 ms each way, a pass of 8 rows took 228 ms, and one of 5 rows with logits 56 ms.
        """
        setting = self._settings.choose_on_device
        is_local_gpu = self.on_gpu and not self._machines
        return (is_local_gpu if setting is None else setting) and samples_correctly_on_device(
            context, batch
        )

    def _open_profile(self, key: str) -> ProfileStore:
        """Open the profile of costs, and read what an earlier load has left there."""
        folder = self._settings.state_dir
        store = ProfileStore(Path(folder) if folder else None, key)
        self._stored, self._contention_share = (
            StoredProfile.of(store.read()),
            self._contention.share,
        )
        return store

    def _choose_table(
        self,
        known: dict[int, float] | None,
        measure: Callable[[], PassTimes],
        max_rows_each: int = 0,
    ) -> CostTable:
        """Return the table of an earlier load if it is good enough, else measure now.

        max_rows_each: as in `CostTable`.
        """
        measured = self._stored.use_or_measure(known, self._contention_share, measure)
        self._noise = max(self._noise, measured.noise)
        return CostTable(measured.ms, max_rows_each=max_rows_each)

    def _target_costs(self, context: Context, batch: Batch) -> CostTable:
        budget_s = measuring.BUDGET_S * 0.7
        run = make_pass_runner(context, batch)
        max_rows_each = 0 if context.model.cuttable else context.n_rollback + 1
        measure = partial(measuring.measure_widths, run, budget_s, self._turn)
        return self._choose_table(self._stored.target, measure, max_rows_each)

    def _draft_costs(self, context: Context, batch: Batch, n_before: int) -> CostTable:
        deadline = time.monotonic() + measuring.BUDGET_S * 0.3
        run, widths = make_pass_runner(context, batch, True, n_before), (1, PREFILL_WIDTH, 2, 4, 16)
        measure = partial(measuring.measure_passes, run, widths, deadline, turn=self._turn)
        return self._choose_table(self._stored.draft, measure)

    def _make_drafter(
        self,
        models: PairModels,
        context: Context | None,
        make_room: Callable[[], bool],
        n_before: int,
    ) -> tuple[DraftModel | None, CostTable | None]:
        """Return the draft model, or heads, and what their steps cost; None if they are of no use.

        n_before: the number of tokens in the context's first sequence.
        """
        if context is None:
            return None, None
        heads = context.heads
        batch = StateBatch(models.rows, context.n_state) if heads else Batch(models.rows)
        try:
            with self._turn():
                check_finite_logits(context, batch, n_before)
        except LoadFailed as error:
            called = (MtpDrafter if heads else ModelDrafter).called
            self._no_draft = f"NaN or infinite values from {called}"
            self._notes.append(f"No drafts: {error.message}")
            return None, None
        costs = self._draft_costs(context, batch, n_before)
        shared = SharedTokens()
        if models.compared is not None:
            shared = SharedTokens.of(models.target.vocab, context.model.vocab, models.compared)
        scratch = models.parallel + 1
        kind = Sidecar if context.borrows else Heads if heads else DraftModel
        model = kind(
            context,
            batch,
            costs,
            make_room,
            scratch,
            shared,
            pass_s=self._settings.pass_s,
            gap_s=self._settings.gap_s,
        )
        return model, costs

    def _make_learned(self, target: CostTable, draft: CostTable | None) -> LearnedProfile:
        costs = CostProfile(target, draft, self._stored.overhead_ms)
        return LearnedProfile(costs, self._stored.load_calibrations(Drafter.kinds), self._noise)

    def _warm_start(
        self, context: Context, batch: Batch, drafter: DraftModel, learned: LearnedProfile
    ) -> None:
        """Estimate the acceptance of a new draft model, if that takes no longer than measuring.

        This is not possible with heads, which read the states of a text that has a slot.
        """
        calibration = learned.calibrations[drafter.kind]
        token_ms = learned.costs.target.per_token_ms(PREFILL_WIDTH) + drafter.token_prefill_ms
        if drafter.context.heads or not calibration.is_unused:
            return
        if token_ms * MAX_TEXT_TOKENS * len(TEXTS) > 1e3 * measuring.BUDGET_S:
            return
        warm_start(context, batch, drafter, calibration, self._turn)

    def _make_prefixes(
        self, costs: CostTable, models: PairModels, notice: Notice
    ) -> tuple[PrefixStore, SessionStore]:
        """Make the stores for texts that lose their slot: memory, and from there the disk."""
        settings = self._settings
        copy_cost = estimate_copy_cost(models, costs, self.on_gpu)
        prefixes = PrefixStore(settings.prefix_bytes, copy_cost)
        folder = Path(settings.states_dir) if settings.states_dir else None
        key = hash_profile_key(self._files, models)
        sessions = SessionStore(folder, key, settings.states_bytes, notice)
        prefixes.dropped = sessions.save_dropped
        return prefixes, sessions


def _can_move(target: Model) -> bool:
    """Whether the target gets one more sequence, with which its cached text is moved."""
    return target.cuttable and not target.n_swa
