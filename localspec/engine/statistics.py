"""Counts and times of one request, and what its last frame reports of them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from localspec.engine.speculation.step import SequenceStep
from localspec.protocol.frames import CacheLoss, Speculation, Timings, Verified


@dataclass(slots=True)
class RequestStatistics:
    """Counts and times of one request. Points in time are perf_counter's."""

    n_prompt: int
    cached: int = 0
    moved: int = 0  # tokens of `cached` that were moved from another place of the text
    exact: int = 0  # tokens of `cached` before the first one that was ever moved
    known: int = 0  # tokens of the prompt with which an earlier text begins
    ahead: int = 0  # tokens of `cached` that were read before the request came
    loss: CacheLoss | None = None  # why some of them were read again
    drafted: int = 0
    accepted: int = 0
    produced: int = 0
    produced_timed: int = 0  # tokens of `produced` that the accounting has seen
    produced_last: int = 0  # tokens of `produced` that the last round has added
    comparison: Comparison = field(default_factory=lambda: Comparison())
    predicted_accepted: int = 0
    predicted_rejected: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    accepts: Counter[int] = field(default_factory=Counter)
    trace: list[Verified] | None = None  # None unless the request wants timings
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float = 0.0

    def observe_tokens(self, count: int, began_at: float) -> None:
        """Note that a pass that began at `began_at` has just produced `count` tokens, possibly 0."""
        now = self.last_token = time.perf_counter()
        if self.first_token is None:
            # The first of several tokens counts as produced when its share of the pass was over.
            self.first_token = now - (now - began_at) * (1 - 1 / max(count, 1))

    def since_start_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3

    def since_first_ms(self) -> float:
        """Return the time since the first token came, or since the request started if none has."""
        return (time.perf_counter() - (self.first_token or self.started)) * 1e3

    def observe_verification(self, step: SequenceStep, accepted: int) -> None:
        """Count the drafts of a step, of which `accepted` were accepted."""
        drafted = len(step.drafts.tokens)
        if len(step.read) == 1:  # any other pass mostly read a prompt
            self.depths[drafted] += 1
            self.accepts[accepted] += 1
            if self.trace is not None:
                kind = step.drafter.kind if drafted and step.drafter is not None else ""
                self.trace.append(Verified(drafted, accepted, kind))
        if drafted and step.drafter is not None:
            self.drafted += drafted
            self.accepted += accepted
            self.kinds[step.drafter.kind] += drafted
            if step.drafter.predicted:
                self.predicted_accepted += accepted
                self.predicted_rejected += drafted - accepted

    def observe_round(self, spent: RoundTimes, plain: PlainRound) -> int:
        """Book a round that only decoded, and return the tokens produced since the last such round."""
        n_new, self.produced_timed = self.produced - self.produced_timed, self.produced
        self.comparison.observe(self.produced_last, spent, plain)
        return n_new

    def timings(self, generated: int) -> Timings:
        """Return the times of the answer under llama-server's names."""
        first = self.first_token or time.perf_counter()
        prompt_ms = (first - self.started) * 1e3
        # llama-server counts from the first token to the last, which is one token less.
        predicted_ms = max(self.last_token - first, 0.0) * 1e3
        steps = max(generated - 1, 0) if predicted_ms > 0 else 0
        n_read = self.n_prompt - self.cached
        return Timings(
            cache_n=self.cached,
            cache_shift_n=self.moved,
            cache_exact_n=self.exact,
            cache_known_n=max(self.known, self.cached),
            cache_ahead_n=self.ahead or msgspec.UNSET,
            cache_loss=self.loss or msgspec.UNSET,
            prompt_n=n_read,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / max(n_read, 1),
            prompt_per_second=1e3 * n_read / max(prompt_ms, 1e-6),
            predicted_n=generated,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / steps if steps else 0.0,
            predicted_per_second=1e3 * steps / predicted_ms if steps else 0.0,
            draft_n=self.drafted,
            draft_n_accepted=self.accepted,
        )

    def speculation(
        self, generated: int, reason: str | None, verification: str | None, exact: bool
    ) -> Speculation:
        """Return what speculation did. reason: why drafting was impossible, if it was."""
        active = self.drafted > 0
        kind = max(self.kinds, key=lambda k: self.kinds[k]) if self.kinds else None
        if not active and reason is None:
            is_short = generated <= 2
            reason = (
                "the answer was too short" if is_short else "drafting would not have been faster"
            )
        compared = self.comparison
        speed_up, unknown = compared.find_speed_up()
        return Speculation(
            active=active,
            kind=kind,
            reason=None if active else reason,
            drafted=self.drafted,
            accepted=self.accepted,
            rounds=compared.rounds,
            mean_tokens_per_pass=compared.tokens / compared.rounds if compared.rounds else 0.0,
            plain_tokens_per_second=compared.tokens_per_second / speed_up if speed_up else None,
            speed_up=speed_up,
            speed_up_reason=unknown,
            verification=verification,
            exact=exact,
            predicted_accepted=self.predicted_accepted,
            predicted_rejected=self.predicted_rejected,
        )


