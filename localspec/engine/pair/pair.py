"""A loaded pair: both models, their contexts, what they cost and what is known of their drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from localspec.engine.cache.prefixes import Exchange, Prefix, Prefixes
from localspec.engine.cache.sessions import States
from localspec.engine.cache.slots import Slots
from localspec.engine.llama import (
    Batch,
    Context,
    ContextSettings,
    Model,
    OutOfMemory,
    Vocab,
    backend,
    gpus,
    llama_version,
)
from localspec.engine.pair import measuring, placement, profile
from localspec.engine.pair.exact import CANDIDATES, choose_width
from localspec.engine.pair.lane import Lane
from localspec.engine.pair.models import (
    check_numbers,
    check_vocabularies,
    chooses_rightly,
    open_model,
    physical_cores,
    runner,
    threads_for,
)
from localspec.engine.pair.profile import Stock
from localspec.engine.sampling import sampler
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.depth import INITIAL_ACCEPTANCE, MAX_DEPTH, MAX_LIMIT, Calibration
from localspec.engine.speculation.drafters.model import READING, DraftModel
from localspec.engine.speculation.drafters.shared import SharedTokens
from localspec.errors import InvalidRequest, LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles, PairInfo

DEFAULT_CONTEXT = 8192  # tokens, where the settings leave it to us and the model allows it
ROLLBACK = 8  # recurrent snapshots asked for: each costs a copy of the state
SAVING_S = 6.0  # for saving conversations at the end; the daemon waits a little longer
Progress = Callable[[str, float], None]
Notice = Callable[[str], None]


def _silent(_: str) -> None:
    pass


class Pair:
    """Everything that lives as long as the pair is loaded. Created and closed by the worker."""

    def __init__(
        self,
        files: PairFiles,
        settings: EngineSettings,
        progress: Progress,
        notice: Notice = _silent,
    ) -> None:
        """Load both models and measure their costs. `notice`: sentences for the log, from any thread.

        Raises:
            LoadFailed: a file cannot be loaded, or the two tokenizers differ.
        """
        self.notes: list[str] = []  # what had to give for want of memory
        while True:
            self._open = ExitStack()  # models before the contexts made from them
            self._layers, self.n_ctx = 0, settings.n_ctx or DEFAULT_CONTEXT
            try:
                self._build(files, settings, progress)
                self._keep_prefixes(settings, notice)
                break
            except OutOfMemory as error:
                self._open.close()
                settings = self._smaller(settings, error)
                notice(f"{error.message} {self.notes[-1]}")
            except BaseException:
                self._open.close()
                raise

    def _smaller(self, settings: EngineSettings, error: OutOfMemory) -> EngineSettings:
        """A plan that needs less memory. Raises LoadFailed where there is none."""
        gpu = backend() != "cpu"
        found = placement.smaller(settings, self._layers, self.n_ctx, gpu)
        if found is None:
            raise LoadFailed(
                f"{error.message} There is no smaller plan left; close other programs, or choose a "
                "smaller pair (localspec catalogue --fits)."
            ) from error
        settings, told = found
        # Each step of a kind says the same with a smaller number: the last one counts.
        kind = told.rpartition(",")[2]
        self.notes = [note for note in self.notes if not note.endswith(kind)] + [told]
        return settings

    def _build(self, files: PairFiles, settings: EngineSettings, progress: Progress) -> None:
        self.files = files
        self.settings = settings
        self._exact: Lane | None = None
        self._exact_reason: str | None = None
        self.no_draft = "this pair has no draft model"
        company = measuring.Company()
        threads = settings.n_threads or physical_cores()
        self._threads = threads
        self._target = self._open.enter_context(
            open_model(files.target, settings, lambda f: progress("target", f))
        )
        self._layers = self._target.n_layer
        # The draft on one GPU, whole: its steps are too short to be shared.
        placed = msgspec.structs.replace(
            settings, n_gpu_layers=settings.draft_gpu_layers, split_mode="none"
        )
        self._draft = (
            self._open.enter_context(
                open_model(files.draft, placed, lambda f: progress("draft", f))
            )
            if files.draft
            else None
        )
        self.vocab: Vocab = self._target.vocab
        self._compared = check_vocabularies(self._target, self._draft) if self._draft else None
        trained = self._target.n_ctx_train
        self.n_ctx = min(settings.n_ctx or DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT)
        fixed_state = self._target.recurrent or self._target.hybrid
        self.parallel = 1 if fixed_state else settings.parallel
        self._draft_context = self._draft_context_for(self._draft) if self._draft else None
        context = self._target_context(self.parallel, self.parallel * (MAX_DEPTH + 1) + MAX_LIMIT)
        batch = Batch(settings.n_batch)
        check_numbers(context, batch)
        self.no_rollback = self._rollback_problem(context)
        # Greedy tokens are chosen where the logits are, so that no row crosses from a GPU.
        on_gpu = settings.n_gpu_layers != 0 and bool(gpus())
        asked = on_gpu if settings.choose_on_device is None else settings.choose_on_device
        self.chooses_on_device = asked and chooses_rightly(context, batch)
        progress("profile", 0.0)
        self._store = profile.ProfileStore(
            Path(settings.state_dir) if settings.state_dir else None, self.identity()
        )
        known = self._store.read()
        stock = Stock.of(known)
        self._noise = stock.noise
        others = company.share
        table = stock.target
        if table is None or not stock.will_do(table, others):
            found = measuring.measure_widths(runner(context, batch), measuring.BUDGET_S * 0.7)
            table, self._noise = stock.better(table, found)
        target_costs = CostTable(table)
        self.drafter, draft_costs = self._make_drafter(stock, others)
        overhead = known.get("overhead_ms")
        if not isinstance(overhead, float) or not 0 < overhead < 1e3:
            overhead = 0.3
        self.costs = CostProfile(target_costs, draft_costs, overhead)
        stored = known.get("calibration")
        learned = stored if isinstance(stored, dict) else {}
        self.calibrations = {
            kind: Calibration.from_dict(learned.get(kind), mean)
            for kind, mean in (("draft", INITIAL_ACCEPTANCE), ("ngram", 0.4), ("grammar", 0.94))
        }
        width = known.get("exact_width")
        self._exact_width = width if width in CANDIDATES else None
        reading_ms = partial(target_costs.per_token_ms, READING)
        self.prefixes = Prefixes(settings.prefix_bytes, Exchange(reading_ms))
        slots = Slots(context, self._draft_context, 0, self.parallel, self.prefixes)
        self.shared = Lane(context, batch, slots, target_costs, pass_s=settings.pass_s)
        self.defaults = sampler.model_defaults(self._target.metadata)
        progress("profile", 1.0)

    # ------------------------------------------------------------------------ contexts

    def _target_context(self, sequences: int, outputs: int) -> Context:
        recurrent = self._target.recurrent or self._target.hybrid
        context = Context(
            self._target,
            ContextSettings(
                n_ctx=self.n_ctx,
                n_batch=self.settings.n_batch,
                n_seq=sequences,
                n_outputs=outputs,
                n_threads=threads_for(self._target, self._threads),
                type_kv=self.settings.type_kv,
                n_rollback=ROLLBACK if recurrent else 0,
                flash_attention=self.settings.flash_attention,
                chooses=True,
            ),
        )
        return self._open.enter_context(context)

    def _draft_context_for(self, draft: Model) -> Context:
        recurrent = draft.recurrent or draft.hybrid
        context = Context(
            draft,
            ContextSettings(
                n_ctx=self.n_ctx,
                n_batch=self.settings.n_batch,
                n_seq=self.parallel + 2,  # one for the exact lane, one to look in with
                n_outputs=max(self.parallel + 1, 16),
                n_threads=threads_for(draft, self._threads),
                type_kv=self.settings.type_kv,
                n_rollback=ROLLBACK if recurrent else 0,
                flash_attention=self.settings.flash_attention,
            ),
        )
        return self._open.enter_context(context)

    def _rollback_problem(self, target: Context) -> str | None:
        """Why drafts cannot be taken back, if they cannot."""
        for context, name in ((target, "target"), (self._draft_context, "draft")):
            if context is None:
                continue
            model = context.model
            if (model.recurrent or model.hybrid) and context.n_rollback == 0:
                return f"the {name} ({model.description}) cannot take back tokens it has read"
        return None

    def _make_drafter(
        self, stock: Stock, others: float
    ) -> tuple[DraftModel | None, CostTable | None]:
        context = self._draft_context
        if context is None or self.no_rollback is not None:
            return None, None
        batch = Batch(self.settings.n_batch)
        try:
            check_numbers(context, batch)
        except LoadFailed as error:
            self.no_draft = "the draft model gives no numbers (NaN or infinite)"
            self.notes.append(f"No drafts: {error.message}")
            return None, None
        known = stock.draft
        if known is None or not stock.will_do(known, others):
            deadline = time.monotonic() + measuring.BUDGET_S * 0.3
            run = runner(context, batch, last_only=True)
            found = measuring.measure(run, (1, READING, 2, 4, 16), deadline)
            known, noise = stock.better(known, found)
            self._noise = max(self._noise, noise)
        costs = CostTable(known)
        scratch = self.parallel + 1
        assert self._compared is not None
        shared = SharedTokens.of(self.vocab, context.model.vocab, self._compared)
        return DraftModel(
            context,
            batch,
            costs,
            self._make_draft_room,
            scratch,
            shared,
            pass_s=self.settings.pass_s,
        ), costs

    def _make_draft_room(self) -> bool:
        return any(lane.slots.evict_draft() for lane in self._lanes())

    def _lanes(self) -> list[Lane]:
        return [self.shared] if self._exact is None else [self.shared, self._exact]

    # ------------------------------------------------------------------------ exact mode

    def exact(self) -> Lane:
        """The exact lane, made at first use.

        Raises:
            InvalidRequest: no width passes the self-test on this machine, or the model cannot roll back.
        """
        if self._exact is not None:
            return self._exact
        if self._exact_reason is None and (self._target.recurrent or self._target.hybrid):
            self._exact_reason = "this model's state cannot be padded and rolled back"
        if self._exact_reason is not None:
            raise InvalidRequest(
                f"Exact mode is not possible here: {self._exact_reason}.", param="exact"
            )
        context = self._target_context(1, self.settings.n_batch)
        batch = Batch(self.settings.n_batch)
        costs = self.costs.target
        width = self._exact_width
        if not isinstance(width, int):
            width = choose_width(context, batch, costs)
        if width is None:
            context.close()
            self._exact_reason = "no pass width gives the same logits in every row"
            return self.exact()
        self._exact_width = width
        slots = Slots(context, self._draft_context, self.parallel, 1, self.prefixes, exact=True)
        self._exact = Lane(context, batch, slots, costs, width)
        return self._exact

    # ------------------------------------------------------------------------ the rest

    def passes(self) -> tuple[Callable[[int], None], Callable[[int], None] | None]:
        """A pass of a given width over an empty sequence, by target and draft: for measuring.

        Only while nothing runs; what sequence 0 of either held is forgotten.
        """
        self.shared.slots.clear(next(iter(self.shared.slots)))
        target = runner(self.shared.context, self.shared.batch)
        if self._draft_context is None:
            return target, None
        return target, runner(self._draft_context, Batch(self.settings.n_batch), last_only=True)

    def busy_s(self) -> float:
        """Seconds spent inside llama.cpp's passes so far."""
        busy = self.shared.busy_s
        busy += self._exact.busy_s if self._exact else 0.0
        return busy + (self.drafter.busy_s if self.drafter else 0.0)

    @property
    def chat_template(self) -> str | None:
        return self._target.chat_template

    def info(self) -> PairInfo:
        vocab = self.vocab
        reason = self.no_rollback or (None if self.drafter else self.no_draft)
        told = self._compared.note if self._compared else ""
        notes = [f"{told[:1].upper()}{told[1:]}."] if told else []
        return PairInfo(
            name=self.files.name,
            target_description=self._target.description,
            draft_description=self._draft.description if self._draft else None,
            n_ctx=self.n_ctx,
            n_ctx_train=self._target.n_ctx_train,
            n_vocab=vocab.size,
            parallel=self.parallel,
            chat_template=self.chat_template,
            bos_token=vocab.text(vocab.bos),
            eos_token=vocab.text(vocab.eos),
            fim=vocab.fim.prefix >= 0 and vocab.fim.suffix >= 0 and vocab.fim.middle >= 0,
            speculation=reason,
            notes=self.notes + notes,
            backend=backend() if self.settings.n_gpu_layers else "cpu",
            sampling_defaults=self.defaults,
            exact_width=self._exact_width,
            exact_reason=self._exact_reason,
            profile=self.costs.as_dict(),
        )

    def save(self) -> None:
        """Keep what was measured and learned for the next load."""
        self._store.write(
            {
                **self.costs.as_dict(),
                "noise": round(self._noise, 4),
                "exact_width": self._exact_width,
                "calibration": {k: c.as_dict() for k, c in self.calibrations.items()},
            }
        )

    def identity(self) -> str:
        """A hash of what measurements and saved states depend on: files, settings, machine, build."""
        files = [self.files.target] + ([self.files.draft] if self.files.draft else [])
        s = self.settings
        settings = {
            "threads": self._threads,
            "n_ctx": self.n_ctx,
            "batch": s.n_batch,
            "gpus": gpus(),
            "gpu_layers": [s.n_gpu_layers, s.draft_gpu_layers, s.split_mode, s.main_gpu],
            "flash_attention": s.flash_attention,
            "choose_on_device": self.chooses_on_device,
            "kv": s.type_kv,
            "extra_buffers": s.extra_buffers,
            "parallel": self.parallel,
        }
        return profile.identity(files, settings, llama_version())

    # ------------------------------------------------------------------------ conversations

    def _keep_prefixes(self, settings: EngineSettings, notice: Notice) -> None:
        folder = Path(settings.states_dir) if settings.states_dir else None
        self.states = States(folder, self.identity(), settings.states_bytes, notice)
        self.prefixes.dropped = self.states.dropped

    def forget(self, conversation: str | None) -> None:
        """Drop what is kept of a conversation, with None of all, in memory and on disk."""
        for lane in self._lanes():
            lane.slots.forget_conversation(conversation)
        self.prefixes.forget(conversation)
        self.states.forget(conversation)

    def _save_conversations(self) -> None:
        """Those in memory, the ones in slots first; of each what was used last."""
        found: dict[str | None, Callable[[], Prefix]] = {}
        for lane in self._lanes():
            for slot in sorted(lane.slots, key=lambda s: -s.last_used):
                if self.states.wanted(slot.conversation, slot.n_past):
                    found.setdefault(slot.conversation, partial(lane.slots.snapshot, slot))
        for prefix in self.prefixes:
            if self.states.wanted(prefix.conversation, len(prefix.tokens)):
                found.setdefault(prefix.conversation, partial(_same, prefix))
        self.states.save_all(found.values(), SAVING_S)
        self.states.close()

    def close(self) -> None:
        """Save what is to be saved and free everything, contexts before models."""
        self._save_conversations()
        self.save()
        self._open.close()


def _same(prefix: Prefix) -> Prefix:
    return prefix
