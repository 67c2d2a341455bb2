"""The core of speculative decoding: which of the drafted tokens the target keeps.

A round has drafted K tokens d_1…d_K and the target has read them in one pass, so there are K+1 rows
of logits: row i is the target's opinion on what follows the first i of them. Both rules return the
tokens to keep: the accepted drafts, then exactly one token of the target's own (a correction, or the
bonus token after the last draft).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localspec.engine.sampling.sampler import Distribution, Logits, Sampler, residual

# Row i, adjusted for the tokens kept so far in this round (penalties, grammar).
Rows = Callable[[int, list[int]], Logits]


def verify_match(rows: Rows, drafted: Sequence[int], sampler: Sampler, place: int) -> list[int]:
    """Keep drafts while they equal what the target samples: the tokens of plain decoding with the
    same seed, whatever was drafted. Greedy decoding is the case of temperature 0.

    place: how many tokens of the answer come before this round's.
    """
    kept: list[int] = []
    for i in range(len(drafted) + 1):
        token = sampler.sample(rows(i, kept), place + i)
        kept.append(token)
        if i == len(drafted) or token != drafted[i]:
            break
    return kept


def verify_chosen(choice: Callable[[int], int], drafted: Sequence[int]) -> list[int]:
    """`verify_match` for greedy decoding where row i's token was chosen on the device already."""
    kept: list[int] = []
    for i in range(len(drafted) + 1):
        kept.append(choice(i))
        if i == len(drafted) or kept[-1] != drafted[i]:
            break
    return kept


def verify_rejection(
    rows: Rows,
    drafted: Sequence[int],
    draft_probs: Sequence[Distribution],
    sampler: Sampler,
    place: int,
) -> list[int]:
    """Keep draft x with probability min(1, p(x)/q(x)), else draw from norm(max(0, p - q)): the
    target's distribution exactly, with more drafts kept (Leviathan et al. 2022, algorithm 1).

    draft_probs: for each draft the distribution q it was drawn from. place: as in `verify_match`.
    """
    kept: list[int] = []
    for i, token in enumerate(drafted):
        target = sampler.distribution(rows(i, kept))
        draft = draft_probs[i]
        if sampler.uniform() * draft.of(token) < target.of(token):
            kept.append(token)
            continue
        kept.append(residual(target, draft).pick(sampler.uniform()))
        return kept
    kept.append(sampler.sample(rows(len(drafted), kept), place + len(drafted)))
    return kept
