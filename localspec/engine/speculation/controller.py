"""What each generation brings to the next pass: which kind of drafts, how deep, and the drafts."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from localspec.engine.llama import DecodeFatal, NoKvSlot, NotFinite
from localspec.engine.pair.lane import Lane
from localspec.engine.pair.pair import Pair
from localspec.engine.sampling.sampler import Distribution
from localspec.engine.sequence import Sequence
from localspec.engine.speculation.depth import (
    MAX_DEPTH,
    MAX_LIMIT,
    Candidate,
    FixedDepth,
    Floats,
    best_depth,
    bucket,
)
from localspec.engine.speculation.drafters.model import DraftRequest
from localspec.engine.speculation.drafters.ngram import length_bucket

# With a fixed depth the kinds are ranked; the policy compares what they are expected to give instead.
RANKED = ("grammar", "draft", "ngram")
LOOKUP_LIMIT = 4 * MAX_DEPTH  # tokens of a copied passage verified in one pass
_CERTAIN = bucket(1.0)


@dataclass(slots=True)
class SequenceStep:
    """One generation's part of a pass: tokens to read, then drafts to verify.

    candidate, kind: what it was decided to draft, None for nothing. looked_up, match: what lookup
    found and how long its match was, used or not. base: rows of the pass before this turn's drafts.
    first_row: the row of the last token read; -1 for a chunk in the middle of a prompt.
    """

    gen: Sequence
    read: list[int]
    candidate: Candidate | None = None
    kind: str | None = None
    drafted: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)
    looked_up: list[int] = field(default_factory=list)
    match: int = 0
    base: int = 0
    first_row: int = -1

    @property
    def rows(self) -> int:
        return len(self.read) + len(self.drafted)

    def forget_drafts(self) -> None:
        """The pass brings one token for this turn."""
        self.kind = self.candidate = None
        self.drafted, self.buckets, self.probs = [], [], []


@dataclass(frozen=True, slots=True)
class _Option:
    """A kind of drafts a generation could have now; `tokens` where they are known already."""

    kind: str
    candidate: Candidate
    tokens: list[int] = field(default_factory=list)


class Planner:
    """Decides and drafts for all turns of a round."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def draft(self, lane: Lane, turns: list[SequenceStep]) -> list[tuple[Sequence, Exception]]:
        """Give each writing turn the drafts that are worth verifying, if any.

        Returns those whose own lookup or grammar failed, and how. What fails in deciding or drafting
        for several together costs them their drafts only, unless a context is lost (`DecodeFatal`).
        """
        broken: list[tuple[Sequence, Exception]] = []
        rows = sum(len(turn.read) for turn in turns)
        writing = [turn for turn in turns if not turn.gen.reading]
        spare = min(lane.context.n_outputs - len(turns), lane.batch.capacity - rows)
        each = spare // max(len(writing), 1)  # rows that one turn may draft
        choosing = []
        for turn in writing:
            try:
                if self._consider(lane, turn, rows, each):
                    choosing.append(turn)
            except Exception as error:
                broken.append((turn.gen, error))
        if not choosing:
            return broken
        try:
            rate = self._decide(lane, choosing, rows - len(choosing))
            self._ask_model(lane, [t for t in choosing if t.kind == "draft"], rate)
        except DecodeFatal:
            raise
        except Exception as error:
            for turn in choosing:
                turn.forget_drafts()
                self.stop_drafting(lane, turn.gen, error)
        for turn in choosing:
            # Under the rejection rule what a grammar forbids is rejected, and the rest made up for it.
            if turn.gen.matcher is not None and turn.drafted and not turn.probs:
                try:
                    turn.drafted = turn.drafted[: turn.gen.matcher.valid(turn.drafted)]
                except Exception as error:
                    broken.append((turn.gen, error))
        return broken

    def stop_drafting(self, lane: Lane, gen: Sequence, error: Exception) -> None:
        """The draft model cannot serve this request any more; its answer goes on without."""
        lane.slots.roll_back_draft(gen.slot, 0)
        if isinstance(error, NoKvSlot):
            gen.no_draft_model("the draft's context is full")
            return
        if isinstance(error, NotFinite):
            gen.no_draft_model("the draft model gives no numbers (NaN or infinite)")
            return
        traceback.print_exception(error)
        gen.no_draft_model("drafting failed")

    # ------------------------------------------------------------------------ which kind

    def _consider(self, lane: Lane, turn: SequenceStep, rows: int, most: int) -> bool:
        """Set the turn's kind and candidate to the best this generation could have now."""
        gen = turn.gen
        room = self._pair.n_ctx - len(gen.slot.tokens) - 1
        limit = min(gen.left - 1, room, most, MAX_LIMIT)
        if lane.max_depth is not None:
            limit = min(limit, lane.max_depth)
        options = self._options(turn, limit) if limit > 0 else []
        if not options:
            return False
        best = self._best(lane, options, rows, isinstance(gen.policy, FixedDepth))
        turn.kind, turn.candidate = best.kind, best.candidate
        turn.drafted, turn.buckets = list(best.tokens), list(best.candidate.known)
        return True

    def _options(self, turn: SequenceStep, limit: int) -> list[_Option]:
        gen, options = turn.gen, []
        if "grammar" in gen.beliefs and gen.matcher is not None:
            forced = gen.matcher.forced()[:limit]
            if forced:
                options.append(_known("grammar", gen, forced, _CERTAIN))
        if "ngram" in gen.beliefs:
            turn.looked_up, turn.match = gen.lookup.propose(
                gen.slot.tokens, min(limit, LOOKUP_LIMIT), gen.generated
            )
            if turn.looked_up:
                options.append(_known("ngram", gen, turn.looked_up, length_bucket(turn.match)))
        drafter = self._pair.drafter
        if "draft" in gen.beliefs and drafter is not None:
            spread = max(min(gen.left, 96) / 4, 1.0)  # rounds that a first reading is spread over
            deepest = limit if isinstance(gen.policy, FixedDepth) else min(limit, MAX_DEPTH)
            entry_ms = drafter.reading_ms(gen.slot) / spread
            options.append(
                _Option(
                    "draft", Candidate(gen.beliefs["draft"], deepest, drafter.step_ms(), entry_ms)
                )
            )
        return options

    def _best(self, lane: Lane, options: list[_Option], rows: int, fixed: bool) -> _Option:
        if len(options) == 1:
            return options[0]
        if fixed:
            return min(options, key=lambda option: RANKED.index(option.kind))
        pass_ms = lane.pass_ms(rows + MAX_LIMIT)[rows:]
        rate = 1 / (float(pass_ms[0]) + self._pair.learned.costs.overhead_ms)
        return max(options, key=lambda o: best_depth(o.candidate, pass_ms - pass_ms[0], rate)[2])

    # ------------------------------------------------------------------------ how deep

    def _decide(self, lane: Lane, turns: list[SequenceStep], other: int) -> float:
        """Fix each turn's depth; turns of depth 0 lose kind and drafts. Returns the rate aimed at."""
        candidates = [turn.candidate for turn in turns if turn.candidate is not None]
        most = sum(candidate.limit for candidate in candidates)
        pass_ms = lane.pass_ms(other + len(turns) + most)
        overhead = self._pair.learned.costs.overhead_ms
        if any(isinstance(turn.gen.policy, FixedDepth) for turn in turns):
            each = [
                turn.gen.policy.decide([candidate], pass_ms, overhead, other)
                for turn, candidate in zip(turns, candidates, strict=True)
            ]
            depths, rate = [d.depths[0] for d in each], max(d.rate for d in each)
        else:
            decision = turns[0].gen.policy.decide(candidates, pass_ms, overhead, other)
            depths, rate = decision.depths, decision.rate
        base = other + len(turns)
        for turn, depth in zip(turns, depths, strict=True):
            turn.base = base
            base += depth
            if depth == 0:
                turn.kind = None
            turn.drafted, turn.buckets = turn.drafted[:depth], turn.buckets[:depth]
        return rate

    # ------------------------------------------------------------------------ the draft model

    def _ask_model(self, lane: Lane, turns: list[SequenceStep], rate: float) -> None:
        if not turns or self._pair.drafter is None:
            return
        pass_ms = lane.pass_ms(max(turn.base for turn in turns) + MAX_LIMIT)
        relative = [pass_ms[turn.base :] - pass_ms[turn.base] for turn in turns]
        asks = [self._ask(t, costs, rate) for t, costs in zip(turns, relative, strict=True)]
        try:
            self._pair.drafter.propose(asks)
        except DecodeFatal:
            raise
        except Exception as error:
            for turn in turns:
                turn.forget_drafts()
                self.stop_drafting(lane, turn.gen, error)
            return
        for turn, ask, costs in zip(turns, asks, relative, strict=True):
            count = len(ask.tokens)
            # Under the rejection rule a draft may not be dropped for what it turned out to be: the
            # ones left would no longer be drawn from q, and the answer not from p.
            if not turn.gen.reject and turn.candidate is not None:
                turn.candidate.known = ask.buckets
                count = turn.gen.policy.worth_verifying(turn.candidate, costs, rate)
            turn.drafted = ask.tokens[:count]
            turn.buckets = ask.buckets[:count]
            turn.probs = ask.probs[:count]
            if not count:
                turn.kind = None

    def _ask(self, turn: SequenceStep, pass_ms: Floats, rate: float) -> DraftRequest:
        gen, candidate = turn.gen, turn.candidate

        def more(ask: DraftRequest) -> bool:
            if not ask.tokens:
                return True  # that something is drafted has been decided
            if candidate is None or self._pair.vocab.is_eog(ask.tokens[-1]):
                return False
            candidate.known = ask.buckets
            return gen.policy.keep_drafting(candidate, pass_ms, rate)

        return DraftRequest(gen.slot, gen.sampler if gen.reject else None, more)


def _known(kind: str, gen: Sequence, tokens: list[int], at: int) -> _Option:
    """Drafts that cost nothing and are known at once, all of one confidence bucket."""
    known = [at] * len(tokens)
    return _Option(kind, Candidate(gen.beliefs[kind], len(tokens), 0.0, 0.0, known), tokens)
