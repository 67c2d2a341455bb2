"""Loading a pair: its files opened, contexts made, passes measured.

Again, and smaller, where memory does not hold it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from localspec.engine.cache.prefixes import Prefixes
from localspec.engine.cache.sessions import SessionStore
from localspec.engine.cache.slots import Slots
from localspec.engine.llama import (
    Batch,
    Context,
    Model,
    OutOfMemory,
    StateBatch,
    devices,
    gpus,
    notice_cuts,
    reach,
    why_no_heads,
    wide_vectors,
)
from localspec.engine.pair import measuring, placement
from localspec.engine.pair.exact import ExactMode
from localspec.engine.pair.lane import Lane
from localspec.engine.pair.measuring import Measured, Turn
from localspec.engine.pair.models import (
    Models,
    check_numbers,
    check_pair,
    chooses_rightly,
    copy_cost_of,
    key_of,
    open_draft,
    open_model,
    physical_cores,
    runner,
    some_text,
    takes_not,
    usable_cores,
    why_no_rollback,
)
from localspec.engine.pair.pair import NO_DRAFT, Pair
from localspec.engine.pair.profile import Learned, ProfileStore, Stored
from localspec.engine.speculation.acceptance import MAX_LIMIT
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.depth import MAX_DEPTH
from localspec.engine.speculation.drafters.base import Drafter
from localspec.engine.speculation.drafters.model import PREFILL_WIDTH, DraftModel, ModelDrafter
from localspec.engine.speculation.drafters.mtp import Heads, MtpDrafter, Sidecar
from localspec.engine.speculation.drafters.shared import SharedTokens
from localspec.engine.speculation.warm_start import TEXTS, TOKENS, warm_start
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles
from localspec.purpose import is_sidecar

# Times n_batch that a pass may read of a prompt on a GPU, which goes on to the next part by itself: where it
# waited for us after each, an H100 read 10 200 tokens/s and not 11 500.
AT_ONCE = 4
DEFAULT_CONTEXT = 8192  # tokens, where the settings leave it to us and the model allows it
Progress = Callable[[str, float], None]
Notice = Callable[[str], None]


def _silent(_: str) -> None:
    pass


def load_pair(
    files: PairFiles,
    settings: EngineSettings,
    progress: Progress,
    notice: Notice = _silent,
    turn: Turn = nullcontext,
) -> Pair:
    """Load both models and measure their costs. `notice`: sentences for the log, from any thread; `turn`:
    a pass is made in one.

    Where memory does not hold what the settings ask for, less is tried.

    Raises:
        LoadFailed: a file cannot be loaded, or the two tokenizers differ.
    """
    try:
        msgspec.convert(msgspec.to_builtins(settings), EngineSettings)
    except msgspec.ValidationError as error:  # else llama.cpp would meet the number
        raise LoadFailed(f"The engine's settings are wrong: {error}.") from None
    given: dict[str, str] = {}  # what had to give, and the last sentence about it
    while True:
        load = _Load(files, settings, progress, list(given.values()), turn)
        try:
            return load.pair(notice)
        except OutOfMemory as error:
            load.opened.close()
            found = placement.smaller(settings, load.layers, load.n_ctx, load.on_gpu)
            if found is None:
                raise LoadFailed(
                    f"{error.message} Nothing smaller is left to try; close other programs, or choose "
                    "a smaller pair (localspec catalogue --fits)."
                ) from error
            settings = found.settings
            given.pop(found.gives, None)
            given[found.gives] = found.told
            notice(f"{error.message} {found.told}")
        except BaseException:
            load.opened.close()
            raise


def _for_any_worker(target: Model, settings: EngineSettings) -> EngineSettings:
    """Return the settings without flash attention where a worker's GPU may not have it for this target.

    llama.cpp asks a device whether it has the operation before it chooses flash attention by itself, and
    its RPC backend says yes for every device. A worker whose GPU has no kernel for heads of such lengths
    ends at the first pass, and this process with it. A quantized cache of values needs flash attention.
    """
    chosen = settings.flash_attention == "auto" and settings.kv_types[1] == "f16"
    if not chosen or target.flash_everywhere:
        return settings
    return msgspec.structs.replace(settings, flash_attention="off")


class _Load:
    """One try. opened: to be closed where it fails. layers, n_ctx: of the target, as far as known."""

    def __init__(
        self,
        files: PairFiles,
        settings: EngineSettings,
        progress: Progress,
        notes: list[str],
        turn: Turn,
    ) -> None:
        self.opened = ExitStack()  # models before the contexts made from them
        self.layers, self.n_ctx = 0, settings.n_ctx or DEFAULT_CONTEXT
        self._files = files
        self._settings = settings
        self._progress = progress
        self._notes = notes
        self._turn = turn
        self._no_draft = NO_DRAFT
        self._contention = measuring.Contention()
        self._stored = Stored(None, None, 1.0)
        self._others = 0.0  # what share of the machine others use
        self._noise = 0.0  # of what is measured
        self._machines: tuple[str, ...] = ()  # others, with layers of the target

    def pair(self, notice: Notice) -> Pair:
        """All steps, in the order in which they depend on each other."""
        models = self._open()
        context, batch = self._target_context(models), Batch(models.rows)
        draft = self._draft_context(models, context)
        if draft is not None and draft.heads:
            context.emit_states()
        with self._turn():
            check_numbers(context, batch)
        no_rollback = why_no_rollback(context, draft)
        chooses = self._chooses_on_device(context, batch)
        self._progress("profile", 0.0)
        profile = self._profile(key_of(self._files, models, measured={"choose_on_device": chooses}))
        costs = self._target_costs(context, batch)
        prefixes, sessions = self._prefixes(costs, models, notice)
        spare = models.parallel if _can_move(models.target) else None
        slots = Slots(context, draft, 0, models.parallel, prefixes, spare=spare)
        borrows = draft is not None and draft.borrows
        with some_text(context, batch) if borrows else nullcontext(0) as first:
            drafter, steps = self._drafter(
                models,
                draft if no_rollback is None else None,
                slots.evict
                if borrows
                else lambda: any(lane.slots.evict_draft() for lane in pair.lanes),
                first,
            )
        learned = self._learned(costs, steps)
        if drafter is not None:
            self._warm_start(context, batch, drafter, learned)
        pair = Pair(
            files=self._files,
            models=models,
            shared=self._lane(context, batch, slots, costs),
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

    def _lane(self, context: Context, batch: Batch, slots: Slots, costs: CostTable) -> Lane:
        """The one that many sequences share."""
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

    def _open(self) -> Models:
        """Both models, compared with each other. Raises LoadFailed, OutOfMemory."""
        files, settings = self._files, self._settings
        if (there := len(gpus())) and settings.main_gpu >= there:
            raise LoadFailed(
                f"`main_gpu` is {settings.main_gpu}, and this machine has {there}: 0 is the first. To "
                "restore the default: localspec config unset main_gpu"
            )
        threads = settings.n_threads or physical_cores()
        if threads > (cores := usable_cores()):
            self._notes.append(
                f"{threads} threads were requested, but only {cores} are used: one per core."
            )
            threads = cores
        heads = files.draft is None  # its own draft for it where no other model does
        elsewhere = self._elsewhere()
        target = self._model("target", files.target, settings, heads=heads, devices=elsewhere)
        if self._machines:
            notice_cuts(self._machines)
            settings = _for_any_worker(target, settings)
        self.layers = target.n_layer
        if reason := takes_not(target, settings.kv_types):
            key = "kv_type" if takes_not(target, (settings.type_kv, "f16")) else "kv_type_v"
            key = key if settings.type_v != "same" else "kv_type"
            kind = settings.kv_types[key == "kv_type_v"]
            raise LoadFailed(
                f"{files.target} does not take `{key}` {kind}: {reason}. To use f16: "
                f"localspec config set {key} f16"
            )
        draft = None
        if files.draft:
            draft = open_draft(partial(self._model, "draft", files.draft), settings, elsewhere)
        compared = check_pair(target, draft) if draft else None
        self.n_ctx = min(self.n_ctx, target.n_ctx_train or DEFAULT_CONTEXT)
        parallel = settings.parallel if target.takes_company else 1
        stated = target.n_heads or (draft is not None and is_sidecar(draft.architecture))
        rows = settings.n_batch * (AT_ONCE if self.on_gpu and not stated else 1)
        attention = settings.flash_attention
        if not self.on_gpu and not stated and target.cuttable:
            attention = settings.on_cpu(self.n_ctx, wide=wide_vectors())
        made_with = self.n_ctx, parallel, threads, rows, self.opened, attention, self._machines
        return Models(target, draft, compared, settings, *made_with)

    def _elsewhere(self) -> list[int]:
        """What the target's layers go to, where other machines have some; empty: to this one alone.

        Raises:
            LoadFailed: one is needed and missing.
        """
        if not self._files.rpc or not self._settings.n_gpu_layers:
            return []
        found, problems = reach(self._files.rpc)
        if problems and self._settings.rpc_needed:
            raise LoadFailed(
                f"{'; '.join(problems)}. Without it the target does not fit into memory. To serve its "
                "layers there: localspec rpc-worker"
            )
        self._notes += [f"{each}: its layers are on this machine." for each in problems]
        self._machines = tuple(found)
        there = [each for theirs in found.values() for each in theirs]
        return [*there, *devices(gpus=True)] if there else []

    def _model(self, stage: str, path: str, settings: EngineSettings, **kind: Any) -> Model:
        progress = partial(self._progress, stage)
        return self.opened.enter_context(open_model(path, settings, progress, **kind))

    def _draft_context(self, models: Models, context: Context) -> Context | None:
        """Of the draft model, or else of the target's heads; None where there is neither. context: the
        target's, which is empty yet.
        """
        sequences = models.parallel + 2  # one for the exact lane, one to look in with
        make = partial(models.context, sequences=sequences, outputs=max(models.parallel + 1, 16))
        draft = models.draft
        if draft is not None and not models.sidecar:
            if reason := takes_not(draft, self._settings.kv_types):
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

    def _target_context(self, models: Models) -> Context:
        sequences = models.parallel + _can_move(models.target)
        outputs = models.parallel * (MAX_DEPTH + 1) + MAX_LIMIT
        return models.context(
            models.target,
            sequences=sequences,
            outputs=outputs,
            chooses=True,
        )

    @property
    def on_gpu(self) -> bool:
        return self._settings.n_gpu_layers != 0 and bool(gpus() or self._machines)

    def _chooses_on_device(self, context: Context, batch: Batch) -> bool:
        """Greedy tokens are chosen where the logits are, so that no row crosses from a GPU. Over a network
        the rows cross together, and each token would take journeys of its own: with 5 ms there and as many
        back a pass of 8 rows took 228 ms, and one of 5 rows with its logits 56.
        """
        asked = self._settings.choose_on_device
        here = self.on_gpu and not self._machines
        return (here if asked is None else asked) and chooses_rightly(context, batch)

    def _profile(self, key: str) -> ProfileStore:
        """Where costs are kept, and what an earlier load has left there."""
        folder = self._settings.state_dir
        store = ProfileStore(Path(folder) if folder else None, key)
        self._stored, self._others = Stored.of(store.read()), self._contention.share
        return store

    def _table(
        self, known: dict[int, float] | None, measure: Callable[[], Measured], each: int = 0
    ) -> CostTable:
        """What an earlier load has measured, where that will do; else what is measured now. each: as a
        CostTable's.
        """
        found = self._stored.or_measured(known, self._others, measure)
        self._noise = max(self._noise, found.noise)
        return CostTable(found.ms, each=each)

    def _target_costs(self, context: Context, batch: Batch) -> CostTable:
        budget_s = measuring.BUDGET_S * 0.7
        run = runner(context, batch)
        each = 0 if context.model.cuttable else context.n_rollback + 1
        measure = partial(measuring.measure_widths, run, budget_s, self._turn)
        return self._table(self._stored.target, measure, each)

    def _draft_costs(self, context: Context, batch: Batch, first: int) -> CostTable:
        deadline = time.monotonic() + measuring.BUDGET_S * 0.3
        run, widths = runner(context, batch, True, first), (1, PREFILL_WIDTH, 2, 4, 16)
        measure = partial(measuring.measure, run, widths, deadline, turn=self._turn)
        return self._table(self._stored.draft, measure)

    def _drafter(
        self, models: Models, context: Context | None, make_room: Callable[[], bool], first: int
    ) -> tuple[DraftModel | None, CostTable | None]:
        """The draft model, or heads, and what their steps cost; None where they are of no use. first: how
        many tokens there are in its first sequence.
        """
        if context is None:
            return None, None
        heads = context.heads
        batch = StateBatch(models.rows, context.n_state) if heads else Batch(models.rows)
        try:
            with self._turn():
                check_numbers(context, batch, first)
        except LoadFailed as error:
            called = (MtpDrafter if heads else ModelDrafter).called
            self._no_draft = f"NaN or infinite values from {called}"
            self._notes.append(f"No drafts: {error.message}")
            return None, None
        costs = self._draft_costs(context, batch, first)
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

    def _learned(self, target: CostTable, draft: CostTable | None) -> Learned:
        costs = CostProfile(target, draft, self._stored.overhead_ms)
        return Learned(costs, self._stored.known_of(Drafter.kinds), self._noise)

    def _warm_start(
        self, context: Context, batch: Batch, drafter: DraftModel, learned: Learned
    ) -> None:
        """Where it takes no longer than measuring. Of heads nothing is tried: they read the states of a text
        that has a slot.
        """
        calibration = learned.calibrations[drafter.kind]
        token_ms = learned.costs.target.per_token_ms(PREFILL_WIDTH) + drafter.token_prefill_ms
        if drafter.context.heads or not calibration.unknown:
            return
        if token_ms * TOKENS * len(TEXTS) > 1e3 * measuring.BUDGET_S:
            return
        warm_start(context, batch, drafter, calibration, self._turn)

    def _prefixes(
        self, costs: CostTable, models: Models, notice: Notice
    ) -> tuple[Prefixes, SessionStore]:
        """What texts that lose their slot go into: memory, and from there the disk."""
        settings = self._settings
        copy_cost = copy_cost_of(models, costs, self.on_gpu)
        prefixes = Prefixes(settings.prefix_bytes, copy_cost)
        folder = Path(settings.states_dir) if settings.states_dir else None
        key = key_of(self._files, models)
        sessions = SessionStore(folder, key, settings.states_bytes, notice)
        prefixes.dropped = sessions.dropped
        return prefixes, sessions


def _can_move(target: Model) -> bool:
    """Whether it gets a sequence more, for what is moved in its cache."""
    return target.cuttable and not target.n_swa
