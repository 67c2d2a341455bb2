"""Counts and times of one request, and what its last frame reports of them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from localspec.engine.speculation.step import SequenceStep
from localspec.protocol.frames import CacheLoss, Speculation, Timings, Verified


@dataclass(slots=True)
class RequestStatistics:
    """Counts and times of one request. Durations are in milliseconds; points in time are perf_counter's.

    plain_ms: what the same tokens would have cost by plain decoding beside the same other sequences.
    """

    n_prompt: int
    cached: int = 0
    moved: int = 0  # tokens of `cached` that were moved from another place of the text
    exact: int = 0  # tokens of `cached` before the first one that was ever moved
    known: int = 0  # tokens of the prompt with which an earlier text begins
    loss: CacheLoss | None = None  # why some of them were read again
    drafted: int = 0
    accepted: int = 0
    produced: int = 0
    produced_timed: int = 0  # tokens of `produced` that the accounting has seen
    timed: int = 0  # tokens that came from timed rounds
    rounds: int = 0
    round_ms: float = 0.0
    plain_ms: float = 0.0
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

    def observe_round(self, round_ms: float, plain_ms: float) -> int:
        """Book a round that only decoded, and return the tokens produced since the last such round.

        plain_ms: what one token would have cost by plain decoding.
        """
        n_new, self.produced_timed = self.produced - self.produced_timed, self.produced
        self.rounds += 1
        self.timed += n_new
        self.round_ms += round_ms
        self.plain_ms += plain_ms * n_new
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
        measured = self.rounds > 0 and self.plain_ms > 0 and self.round_ms > 0
        return Speculation(
            active=active,
            kind=kind,
            reason=None if active else reason,
            drafted=self.drafted,
            accepted=self.accepted,
            rounds=self.rounds,
            mean_tokens_per_pass=self.timed / self.rounds if self.rounds else 0.0,
            plain_tokens_per_second=1e3 * self.timed / self.plain_ms if measured else None,
            speed_up=self.plain_ms / self.round_ms if measured else None,
            verification=verification,
            exact=exact,
            predicted_accepted=self.predicted_accepted,
            predicted_rejected=self.predicted_rejected,
        )


def list_counts(counts: Counter[int]) -> list[int]:
    """Return the counts of 0, 1, … up to the largest key."""
    return [counts[value] for value in range(max(counts, default=-1) + 1)]
