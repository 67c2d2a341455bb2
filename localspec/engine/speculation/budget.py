"""The budget of speculation: what it may lose against plain decoding, and how long it waits after failures.

Nobody knows beforehand whether drafts will be accepted, so "never slower than plain decoding" needs
a bound on what trying may cost. Every answer has one `Budget`, in milliseconds of measured cost. It
has a balance for tokens that are known at once, as from n-gram lookup, and one for the draft model, so
that neither loses what the other gains. A round with drafts is charged with what it costs beyond a
plain round and credited with the tokens that it gains, and a probe of the draft model with its cost.
Nothing is tried that the balance could not pay for if all of it failed. So drafts cost an answer at most
the initial balances and what each round refills: 2 plain rounds and 2 % without a draft model, and
5 rounds and 1 % more with one. Where a change of the pass's width is dear, as on a GPU that records
graphs, each is charged, and one there and back is added to the initial balance. Sequences that share a
pass divide its cost by their drafts. Together they may cost more than each alone, so that one round can
overdraw a balance, which then has to be refilled first.

Three things are outside the budget: drafts that the client predicted, drafts of a depth that it
fixed, and the first reading of a text by the draft model, which happens once per token. What heads and
sidecars read of an answer without drafting for it is inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# In plain rounds: the initial balances, what each round adds, and the cap of both. Gains
# add to a balance as well. A pass of 64 rows costs about 20 rounds.
INITIAL_KNOWN_ROUNDS, KNOWN_REFILL_ROUNDS = 2.0, 0.02
INITIAL_MODEL_ROUNDS, MODEL_REFILL_ROUNDS = 5.0, 0.01
MAX_BALANCE_ROUNDS = 32.0

# Probes also have a budget of their own, which spreads them over the answers with a pair. It is measured in
# plain tokens. That of a new draft model begins with INITIAL_PROBE_TOKENS, and what short answers leave
# over is kept. It grows by this share of the time without drafts.
PROBE_SHARE = 0.007
INITIAL_PROBE_TOKENS, MAX_PROBE_TOKENS = 2.0, 4.0

# Rounds to wait after each failed attempt, one after another; the last number repeats.
SEARCH_BACKOFFS = (1, 2, 4, 8)  # after a search for drafts of which none was accepted
# After a decision not to use the draft model, until a probe or another answer.
DECISION_BACKOFFS = (0, 1, 2, 4, 8, 16, 32)
# Rounds to wait before a pass is made wider than seems to pay. Only rounds count in which the additional
# drafts would likely be accepted. Without these trials, the cost of a wide pass that was measured too high is
# not corrected before it is measured again.
WIDE_PASS_BACKOFFS = (7, 31, 127, 511)
# Answers between measurements of passes, as long as all were disturbed by other programs.
MEASURING_BACKOFFS = (0, 1, 2, 4, 8, 16, 32)
# Cost of noticing a copyable passage one round late, as a fraction of a target pass. Assumes one such
# passage per 100 tokens, and that each copied token saves half a pass.
NOTICE_DELAY_COST = 1 / 200


class Backoff:
    """The rounds to wait after each failed attempt: more each time, until an attempt succeeds."""

    def __init__(self, lengths: Sequence[float]) -> None:
        self._lengths = lengths
        self._n_failures = 0
        self.left = 0.0  # rounds that remain to wait

    def take(self) -> bool:
        """Count one round. Return False if the wait is over."""
        self.left -= 1
        return self.left >= 0

    def begin(self, longest: float = math.inf) -> None:
        """Begin the next wait, of at most `longest` rounds, because an attempt failed."""
        self.left = min(self._lengths[min(self._n_failures, len(self._lengths) - 1)], longest)
        self._n_failures += 1

    def wake(self) -> None:
        """End the present wait, because something has changed."""
        self.left = 0.0

    def end(self) -> None:
        """End the wait, and let the next one be the first again, because an attempt succeeded."""
        self.left, self._n_failures = 0.0, 0


def max_search_backoff(search_cost: float) -> int:
    """Return the rounds between fruitless searches at which these cost least.

    search_cost: cost of the searches of a round, as a fraction of a target pass. Searching every n
    rounds costs search_cost / n of a pass per round, and noticing a passage n / 2 rounds late costs
    NOTICE_DELAY_COST · n / 2. The sum is least at n = √(2 · search_cost / NOTICE_DELAY_COST).
    """
    return int(math.sqrt(2 * search_cost / NOTICE_DELAY_COST)) - 1


class ProbeBudget:
    """The milliseconds that probes of one draft model may take; none before the first round."""

    def __init__(self) -> None:
        self._saved_ms: float | None = None

    def refill(self, spent_ms: float, plain_ms: float, *, new: bool) -> None:
        """Add a share of `spent_ms`, a time without drafts.

        plain_ms: cost of a plain token. new: hardly any draft was checked yet.
        """
        if self._saved_ms is None:
            self._saved_ms = INITIAL_PROBE_TOKENS * plain_ms if new else 0.0
        saved_ms = self._saved_ms + spent_ms * PROBE_SHARE
        self._saved_ms = min(saved_ms, MAX_PROBE_TOKENS * plain_ms)

    def pay(self, cost_ms: float) -> bool:
        """Pay for a probe. Return False if too little is saved."""
        if self._saved_ms is None or self._saved_ms < cost_ms:
            return False
        self._saved_ms -= cost_ms
        return True


class Balance:
    """The milliseconds that drafts of one kind may still lose an answer."""

    def __init__(self, initial_rounds: float, refill_rounds: float) -> None:
        self._initial_rounds, self._refill_rounds = initial_rounds, refill_rounds
        self._balance_ms: float | None = None

    def open(self, plain_ms: float, extra_ms: float = 0.0) -> None:
        """Set the initial balance, unless there is one.

        plain_ms: the answer's share of a plain round. extra_ms: is added to the usual balance.
        """
        if self._balance_ms is None:
            self._balance_ms = self._initial_rounds * plain_ms + extra_ms

    @property
    def balance_ms(self) -> float:
        """The milliseconds that may still be lost."""
        return self._balance_ms or 0.0

    def affords(self, cost_ms: npt.NDArray[np.float64]) -> int:
        """Return how many drafts the balance could pay for if all of them failed.

        cost_ms[k]: cost of k drafts beyond a plain round, from 0 drafts on.
        """
        return int(np.flatnonzero(cost_ms <= max(self.balance_ms, 0.0))[-1])

    def settle(self, cost_ms: float, gained: int, plain_ms: float) -> None:
        """Book drafts: what they cost beyond a plain round, and the tokens that they gained."""
        balance_ms = self.balance_ms + gained * plain_ms - cost_ms
        self._balance_ms = min(balance_ms, MAX_BALANCE_ROUNDS * plain_ms)

    def refill(self, plain_ms: float) -> None:
        """Add what each round adds, whether it had drafts or not."""
        self.open(plain_ms)
        cap_ms = max(self.balance_ms, MAX_BALANCE_ROUNDS * plain_ms)
        self._balance_ms = min(self.balance_ms + self._refill_rounds * plain_ms, cap_ms)

    def pay(self, cost_ms: float) -> bool:
        """Pay for something that gains nothing at once. Return False if the balance is too small."""
        if self.balance_ms < cost_ms:
            return False
        if cost_ms:
            self._balance_ms = self.balance_ms - cost_ms
        return True

    def pay_probe(self, cost_ms: float, probes: ProbeBudget) -> bool:
        """Pay for a probe. Return False if the balance or the probe budget is too small."""
        return self.balance_ms >= cost_ms and probes.pay(cost_ms) and self.pay(cost_ms)


class Budget:
    """The limits of what drafts may lose one answer, and its backoffs.

    known: for tokens that are known at once. model: for drafts and probes of the draft model.
    searches: backoff between searches for drafts.
    """

    def __init__(self) -> None:
        self.known = Balance(INITIAL_KNOWN_ROUNDS, KNOWN_REFILL_ROUNDS)
        self.model = Balance(INITIAL_MODEL_ROUNDS, MODEL_REFILL_ROUNDS)
        self.searches = Backoff(SEARCH_BACKOFFS)
