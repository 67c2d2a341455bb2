"""The two verification rules are tested without a model, on rows from tables."""

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
    residual,
    uses_rejection,
    verify_block,
    verify_match,
)
from localspec.protocol.frames import SpeculationSettings
from tests.support.statistics import chi_square_z

N = 5
DEPTH = 3
DRAWS = 25_000  # more than twice as many as reveal a wrong rule
CONTROL_DRAWS = 25_000
OFF = Settings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
_rng = np.random.default_rng(0)
# Logits after each token by the target and by the draft, which differ considerably.
TARGET: Logits = _rng.normal(0, 1.5, (N, N)).astype(np.float32)
DRAFT: Logits = (TARGET + _rng.normal(0, 1.5, (N, N))).astype(np.float32)

drafts = st.lists(st.integers(0, N - 1), max_size=6)


def get_target_row(text: Sequence[int]) -> Logits:
    row: Logits = TARGET[text[-1]]
    return row


def decode_greedily(first_token: int, count: int) -> list[int]:
    text = [first_token]
    for _ in range(count):
        text.append(int(get_target_row(text).argmax()))
    return text[1:]


@given(drafts)
def test_greedy_keeps_the_drafts_that_are_the_argmax_and_corrects_the_next(
    drafted: list[int],
) -> None:
    sampler = Sampler(replace(OFF, temperature=0.0))
    accepted = verify_match(lambda i, k: get_target_row([0, *drafted[:i]]), drafted, sampler, 0)
    truth = decode_greedily(0, len(drafted) + 1)
    right = next((i for i, d in enumerate(drafted) if d != truth[i]), len(drafted))
    assert accepted == truth[: right + 1]


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40, unique=True),
    st.floats(0.1, 5.0),
    st.floats(0.0, 1.0),
    st.integers(0, 100),
)
def test_single_candidate_is_not_drawn(
    logits: list[float], temperature: float, share: float, place: int
) -> None:
    """It is verified like greedy decoding, without the rest of its row."""
    single = replace(OFF, temperature=temperature, top_k=1, top_p=share, min_p=share)
    sampler, row = Sampler(single), np.array(logits, np.float32)
    assert sampler.sample(row, place) == int(row.argmax())
    assert Truncation(single).distribution(row).ids.tolist() == [int(row.argmax())]
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
    accepted = verify_match(lambda i, k: get_target_row([0, *drafted[:i]]), drafted, speculative, 5)
    text = [0]
    for place in range(5, 5 + len(accepted)):
        text.append(plain.sample(get_target_row(text), place))
    assert accepted == text[1:]


@given(drafts, st.integers(0, 100))
def test_each_row_is_computed_with_the_tokens_accepted_before_it(
    drafted: list[int], seed: int
) -> None:
    """Penalties and grammars need these tokens."""
    for rule in ("match", "rejection"):
        calls: list[tuple[int, list[int]]] = []

        def rows(
            i: int, accepted: Sequence[int], calls: list[tuple[int, list[int]]] = calls
        ) -> Logits:
            calls.append((i, list(accepted)))
            return get_target_row([0, *drafted[:i]])

        sampler = Sampler(replace(OFF, seed=seed))
        if rule == "match":
            accepted = verify_match(rows, drafted, sampler, 0)
        else:
            probs = [Distribution(np.arange(N), np.full(N, 1 / N)) for _ in drafted]
            accepted = verify_block(rows, drafted, probs, sampler, 0)
        # The joint test looks at drafts behind the last that it keeps.
        assert calls == [(i, drafted[:i]) for i in range(len(calls))]
        assert len(calls) == len(accepted) or (rule == "rejection" and len(calls) > len(accepted))
        assert accepted[:-1] == drafted[: len(accepted) - 1]
        assert 1 <= len(accepted) <= len(drafted) + 1


def count_kept_one_by_one(
    targets: Sequence[Distribution], drafts: Sequence[Distribution], drafted: Sequence[int]
) -> float:
    """Return the mean number of these drafts that the rule of Leviathan et al. 2022 keeps."""
    mean, chance = 0.0, 1.0
    for target, draft, token in zip(targets, drafts, drafted, strict=True):
        chance *= min(1.0, target.probability_of(token) / draft.probability_of(token))
        mean += chance
    return mean


def test_more_drafts_are_kept_than_one_by_one() -> None:
    sampler = Sampler(replace(OFF, seed=3))
    kept = one_by_one = 0.0
    for place in range(4000):
        text, drafts = [place % N], []
        for _ in range(6):
            drafts.append(sampler.distribution(DRAFT[text[-1]]))
            text.append(drafts[-1].pick(sampler.uniform()))
        targets = [sampler.distribution(TARGET[token]) for token in text[:-1]]
        one_by_one += count_kept_one_by_one(targets, drafts, text[1:])
        tokens = verify_block(
            lambda i, k, t=text: TARGET[t[i]],  # type: ignore[misc]
            text[1:],
            drafts,
            sampler,
            place,
        )
        kept += len(tokens) - 1
    assert kept > 1.03 * one_by_one


