"""A pair of models that a trace plays: the engine's own rounds, with passes that cost what a table says.

Everything above llama.cpp is the engine's: what to draft, verify, observe and look at is decided by
the code that serves people. Only the two contexts and the clock are not real. The target says what the
trace says at each place, the draft guesses what the trace's draft guessed, with its confidence, and a
pass moves the clock by its cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measuring.driven import Answer
from benchmarks.traces.trace import Trace
from localspec.engine.cache.prefixes import CopyCost, PrefixStore
from localspec.engine.cache.sessions import SessionStore
from localspec.engine.cache.slots import Slots
from localspec.engine.llama import Batch, Context, FimTokens, Logits, Model, Vocab
from localspec.engine.pair.exact import ExactMode
from localspec.engine.pair.lane import Lane
from localspec.engine.pair.models import PairModels
from localspec.engine.pair.pair import LoadedPair
from localspec.engine.pair.profile import Calibrations, LearnedProfile, ProfileStore
from localspec.engine.speculation.acceptance import CONFIDENCE_EDGES, MAX_DRAFTS, Calibration
from localspec.engine.speculation.cost import CostProfile, CostTable
from localspec.engine.speculation.depth import MAX_DEPTH
from localspec.engine.speculation.drafters.draft_model import DraftModel, SharedTokens
from localspec.protocol.frames import EngineSettings, PairFiles

# Tokens that share what a guess leaves: so many that the guess is always the likeliest.
_OTHERS = 16
_NEVER = -1e4  # nats
_N_BATCH = 512


def confidence(at: int) -> float:
    """Return a probability in the middle of bucket `at`."""
    edges = (1 / _OTHERS, *CONFIDENCE_EDGES, 1.0)
    return (edges[at] + edges[at + 1]) / 2


class SimulatedClock:
    """Seconds that pass only when a pass or a round has cost them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, ms: float) -> None:
        self.now += ms / 1e3