# What the same tokens would have cost without drafts, in the same moments.


class PlainRound(NamedTuple):
    """The expected milliseconds of a round of the same sequences without drafts."""

    pass_ms: float
    overhead_ms: float

    @property
    def total_ms(self) -> float:
        return self.pass_ms + self.overhead_ms


class RoundTimes(NamedTuple):
    """The milliseconds of a round, in total and of the target's pass.

    expected_pass_ms, expected_rest_ms: what the pass, and drafting with all around it, should have taken.
    max_pass_ms: what its rows would cost one after another. Together they never cost more.
    """

    total_ms: float
    pass_ms: float
    expected_pass_ms: float
    expected_rest_ms: float
    max_pass_ms: float


# A table of costs that says this much more of passes than their rows would cost one after another was
# measured while other programs came and went, and says nothing about the speed-up.
MAX_EXCESS = 1.1


@dataclass(slots=True)
class Comparison:
    """An answer's rounds beside plain decoding.

    Other programs may slow a machine down ten times for a second, so a round cannot be compared with plain
    passes of another moment. What both should have taken comes from one table instead. How much longer the
    answer's passes took than that is the load of its moment, which plain passes would have had as well.
    """

    tokens: int = 0
    rounds: int = 0
    total_ms: float = 0.0
    pass_ms: float = 0.0
    expected_pass_ms: float = 0.0
    limited_pass_ms: float = 0.0  # the same, within what is possible
    expected_rest_ms: float = 0.0
    plain_pass_ms: float = 0.0
    plain_overhead_ms: float = 0.0

    def observe(self, tokens: int, spent: RoundTimes, plain: PlainRound) -> None:
        """Book a round that only decoded and produced `tokens` tokens."""
        self.tokens += tokens
        self.rounds += 1
        self.total_ms += spent.total_ms
        self.pass_ms += spent.pass_ms
        self.expected_pass_ms += spent.expected_pass_ms
        self.limited_pass_ms += min(max(spent.expected_pass_ms, plain.pass_ms), spent.max_pass_ms)
        self.expected_rest_ms += spent.expected_rest_ms
        self.plain_pass_ms += tokens * plain.pass_ms
        self.plain_overhead_ms += tokens * plain.overhead_ms

    def observe_probe(self, spent_ms: float, expected_ms: float) -> None:
        """Book the time of checking whether drafts would pay."""
        self.total_ms += spent_ms
        self.expected_rest_ms += expected_ms

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.total_ms

    @property
    def quiet_ms(self) -> float | None:
        """The milliseconds that the rounds would have taken on a quiet machine; None: not known."""
        if not self.tokens or not min(self.pass_ms, self.limited_pass_ms) > 0:
            return None
        if self.expected_pass_ms > MAX_EXCESS * self.limited_pass_ms:
            return None
        load = self.pass_ms / self.limited_pass_ms
        # What is not a pass was measured in this answer, and learned from others. The load of another moment
        # makes the one too large, and an interruption the other.
        rest_ms = min(self.expected_rest_ms, (self.total_ms - self.pass_ms) / load)
        return self.limited_pass_ms + rest_ms

    def find_speed_up(self) -> tuple[float, None] | tuple[None, str]:
        """Return the speed-up over plain decoding, or None and why it is not known."""
        if not self.tokens or not min(self.pass_ms, self.limited_pass_ms) > 0:
            return None, "no pass of the answer only decoded"
        if (quiet_ms := self.quiet_ms) is None:
            return None, "the machine was too busy to measure what passes cost"
        rest_ms = quiet_ms - self.limited_pass_ms
        overhead_ms = min(self.plain_overhead_ms, rest_ms * self.tokens / self.rounds)
        plain_ms = self.plain_pass_ms + overhead_ms
        return plain_ms / quiet_ms, None


def list_counts(counts: Counter[int]) -> list[int]:
    """Return the counts of 0, 1, … up to the largest key."""
    return [counts[value] for value in range(max(counts, default=-1) + 1)]
