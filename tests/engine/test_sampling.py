"""Every sampling parameter agrees with a plain reimplementation of llama.cpp's documentation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localspec.engine.llama import Logits
from localspec.engine.sampling.distribution import Distribution
from localspec.engine.sampling.sampler import Sampler, logprob
from localspec.engine.sampling.settings import Settings, model_defaults, resolve_settings
from localspec.engine.speculation.verification import residual
from localspec.protocol import requests as limits
from localspec.protocol.frames import Sampling
from tests.support.rescoring import near_draw
from tests.support.statistics import chi_square_z

# Every parameter is off, so that only what a test switches on has an effect.
OFF = Settings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def piece(token: int) -> bytes:
    return b"\n" if token == 0 else f" {token}".encode()


def make_row(values: Sequence[float]) -> Logits:
    return np.array(values, dtype=np.float32)


# Steps of 1/4, so that ties happen; sometimes a token is impossible.
logits = st.lists(
    st.one_of(st.integers(-40, 40).map(lambda n: n / 4), st.just(-math.inf)),
    min_size=1,
    max_size=24,
).filter(lambda values: max(values) > -math.inf)
truncations = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 1.5, 10.0]),
        "top_k": st.integers(0, 30),
        "top_p": st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4, 1.0]),
        "typical_p": st.sampled_from([0.2, 0.7, 0.95, 1.0]),
    }
)


def softmax(values: Sequence[float]) -> list[float]:
    highest = max(values)
    weights = [math.exp(value - highest) for value in values]
    total = sum(weights)
    return [weight / total for weight in weights]


def take_head(probs: Sequence[float], order: Sequence[int], enough: float) -> list[int]:
    """Return the first of `order` whose probabilities reach `enough`, including the last one."""
    total, taken = 0.0, []
    for at in order:
        taken.append(at)
        total += probs[at]
        assume(abs(total - enough) > 1e-6)  # on the edge, rounding decides
        if total >= enough:
            break
    return taken


def reference(values: Sequence[float], settings: Settings) -> list[tuple[float, float]]:
    """Return (logit, probability) of each token that may be drawn, most probable first."""
    candidates = sorted((value for value in values if value > -math.inf), reverse=True)
    if settings.top_k > 0:
        candidates = candidates[: settings.top_k]
    if settings.typical_p < 1:
        probs = softmax(candidates)
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        surprise = [abs(-math.log(p) - entropy) if p > 0 else math.inf for p in probs]
        gaps = sorted(surprise)
        assume(all(b - a > 1e-6 or b == a for a, b in pairwise(gaps)))
        order = sorted(range(len(candidates)), key=lambda at: surprise[at])
        candidates = [candidates[at] for at in sorted(take_head(probs, order, settings.typical_p))]
    if settings.top_p < 1:
        candidates = candidates[
            : len(take_head(softmax(candidates), range(len(candidates)), settings.top_p))
        ]
    if settings.min_p > 0:
        edge = candidates[0] + math.log(settings.min_p)
        assume(all(abs(value - edge) > 1e-6 or value == candidates[0] for value in candidates))
        candidates = [value for value in candidates if value >= edge or value == candidates[0]]
    tempered = softmax([value / settings.temperature for value in candidates])
    return list(zip(candidates, tempered, strict=True))


def chances(distribution: Distribution) -> dict[int, float]:
    return dict(zip(distribution.ids.tolist(), distribution.probs.tolist(), strict=True))


def list_drawn(row: Logits, distribution: Distribution) -> list[tuple[float, float]]:
    """Return (logit, probability) like `reference`, since it does not matter which equal token remains."""
    pairs = zip(distribution.ids, distribution.probs, strict=True)
    pairs_drawn = [(float(row[token]), float(p)) for token, p in pairs if p > 0]
    return sorted(pairs_drawn, reverse=True)


def assert_same(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    """Assert equality up to rounding, ignoring tokens less probable than 1e-9."""
    ours = [pair for pair in ours if pair[1] > 1e-9]
    theirs = [pair for pair in theirs if pair[1] > 1e-9]
    assert [value for value, _ in ours] == [value for value, _ in theirs]
    assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], rel=1e-4, abs=1e-7)


@given(logits, truncations)
def test_truncations_agree_with_the_reference(
    values: list[float], chosen: Mapping[str, Any]
) -> None:
    settings = replace(OFF, **chosen)
    row = make_row(values)
    distribution = Sampler(settings).distribution(row)
    assert_same(list_drawn(row, distribution), reference(values, settings))
    assert float(distribution.probs.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "chosen",
    [
        {"top_k": 40},
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
        {"top_p": 0.5, "min_p": 0.02},
        {},
    ],
)
def test_a_vocabulary_of_150_000_is_truncated_like_a_small_one(chosen: dict[str, Any]) -> None:
    settings = replace(OFF, **chosen)
    row = np.random.default_rng(5).normal(0, 3, 150_000).astype(np.float32)
    values = np.sort(row.astype(np.float64))[::-1]
    candidates = values[: settings.top_k] if settings.top_k else values
    probs = np.exp(candidates - candidates[0]) / np.exp(candidates - candidates[0]).sum()
    if settings.top_p < 1:
        candidates = candidates[: int((np.cumsum(probs) < settings.top_p).sum()) + 1]
    if settings.min_p > 0:
        candidates = candidates[candidates >= candidates[0] + math.log(settings.min_p)]
    weights = np.exp((candidates - candidates[0]) / settings.temperature)
    expected = weights / weights.sum()
    sampler = Sampler(settings)
    for _ in range(3):  # the search for the top remembers its threshold
        distribution = sampler.distribution(row)
        # In sums of 150 000 float32 numbers, rounding decides about the last few tokens.
        assert len(distribution.ids) == pytest.approx(len(candidates), rel=1e-3)
        ours = np.sort(distribution.probs)[::-1]
        count = min(len(ours), len(expected))
        np.testing.assert_allclose(ours[:count], expected[:count], rtol=1e-3)
        assert row[distribution.ids].max() == candidates[0]
        assert row[distribution.ids].min() == pytest.approx(candidates[-1], abs=1e-2)


def test_top_k_finds_the_top_after_rows_of_another_spread() -> None:
    sampler = Sampler(replace(OFF, top_k=10))
    rng = np.random.default_rng(0)
    for spread in (0.001, 100.0, 1e-6, 5.0, 1000.0, 0.0):
        row = (rng.normal(0, 1, 1000) * spread).astype(np.float32)
        row[rng.random(1000) < 0.5] = -np.inf
        # A token 30 nats below the top has no chance, and may be missing.
        drawn_logits = [value for value, _ in list_drawn(row, sampler.distribution(row))]
        top = sorted((float(v) for v in row), reverse=True)[:10]
        near = [value for value in top if value >= top[0] - 30]
        assert drawn_logits[: len(near)] == near
        assert drawn_logits == top[: len(drawn_logits)]


def test_top_k_with_fewer_possible_tokens_than_k_keeps_those() -> None:
    row = np.full(1000, -np.inf, dtype=np.float32)
    row[[3, 700]] = 1.0
    distribution = Sampler(replace(OFF, top_k=40)).distribution(row)
    assert sorted(distribution.ids.tolist()) == [3, 700]
    assert distribution.probs.tolist() == [0.5, 0.5]


@given(logits, truncations)
def test_greedy_is_the_highest_logit_with_any_other_settings(
    values: list[float], chosen: Mapping[str, Any]
) -> None:
    sampler = Sampler(replace(OFF, **{**chosen, "temperature": 0.0}))
    row = make_row(values)
    assert float(row[sampler.sample(row, 0)]) == max(values)
    assert sampler.distribution(row).probs.tolist() == [1.0]


@pytest.mark.parametrize("chosen", [{}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 1e-9}])
@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-60, 5e-324])
def test_a_temperature_near_zero_is_greedy(chosen: dict[str, Any], temperature: float) -> None:
    sampler, row = Sampler(replace(OFF, **chosen, temperature=temperature)), make_row([1, 3, 2, -5])
    assert sampler.distribution(row).probability_of(1) == 1.0
    assert sampler.sample(row, 0) == 1


@given(logits)
def test_impossible_tokens_are_never_drawn(values: list[float]) -> None:
    row = make_row(values)
    for chosen in ({}, {"top_k": 5}, {"top_p": 0.999999}, {"typical_p": 0.999}):
        sampler = Sampler(replace(OFF, seed=3, **chosen))
        distribution = sampler.distribution(row)
        for uniform in (0.0, 0.5, 1 - 2**-53):
            assert row[distribution.pick(uniform)] > -np.inf
        for place in range(3):
            assert row[sampler.sample(row, place)] > -np.inf


histories = st.lists(st.integers(0, 7), max_size=20)


@given(
    st.lists(st.integers(-8, 8), min_size=8, max_size=8),
    histories,
    st.integers(-1, 12),
    st.sampled_from([1.0, 1.5, 0.5]),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from([0.0, 0.25, -2.0]),
)
def test_penalties_are_those_of_llama_cpp(
    values: list[int],
    history: list[int],
    last_n: int,
    repeat: float,
    frequency: float,
    presence: float,
) -> None:
    options: dict[str, Any] = {"repeat_penalty": repeat, "frequency_penalty": frequency}
    options |= {"presence_penalty": presence, "repeat_last_n": last_n}
    adjusted = Sampler(replace(OFF, **options)).adjusted(make_row(values), history)
    span = history if last_n < 0 else history[max(len(history) - last_n, 0) :]
    for token, value in enumerate(values):
        expected = float(value)
        if token in span:
            expected = expected * repeat if expected <= 0 else expected / repeat
            expected -= span.count(token) * frequency + presence
        assert float(adjusted[token]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_dry_stays_finite_arithmetic_for_the_largest_settings_allowed() -> None:
    settings = replace(OFF, dry_multiplier=100.0, dry_base=100.0, dry_sequence_breakers=())
    row = Sampler(settings).adjusted(make_row([0.0, 0.0, 0.0]), [1] * 200)
    assert -np.inf < row[1] <= -1e6
    assert row[0] == row[2] == 0.0
    assert Sampler(settings).sample(row, 0) in (0, 2)


@given(st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.5, 2.0, 100.0])))
def test_a_bias_is_added_to_its_token_only(bias: dict[int, float]) -> None:
    row = make_row([1.0] * 8)
    adjusted = Sampler(replace(OFF, logit_bias=bias)).adjusted(row, [])
    assert adjusted.tolist() == [1.0 + bias.get(token, 0.0) for token in range(8)]
    assert row.tolist() == [1.0] * 8


@given(st.lists(st.booleans(), min_size=8, max_size=8).filter(any))
def test_a_mask_leaves_only_what_it_allows(allowed: list[bool]) -> None:
    sampler = Sampler(replace(OFF, logit_bias={0: 100.0}))
    row = sampler.adjusted(make_row([0.0] * 8), [], np.array(allowed))
    assert [value > -np.inf for value in row] == allowed


def test_where_nothing_applies_the_row_is_not_copied() -> None:
    row = make_row([1.0, 2.0])
    assert Sampler(OFF).adjusted(row, [1]) is row


LARGE = 2**63 - 1


@pytest.mark.parametrize("chosen", [{}, {"top_k": 5, "temperature": 0.7}, {"top_p": 0.8}])
@pytest.mark.parametrize("seed", [0, 7, -1, LARGE])
def test_draws_with_a_seed_follow_the_distribution_over_places(
    chosen: dict[str, Any], seed: int
) -> None:
    row = np.random.default_rng(3).normal(0, 1, 40).astype(np.float32)
    sampler = Sampler(replace(OFF, seed=seed, **chosen))
    probabilities = chances(sampler.distribution(row))
    draws = [sampler.sample(row, place) for place in range(4000)]
    assert chi_square_z((draws, probabilities)) < 4.5
    pairs = {(a, b): p * q for a, p in probabilities.items() for b, q in probabilities.items()}
    assert chi_square_z((pairwise(draws), pairs)) < 4.5


def test_draws_at_one_place_follow_the_distribution_over_seeds() -> None:
    row = np.random.default_rng(4).normal(0, 2, 40).astype(np.float32)
    probabilities = chances(Sampler(OFF).distribution(row))
    for place in (0, 1, 1000):
        draws = [Sampler(replace(OFF, seed=seed)).sample(row, place) for seed in range(4000)]
        assert chi_square_z((draws, probabilities)) < 4.5


def test_draws_from_another_distribution_are_detected() -> None:
    """The control of the two tests above."""
    row = np.random.default_rng(3).normal(0, 1, 40).astype(np.float32)
    sampler = Sampler(replace(OFF, seed=7))
    warmer = Sampler(replace(OFF, temperature=1.2)).distribution(row)
    draws = [sampler.sample(row, place) for place in range(4000)]
    assert chi_square_z((draws, chances(warmer))) > 8


# Rounding may reverse typical_p's order by distance from the entropy.
without_typical = truncations.map(lambda chosen: {**chosen, "typical_p": 1.0})
numbers = st.integers(0, 2**32)


@given(logits, without_typical, st.integers(0, LARGE), st.integers(0, 10**6), numbers)
def test_rounding_changes_only_draws_near_an_edge(
    values: list[float], chosen: Mapping[str, Any], seed: int, place: int, rounding: int
) -> None:
    """This holds whatever changes places in the sorted row, and wherever a cut falls."""
    sampler = Sampler(replace(OFF, **chosen, seed=seed))
    row = make_row(values)
    noise = np.random.default_rng(rounding).uniform(-1e-4, 1e-4, len(row)).astype(np.float32)
    assert near_draw(sampler, row, place, sampler.sample(row + noise, place), 3e-4)


@pytest.mark.parametrize("chosen", [{"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.05}])
def test_candidates_that_rounding_swaps_change_no_draw(chosen: dict[str, Any]) -> None:
    """A walk along the sorted candidates would swap them in one draw in twenty."""
    sampler = Sampler(replace(OFF, seed=5, **chosen))
    row = np.random.default_rng(6).normal(0, 1, 300).astype(np.float32)
    order = np.argsort(-row)
    higher, lower = order[0:10:2], order[1:10:2]
    row[lower] = row[higher] - np.float32(1e-6)
    swapped = row.copy()
    swapped[higher], swapped[lower] = row[lower], row[higher]
    draws = [(sampler.sample(row, at), sampler.sample(swapped, at)) for at in range(1000)]
    assert len({first for first, _ in draws}) > 10
    assert all(first == second for first, second in draws)


def sample_limits(limit: Any) -> st.SearchStrategy[Any]:
    """Sample the limits of a number, the numbers next to them, and some between."""
    kind = msgspec.inspect.type_info(limit)
    assert isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType)
    low, high = kind.ge, kind.le
    assert low is not None
    assert high is not None
    ends: list[float]
    if isinstance(kind, msgspec.inspect.IntType):
        ends = [low, low + 1, 1, 2, 64, high - 1, high]
    else:
        ends = [low, math.nextafter(low, high), math.nextafter(high, low), high]
        ends += [at for at in (5e-324, 1e-45, 1e-38, 1e-7, 0.5, 1 - 1e-7, 1.0) if low < at < high]
    return st.sampled_from(ends)


NOT_EXTREME = ("dynatemp", "xtc", "min_keep", "top_n", "dry_sequence", "seed")
EXTREMES = st.fixed_dictionaries(
    {
        **{
            parameter.name: sample_limits(parameter.kind)
            for parameter in limits.sampling_parameters()
            if not parameter.name.startswith(NOT_EXTREME)
        },
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logit_bias": st.dictionaries(st.integers(0, 7), sample_limits(limits.Bias)),
    }
)
any_logits = st.lists(
    st.one_of(
        st.sampled_from([-math.inf, -3e38, -1e30, -1e4, -1e-45, 0.0, 1e-45, 50.0, 1e4, 3e38]),
        st.floats(-30, 30),
    ),
    min_size=8,
    max_size=8,
).filter(lambda values: max(values) > -math.inf)


@settings(max_examples=150)
@given(
    any_logits,
    EXTREMES,
    st.lists(st.integers(0, 7), max_size=60),
    st.none() | st.lists(st.booleans(), min_size=8, max_size=8).filter(any),
)
def test_any_legal_settings_leave_a_distribution(
    values: list[float],
    options: dict[str, Any],
    history: list[int],
    allowed: list[bool] | None,
) -> None:
    """Probabilities are finite and sum to one over possible tokens, without a warning."""
    sampler = Sampler(resolve_settings(Sampling(**options), {}))
    mask = None if allowed is None else np.array(allowed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = sampler.adjusted(make_row(values), history * 5, mask)
        assert np.isfinite(row.max())
        assert not np.isnan(row).any()
        for _ in range(2):  # the search for the top remembers its threshold
            distribution = sampler.distribution(row)
            assert len(distribution.ids) > 0
            assert np.isfinite(distribution.probs).all()
            assert float(distribution.probs.sum()) == pytest.approx(1.0)
            token = sampler.sample(row, 3)
            assert row[token] > -np.inf
            assert mask is None or mask[token]
            assert distribution.pick(sampler.uniform()) in distribution.ids
        draft = Sampler(resolve_settings(Sampling(**options), {})).distribution(make_row([0.0] * 8))
        rest, _ = residual(distribution, draft, 1.0)
        assert float(rest.probs.sum()) == pytest.approx(1.0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.floats(0, 1))
def test_pick_is_the_place_in_the_cumulative_probabilities(
    weights: list[int], uniform: float
) -> None:
    assume(uniform < 1)
    probs = np.array(weights) / sum(weights)
    token = Distribution(np.arange(len(weights)) + 10, probs).pick(uniform)
    assert probs[token - 10] > 0
    below = sum(weights[: token - 10]) / sum(weights)
    assert below <= uniform + 1e-9
    assert uniform <= below + probs[token - 10] + 1e-9


@given(
    st.lists(st.integers(0, 6), min_size=6, max_size=6).filter(any),
    st.lists(st.integers(0, 6), min_size=6, max_size=6).filter(any),
    st.permutations(range(6)),
    st.permutations(range(6)),
    st.floats(0, 1),
)
def test_residual_is_the_excess_of_the_target(
    p: list[int], q: list[int], target_order: list[int], draft_order: list[int], weight: float
) -> None:
    """Candidates come in any order, and those of probability zero may be left out."""

    def distribution(weights: list[int], order: list[int]) -> Distribution:
        ids = [token for token in order if weights[token]]
        return Distribution(
            np.array(ids), np.array([weights[t] for t in ids], dtype=float) / sum(weights)
        )

    target, draft = distribution(p, target_order), distribution(q, draft_order)
    excess = [max(weight * p[t] / sum(p) - q[t] / sum(q), 0.0) for t in range(6)]
    assume(sum(excess) > 1e-9)
    rest, total = residual(target, draft, weight)
    assert total == pytest.approx(sum(excess))
    assert [rest.probability_of(t) for t in range(6)] == pytest.approx(
        [o / sum(excess) for o in excess]
    )


def test_equal_distributions_leave_nothing_and_other_tokens_have_no_probability() -> None:
    same = Distribution(np.array([1, 2]), np.array([0.25, 0.75]))
    assert residual(same, same, 1.0)[1] == 0.0
    assert same.probability_of(3) == 0.0


@given(logits, st.integers(0, 5))
def test_logprobs_are_the_log_softmax_of_the_row(values: list[float], top: int) -> None:
    top = min(top, len(values))
    row = make_row(values)
    finite = [value for value in values if value > -math.inf]
    total = max(finite) + math.log(sum(math.exp(v - max(finite)) for v in finite))
    token = int(row.argmax())
    entry = logprob(row, token, top, piece)
    assert entry.piece == piece(token)
    assert entry.logprob == pytest.approx(values[token] - total, abs=1e-5)
    best = sorted(values, reverse=True)[:top]
    assert [p for _, _, p in entry.top] == pytest.approx([v - total for v in best], abs=1e-5)
    for candidate, candidate_piece, p in entry.top:
        assert candidate_piece == piece(candidate)
        assert p == pytest.approx(values[candidate] - total, abs=1e-5)


def test_request_overrides_file_and_file_overrides_defaults() -> None:
    settings = resolve_settings(
        Sampling(temperature=0.0, seed=7, dry_sequence_breakers=["x"]),
        {"temperature": 0.6, "top_k": 20},
    )
    expected = replace(Settings(), temperature=0.0, top_k=20, seed=7, dry_sequence_breakers=("x",))
    assert settings == expected
    assert isinstance(settings.top_k, int)


@pytest.mark.parametrize(
    ("key", "name", "limit"),
    [
        (parameter.other_names.gguf, parameter.name, parameter.kind)
        for parameter in limits.sampling_parameters()
        if parameter.other_names.gguf
    ],
)
def test_file_settings_beyond_the_limits_are_ignored(key: str, name: str, limit: Any) -> None:
    kind = msgspec.inspect.type_info(limit)
    assert isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType)
    assert kind.ge is not None
    assert kind.le is not None
    for text in (str(kind.ge), str(kind.le)):
        assert model_defaults({f"general.sampling.{key}": text}.get) == {name: float(text)}
    beyond = [str(kind.ge - 1), str(kind.le + 1), "1e300", "-1e300", "inf", "-inf", "nan", "1e999"]
    beyond += ["warm"]
    beyond += ["0", "1e-300"] if kind.ge > 0 else []
    for text in beyond:
        assert model_defaults({f"general.sampling.{key}": text}.get) == {}


def test_dry_base_below_one_becomes_the_default() -> None:
    """As in llama-server, a base below one would penalize longer repeats less."""
    assert resolve_settings(Sampling(dry_base=0.5), {}).dry_base == Settings().dry_base
    assert resolve_settings(Sampling(dry_base=1.0), {}).dry_base == 1.0


@given(st.integers(-(2**63), 2**63 - 1))
def test_seed_determines_the_draws(seed: int) -> None:
    row = make_row([0.0] * 100)
    first, second = (Sampler(replace(OFF, seed=seed)) for _ in "ab")
    assert [first.sample(row, at) for at in range(4)] == [second.sample(row, at) for at in range(4)]
    draws = [[sampler.uniform() for _ in range(2)] for sampler in (first, second)]
    assert draws[0] == draws[1]
    assert all(0 <= draw < 1 for draw in draws[0])


def test_without_a_seed_two_requests_draw_differently() -> None:
    row = make_row([0.0] * 100)
    first, second = Sampler(OFF), Sampler(OFF)
    assert first.uniform() != second.uniform()
    assert [first.sample(row, at) for at in range(9)] != [second.sample(row, at) for at in range(9)]