def test_a_draft_that_agrees_with_the_target_is_always_accepted() -> None:
    sampler = Sampler(replace(OFF, seed=1))
    for place in range(300):
        text, probs = [0], []
        for _ in range(3):
            probs.append(sampler.distribution(get_target_row(text)))
            text.append(probs[-1].pick(sampler.uniform()))
        accepted = verify_block(
            lambda i, k, t=text: get_target_row(t[: i + 1]),  # type: ignore[misc]
            text[1:],
            probs,
            sampler,
            place,
        )
        assert accepted[:3] == text[1:]
        assert len(accepted) == 4


def test_draft_with_zero_target_probability_is_never_accepted() -> None:
    row = np.array([0.0, -np.inf, 1.0], dtype=np.float32)
    sampler = Sampler(replace(OFF, seed=1))
    certain = Distribution(np.array([1]), np.ones(1))
    for place in range(300):
        assert verify_block(lambda i, k: row, [1], [certain], sampler, place)[0] in (0, 2)


def mix_distributions(settings: Settings, row: Logits) -> dict[int, float]:
    """Return the average distribution over positions with and without the exclusion by XTC."""
    totals = dict.fromkeys(range(N), 0.0)
    for share, without in (
        (settings.xtc_probability, True),
        (1 - settings.xtc_probability, False),
    ):
        distribution = Truncation(settings).distribution(row, without_top=without)
        for token in range(N):
            totals[token] += share * distribution.probability_of(token)
    return totals


def measure_excess(
    settings: Settings, count: int, sampler: Sampler | None = None, *, copies: bool = False
) -> float:
    """Return how far a drafted and verified text is from the target's own transitions.

    The result is in standard deviations of chi-square; the tokens after each token are one sample.
    copies: in turns with drawn drafts, propose what followed the last token before, as n-grams do.
    """
    sampler = sampler or Sampler(settings)
    draft_distributions: dict[tuple[int, bool], Distribution] = {}

    def get_draft_distribution(token: int, place: int) -> Distribution:
        options = sampler.settings
        without = options.excludes and uniform_at(sampler.seed, place) <= options.xtc_probability
        if (token, without) not in draft_distributions:
            draft_distributions[token, without] = sampler.distribution(DRAFT[token], place)
        return draft_distributions[token, without]

    text = [0]
    while len(text) < count:
        drafted: list[int] = []
        probs: list[Distribution] = []
        if copies and len(text) % 2 and text[-1] in text[:-1]:
            end = len(text) - text[-2::-1].index(text[-1]) - 1
            drafted = text[end : end + DEPTH]
            context = [text[-1], *drafted]
            text += verify_match(
                lambda i, k, r=context: TARGET[r[i]],  # type: ignore[misc]
                drafted,
                sampler,
                len(text) - 1,
            )
            continue
        for place in range(len(text) - 1, len(text) - 1 + DEPTH):
            probs.append(get_draft_distribution(drafted[-1] if drafted else text[-1], place))
            drafted.append(probs[-1].pick(sampler.uniform()))
        context = [text[-1], *drafted]
        text += verify_block(
            lambda i, k, r=context: TARGET[r[i]],  # type: ignore[misc]
            drafted,
            probs,
            sampler,
            len(text) - 1,
        )
    expected = [mix_distributions(settings, TARGET[t]) for t in range(N)]
    followers: list[list[int]] = [[] for _ in range(N)]
    for token, follower in pairwise(text):
        followers[token].append(follower)
    samples = [
        (drawn, expected[previous]) for previous, drawn in enumerate(followers) if len(drawn) > 100
    ]
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
    assert measure_excess(settings, DRAWS) < 4.5


def test_copied_and_drawn_drafts_in_turns_keep_the_targets_distribution() -> None:
    assert measure_excess(replace(OFF, seed=15), DRAWS, copies=True) < 4.5


@pytest.mark.parametrize(
    "mistake", ["no residual", "each draft by itself", "draft believed more", "XTC left out"]
)
def test_distribution_test_finds_a_wrong_rule(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control applies the same statistic to rules that are nearly right."""
    settings = replace(OFF, seed=11)
    sampler = Sampler(settings)
    if mistake == "XTC left out":
        settings = replace(settings, xtc_probability=0.4, xtc_threshold=0.15)
    elif mistake == "no residual":  # after a rejection, draw from the target's whole distribution
        monkeypatch.setattr(
            speculate, "residual", lambda p, q, weight: (p, residual(p, q, weight)[1])
        )
    elif mistake == "each draft by itself":  # what the drafts before it left over is ignored
        monkeypatch.setattr(speculate, "residual", lambda p, q, weight: residual(p, q, 1.0))
    else:  # accept with probability min(1, 1.3 p/q), everything else being right
        original = Distribution.probability_of
        draft_probs = [sampler.distribution(DRAFT[t]).probs for t in range(N)]

        def biased_probability(self: Distribution, token: int) -> float:
            is_draft = any(np.array_equal(self.probs, probs) for probs in draft_probs)
            return original(self, token) / (1.3 if is_draft else 1.0)

        monkeypatch.setattr(Distribution, "probability_of", biased_probability)
    assert measure_excess(settings, CONTROL_DRAWS, sampler) > 8
