"""The two verification rules, without any model: rows are tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localspec.engine.speculation.verification as speculate
from localspec.engine.llama import Logits
from localspec.engine.sampling.distribution import Distribution, Truncation, uniform_at
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.engine.speculation.verification import (
    Verifier,
    uses_rejection,
    verify_match,
    verify_rejection,
)
from localspec.protocol.frames import SpeculationSettings
from tests.support.statistics import chi_square_z

N = 5
DEPTH = 2
DRAWS = 25_000  # more than twice as many as show a rule to be wrong
SHOWING = 10_000
OFF = Settings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
_rng = np.random.default_rng(0)
# What follows each token, in the target's and in the draft's opinion; they differ a good deal.
TARGET: Logits = _rng.normal(0, 1.5, (N, N)).astype(np.float32)
DRAFT: Logits = (TARGET + _rng.normal(0, 1.5, (N, N))).astype(np.float32)

drafts = st.lists(st.integers(0, N - 1), max_size=6)


def after(text: Sequence[int]) -> Logits:
    row: Logits = TARGET[text[-1]]
    return row


def greedy(first: int, count: int) -> list[int]:
    text = [first]
    for _ in range(count):
        text.append(int(after(text).argmax()))
    return text[1:]


@given(drafts)
def test_greedy_keeps_the_drafts_that_are_the_argmax_and_corrects_the_next(
    drafted: list[int],
) -> None:
    sampler = Sampler(replace(OFF, temperature=0.0))
    kept = verify_match(lambda i, k: after([0, *drafted[:i]]), drafted, sampler, 0)
    truth = greedy(0, len(drafted) + 1)
    right = next((i for i, d in enumerate(drafted) if d != truth[i]), len(drafted))
    assert kept == truth[: right + 1]


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40, unique=True),
    st.floats(0.1, 5.0),
    st.floats(0.0, 1.0),
    st.integers(0, 100),
)
def test_of_one_candidate_there_is_nothing_to_draw(
    logits: list[float], temperature: float, share: float, place: int
) -> None:
    """So it is verified as greedy decoding is, without a look at the rest of its row."""
    one = replace(OFF, temperature=temperature, top_k=1, top_p=share, min_p=share)
    sampler, row = Sampler(one), np.array(logits, np.float32)
    assert sampler.sample(row, place) == int(row.argmax())
    assert Truncation(one).distribution(row).ids.tolist() == [int(row.argmax())]
    assert Verifier(sampler, None, False).needs_no_logits(scored=False)
    assert not uses_rejection(
        SpeculationSettings(), sampler, None, can_draw_drafts=True, scored=False
    )


@given(drafts, st.integers(0, 100))
def test_match_gives_the_tokens_of_plain_decoding_with_the_same_seed(
    drafted: list[int], seed: int
) -> None:
    settings = replace(OFF, seed=seed)
    speculative, plain = Sampler(settings), Sampler(settings)
    kept = verify_match(lambda i, k: after([0, *drafted[:i]]), drafted, speculative, 5)
    text = [0]
    for place in range(5, 5 + len(kept)):
        text.append(plain.sample(after(text), place))
    assert kept == text[1:]


@given(drafts, st.integers(0, 100))
def test_each_row_is_asked_with_the_tokens_kept_before_it(drafted: list[int], seed: int) -> None:
    """Penalties and grammars need them."""
    for rule in ("match", "rejection"):
        seen: list[tuple[int, list[int]]] = []

        def rows(i: int, kept: Sequence[int], seen: list[tuple[int, list[int]]] = seen) -> Logits:
            seen.append((i, list(kept)))
            return after([0, *drafted[:i]])

        sampler = Sampler(replace(OFF, seed=seed))
        if rule == "match":
            kept = verify_match(rows, drafted, sampler, 0)
        else:
            probs = [Distribution(np.arange(N), np.full(N, 1 / N)) for _ in drafted]
            kept = verify_rejection(rows, drafted, probs, sampler, 0)
        assert seen == [(i, kept[:i]) for i in range(len(kept))]
        assert kept[:-1] == drafted[: len(kept) - 1]
        assert 1 <= len(kept) <= len(drafted) + 1


def test_a_draft_that_agrees_with_the_target_is_always_accepted() -> None:
    sampler = Sampler(replace(OFF, seed=1))
    for place in range(300):
        text, probs = [0], []
        for _ in range(3):
            probs.append(sampler.distribution(after(text)))
            text.append(probs[-1].pick(sampler.uniform()))
        kept = verify_rejection(
            lambda i, k, t=text: after(t[: i + 1]),  # type: ignore[misc]
            text[1:],
            probs,
            sampler,
            place,
        )
        assert kept[:3] == text[1:]
        assert len(kept) == 4


def test_a_draft_the_target_cannot_say_is_never_accepted() -> None:
    row = np.array([0.0, -np.inf, 1.0], dtype=np.float32)
    sampler = Sampler(replace(OFF, seed=1))
    certain = Distribution(np.array([1]), np.ones(1))
    for place in range(300):
        assert verify_rejection(lambda i, k: row, [1], [certain], sampler, place)[0] in (0, 2)


def mixed(settings: Settings, row: Logits) -> dict[int, float]:
    """The probabilities of all places together: at some XTC passes over the likeliest, at others not."""
    found = dict.fromkeys(range(N), 0.0)
    for share, without in (
        (settings.xtc_probability, True),
        (1 - settings.xtc_probability, False),
    ):
        drawn = Truncation(settings).distribution(row, without_top=without)
        for token in range(N):
            found[token] += share * drawn.probability_of(token)
    return found


def excess(settings: Settings, count: int, sampler: Sampler | None = None) -> float:
    """How far a text of `count` tokens, drafted and verified, is from the target's own transitions.

    Standard deviations of chi-square: what follows each token is a sample of its own.
    """
    sampler = sampler or Sampler(settings)
    opinions: dict[tuple[int, bool], Distribution] = {}

    def opinion(token: int, place: int) -> Distribution:
        asked = sampler.settings
        without = asked.excludes and uniform_at(sampler.seed, place) <= asked.xtc_probability
        if (token, without) not in opinions:
            opinions[token, without] = sampler.distribution(DRAFT[token], place)
        return opinions[token, without]

    text = [0]
    while len(text) < count:
        drafted: list[int] = []
        probs: list[Distribution] = []
        for place in range(len(text) - 1, len(text) - 1 + DEPTH):
            probs.append(opinion(drafted[-1] if drafted else text[-1], place))
            drafted.append(probs[-1].pick(sampler.uniform()))
        read = [text[-1], *drafted]
        text += verify_rejection(
            lambda i, k, r=read: TARGET[r[i]],  # type: ignore[misc]
            drafted,
            probs,
            sampler,
            len(text) - 1,
        )
    wanted = [mixed(settings, TARGET[t]) for t in range(N)]
    followers: list[list[int]] = [[] for _ in range(N)]
    for token, after_it in pairwise(text):
        followers[token].append(after_it)
    samples = [(drawn, wanted[first]) for first, drawn in enumerate(followers) if len(drawn) > 100]
    assert len(samples) >= 3
    return chi_square_z(*samples)


@pytest.mark.parametrize(
    "settings",
    [
        replace(OFF, seed=11),
        # Draft and target are truncated to different candidates.
        replace(OFF, temperature=0.7, top_k=4, seed=12),
        replace(OFF, xtc_probability=0.4, xtc_threshold=0.15, seed=13),
        replace(OFF, top_n_sigma=1.0, dynatemp_range=0.6, dynatemp_exponent=0.7, seed=14),
    ],
)
def test_rejection_sampling_draws_from_the_targets_distribution(settings: Settings) -> None:
    assert excess(settings, DRAWS) < 4.5


@pytest.mark.parametrize("mistake", ["no residual", "draft believed more", "XTC left out"])
def test_the_test_of_the_distribution_finds_a_wrong_rule(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same statistic on rules that are nearly right."""
    settings = replace(OFF, seed=11)
    sampler = Sampler(settings)
    if mistake == "XTC left out":
        settings = replace(settings, xtc_probability=0.4, xtc_threshold=0.15)
    elif mistake == "no residual":  # after a rejection, drawn from the target's whole distribution
        monkeypatch.setattr(speculate, "residual", lambda target, draft: target)
    else:  # accepted with min(1, 1.3 p/q), and everything else as it should be
        of = Distribution.probability_of
        opinions = [sampler.distribution(DRAFT[t]).probs for t in range(N)]

        def less(self: Distribution, token: int) -> float:
            is_draft = any(np.array_equal(self.probs, probs) for probs in opinions)
            return of(self, token) / (1.3 if is_draft else 1.0)

        monkeypatch.setattr(Distribution, "probability_of", less)
    assert excess(settings, SHOWING, sampler) > 8