class _Vocab(Vocab):
    """Tokens of one character each, none of which ends a text."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fim = FimTokens(-1, -1, -1, -1, -1)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"."

    def is_eog(self, token: int) -> bool:
        return False

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [ord(character) % self.size for character in text]


class _Model(Model):
    """A model with attention alone, so that every draft can be taken back."""

    n_state = 0

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        self.recurrent, self.cuttable = False, True
        self.architecture, self.n_layer, self.n_params = "llama", 0, 0
        self.n_swa = 0


class Said(NamedTuple):
    """What a model says at each place of a text: a token, and how sure it is of it.

    Token i + 1 is the right one at place i, after a prompt of token 0. Each has a wrong one beside it,
    `places + 1` higher, after which a text goes on as after the right one.
    """

    tokens: Sequence[int]
    probabilities: Sequence[float]

    @property
    def places(self) -> int:
        return len(self.tokens)

    @property
    def vocabulary(self) -> int:
        return 2 * (self.places + 1) + _OTHERS

    def after(self, token: int) -> tuple[int, float]:
        """Return what is said after `token`; beyond the text, where nobody reads it, anything."""
        place = token % (self.places + 1)
        if place == self.places:
            return 0, 0.99
        return self.tokens[place], self.probabilities[place]


class SimulatedContext(Context):
    """A context that says what a text has it say, and whose passes cost what a table says.

    passes: how many each sequence had a part in. dearer: how much more a pass costs for each sequence
    beyond the first. The first passes of another width cost what `costs.change` says.
    """

    def __init__(
        self, clock: SimulatedClock, costs: CostTable, says: Said, n_seq: int, dearer: float = 0.0
    ) -> None:
        self._change, self._rows, self._repeats = costs.change, 0, 0
        self.model = _Model(_Vocab(says.vocabulary))
        self.n_ctx = says.places + n_seq * (MAX_DRAFTS + 2)
        self.n_seq, self.n_vocab, self.cuttable = n_seq, says.vocabulary, True
        self.n_outputs = n_seq * (MAX_DEPTH + 1) + MAX_DRAFTS
        self._dearer = dearer
        self.n_rollback = 0
        self.passes: Counter[int] = Counter()
        self._clock, self._costs, self._says = clock, CostTable(costs.as_dict()), says
        self._held = [0] * n_seq
        self._read: list[int] = []

    def decode(self, batch: Batch) -> None:
        rows = batch.struct
        self._read = [int(rows.token[row]) for row in range(batch.rows)]
        sequences = [int(rows.seq_id[row][0]) for row in range(batch.rows)]
        for row, sequence in enumerate(sequences):
            self._held[sequence] = int(rows.pos[row]) + 1
        self.passes.update(set(sequences))
        more = 1 + self._dearer * (len(set(sequences)) - 1)
        self._repeats = self._repeats + 1 if batch.rows == self._rows else 0
        self._rows = batch.rows
        change = sum(self._change[self._repeats : self._repeats + 1])
        self._clock.spend(self._costs.ms(batch.rows) * more + change)

    def synchronize(self) -> None:
        pass  # a simulated pass is over when decode returns

    def logits(self, row: int) -> Logits:
        token, probability = self._says.after(self._read[row])
        logits: Logits = np.full(self.n_vocab, _NEVER, np.float32)
        logits[-_OTHERS:] = np.log((1 - probability) / _OTHERS)
        logits[token] = np.log(probability)
        return logits

    def choose_on_device(self, sequence: int, on: bool) -> bool:
        return False

    def length(self, sequence: int) -> int:
        return self._held[sequence]

    def first_position(self, sequence: int) -> int:
        return 0 if self.length(sequence) else -1

    def remove(self, sequence: int, start: int, end: int = -1) -> bool:
        self._held[sequence] = min(self._held[sequence], start)
        return True

    def close(self) -> None:
        pass  # nothing of C's is held


def describe_pair(
    name: str,
    target: SimulatedContext,
    draft: SimulatedContext | None,
    learned: LearnedProfile,
    clock: SimulatedClock,
    *,
    chooses_on_device: bool,
) -> dict[str, Any]:
    """Return what a `LoadedPair` of simulated contexts is made of, but for what drafts."""
    settings, opened, table = EngineSettings(), ExitStack(), learned.costs.target
    draft_model = draft.model if draft else None
    models = PairModels(
        target.model, draft_model, None, settings, target.n_ctx, target.n_seq, 1, _N_BATCH, opened
    )
    prefixes, slots = PrefixStore(0, CopyCost(lambda: 0.0)), Slots(target, draft, 0, target.n_seq)
    return {
        "files": PairFiles(name, ""),
        "models": models,
        "shared": Lane(target, Batch(_N_BATCH), slots, table, clock=clock),
        "exact": ExactMode(models, draft, table, prefixes, None),
        "no_rollback": None,
        "no_draft": "",
        "chooses_on_device": chooses_on_device,
        "learned": learned,
        "profile": ProfileStore(None, ""),
        "prefixes": prefixes,
        "sessions": SessionStore(None, "", 0, print),
        "notes": [],
    }


def count_together(answers: Iterable[Answer], start: float, end: float) -> int:
    """Return how many tokens of several answers were written from a time to another."""
    count = 0
    for answer in answers:
        times = zip(answer.deltas, answer.stamps, strict=True)
        seen = [delta.tokens for delta, at in times if start <= at <= end]
        # Tokens of a delta are counted from the beginning of its answer.
        count += (seen[-1] - (seen[0] if start else 0)) if seen else 0
    return count


class SimulatedPair(LoadedPair):
    """A loaded pair whose models play a trace, after a prompt of token 0.

    Several sequences play parts of it, each after a prompt of the token that stands before its own;
    dearer: as SimulatedContext's. believed: what the engine begins with instead of the real costs.
    """

    def __init__(
        self,
        trace: Trace,
        costs: CostProfile,
        calibration: Calibration,
        clock: SimulatedClock,
        sequences: int = 1,
        dearer: float = 0.0,
        believed: CostProfile | None = None,
    ) -> None:
        """Prepare a replay. Raises ValueError if the costs have no draft."""
        believed = believed or costs
        if costs.draft is None or believed.draft is None:
            raise ValueError("this cost profile has no draft")
        right = range(1, len(trace.target) + 1)
        guessed = [
            t if hit else t + len(right) + 1 for t, hit in zip(right, trace.hits, strict=True)
        ]
        sure = [confidence(at) for at in trace.buckets]
        script = Said(right, [0.99] * len(right))
        target = SimulatedContext(clock, costs.target, script, sequences, dearer)
        draft = SimulatedContext(clock, costs.draft, Said(guessed, sure), sequences + 1)
        # Tables of its own, since the rounds correct them.
        table, steps = (
            CostTable(measured.as_dict(), change=measured.change)
            for measured in (believed.target, believed.draft)
        )
        learned = LearnedProfile(
            CostProfile(table, steps, believed.overhead_ms), Calibrations({"draft": calibration})
        )
        shared = SharedTokens()
        drafter = DraftModel(draft, Batch(_N_BATCH), steps, lambda: False, sequences, shared, clock)
        parts = describe_pair("simulated", target, draft, learned, clock, chooses_on_device=False)
        super().__init__(drafter=drafter, **parts)

    @property
    def looks(self) -> int:
        """How often the draft model looked in at text written without it."""
        assert self.drafter is not None
        assert isinstance(self.drafter.context, SimulatedContext)
        return self.drafter.context.passes[self.models.parallel]
