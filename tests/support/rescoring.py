"""Re-scoring: could the target alone, reading an answer one by one, have given it?

Logits of passes of other widths differ in their last bits, so two texts of one request may part, without
exact mode, where a choice is that near an edge. Here that nearness has a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from localspec.engine.llama import Batch, Context, ContextSettings, Logits, Model, gpus
from localspec.engine.sampling.guide import Guide
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.protocol.frames import TokenLogprob

# How far a logit of these float32 models moves between widths, kernels and numbers of threads
# (measured with kernels for AVX2 and AVX-512: up to 2.3e-4), with room for kinds not measured.
# A GPU rounds both sides of a product of several rows to TF32, eleven bits, and of one row to nothing
# (tests/engine/test_rounding.py computes what the weights' share of that does).
NEAR_TIE = 2e-2 if gpus() else 2e-3
# The shipped pair's: eight-bit weights, and activations rounded by the row, so that other widths move a
# logit by up to about 0.05, and two of them in opposite directions (measured: 0.104 at most, between
# sixty-four streams). A wrong token is off by whole units.
SHIPPED_NEAR_TIE = 0.2


def rows_alone(path: str, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Logits]:
    """The target's row of logits before each token of `answer`, its text read token by token."""
    text = [*prompt, *answer]
    settings = ContextSettings(n_ctx=len(text) + 8, n_batch=64, n_seq=1, n_outputs=1, n_threads=1)
    with Model(path) as model, Context(model, settings) as context:
        batch = Batch(64)
        for position, token in enumerate(text[:-1]):
            batch.clear()
            batch.add(token, position, 0, True)
            context.decode(batch)
            if position >= len(prompt) - 1:
                yield np.array(context.logits(0))


def worst_gap(
    path: str, prompt: Sequence[int], answer: Sequence[int], banned: Iterable[int] = ()
) -> float:
    """The largest amount by which another token's logit beat the answer's, reading it one by one.

    The tokens `banned` could not be chosen, as the tokens that end an answer with `ignore_eos`.
    """
    worst = 0.0
    for row, token in zip(rows_alone(path, prompt, answer), answer, strict=True):
        row[list(banned)] = -np.inf
        worst = max(worst, float(row.max() - row[token]))
    return worst


def first_strange(
    path: str,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampler: Sampler,
    matcher: Guide | None = None,
    near: float = NEAR_TIE,
) -> int | None:
    """The first place of `answer` whose token the target alone would not have given, if any.

    `sampler` has the request's settings and its seed, `matcher` its grammar; a token is given too where
    it is that `near` an edge.
    """
    for place, (row, token) in enumerate(
        zip(rows_alone(path, prompt, answer), answer, strict=True)
    ):
        mask = matcher.mask() if matcher is not None else None
        row = sampler.adjusted(row, [*prompt, *answer[:place]], mask)
        if not near_draw(sampler, row, place, token, near):
            return place
        if matcher is not None:
            matcher.consume(token)
    return None


def near_draw(sampler: Sampler, row: Logits, place: int, token: int, rounding: float) -> bool:
    """Would `token` be given for this row, or one whose logits differ by up to `rounding`?

    Tried: the token higher and all that comes before it lower, with the rest of the row as it is, or
    all higher, or all lower, which is what moves the edges of top-p, min-p and typical.
    """
    above = row > row[token]
    below = row < row[token]
    for up, down in ((0, 0), (-1, 1), (1, -1)):
        moved = row.copy()
        moved[above] += up * rounding
        moved[below] += down * rounding
        moved[token] = row[token] + rounding
        lowered: set[int] = set()
        while (drawn := sampler.sample(moved, place)) not in lowered:
            if drawn == token:
                return True
            lowered.add(drawn)
            moved[drawn] = row[drawn] - rounding
    return False


def assert_same_logprobs(ours: Sequence[TokenLogprob], theirs: Sequence[TokenLogprob]) -> None:
    """The same tokens with the same log-probabilities, but for rounding.

    Of those beside them, one may be listed in another's place where the two are that near.
    """
    assert [entry.id for entry in ours] == [entry.id for entry in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert abs(one.logprob - two.logprob) < NEAR_TIE
        assert len(one.top) == len(two.top)
        for (token, _, p), (_, _, q) in zip(one.top, two.top, strict=True):
            assert abs(p - q) < NEAR_TIE
            listed = {other: value for other, _, value in two.top}
            assert abs(listed.get(token, two.top[-1][2]) - p) < NEAR_TIE


def assert_alike(
    path: str,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    sampler: Sampler | None = None,
    matcher: Callable[[], Guide] | None = None,
    near: float = NEAR_TIE,
) -> None:
    """The same answer twice; or both are the target's, and part where a choice is within rounding.

    sampler: with the request's settings and its seed; None: greedy. matcher: makes that of its grammar.
    """
    if ours == theirs:
        return
    sampler = sampler or Sampler(Settings(temperature=0.0))
    for answer in (ours, theirs):
        grammar = matcher() if matcher else None
        strange = first_strange(path, prompt, answer, sampler, grammar, near)
        assert strange is None, f"token {strange} of {answer} is not the target's; {ours}; {theirs}"
