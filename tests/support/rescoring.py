"""Re-scoring: whether the target alone, decoding one token at a time, could have produced an answer.

Logits of passes of other widths differ in their last bits, so two texts of one request may diverge, without
exact mode, where two choices are nearly equal. These functions bound how nearly.
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
    """Yield the target's row of logits before each token of `answer`, decoding token by token."""
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
    """Return the largest amount by which another token's logit exceeded that of the answer's token.

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
    """Return the first index in `answer` that the target alone would not have produced, if any.

    `sampler` has the request's settings and its seed, `matcher` its grammar. A token within `near` of an
    edge is accepted, too.
    """
    for index, (row, token) in enumerate(
        zip(rows_alone(path, prompt, answer), answer, strict=True)
    ):
        mask = matcher.mask() if matcher is not None else None
        row = sampler.adjusted(row, [*prompt, *answer[:index]], mask)
        if not near_draw(sampler, row, index, token, near):
            return index
        if matcher is not None:
            matcher.consume(token)
    return None


def near_draw(sampler: Sampler, row: Logits, place: int, token: int, rounding: float) -> bool:
    """Return whether `token` would be drawn for this row, or for one whose logits differ by `rounding`.

    It tries the token higher and all that comes before it lower, with the rest of the row as it is, or
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
    """Assert the same tokens with the same log-probabilities, except for rounding.

    Among the alternatives, two may be swapped if they are that near.
    """
    assert [entry.id for entry in ours] == [entry.id for entry in theirs]
    for our_entry, their_entry in zip(ours, theirs, strict=True):
        assert abs(our_entry.logprob - their_entry.logprob) < NEAR_TIE
        assert len(our_entry.top) == len(their_entry.top)
        for (token, _, p), (_, _, q) in zip(our_entry.top, their_entry.top, strict=True):
            assert abs(p - q) < NEAR_TIE
            listed = {other_token: value for other_token, _, value in their_entry.top}
            assert abs(listed.get(token, their_entry.top[-1][2]) - p) < NEAR_TIE


def assert_alike(
    path: str,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    sampler: Sampler | None = None,
    matcher: Callable[[], Guide] | None = None,
    near: float = NEAR_TIE,
) -> None:
    """Assert that two answers are equal, or both the target's and diverge within rounding.

    sampler: has the request's settings and seed; None: greedy. matcher: creates that of its grammar.
    """
    if ours == theirs:
        return
    sampler = sampler or Sampler(Settings(temperature=0.0))
    for answer in (ours, theirs):
        grammar = matcher() if matcher else None
        strange = first_strange(path, prompt, answer, sampler, grammar, near)
        assert strange is None, f"token {strange} of {answer} is not the target's; {ours}; {theirs}"
