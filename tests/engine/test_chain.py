"""Bias, penalties, DRY, truncations and temperature together agree with llama.cpp's own chain."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import llama_cpp as C
import numpy as np
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from localspec.engine.llama import Logits
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings

N = 40
SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.8, 1.0, 2.0, 100.0]),
        "top_k": st.sampled_from([-1, 0, 1, 5, N, N + 10]),
        "top_p": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "typical_p": st.sampled_from([0.0, 0.3, 0.9, 1.0, 1.0]),
        "top_n_sigma": st.sampled_from([-1.0, -1.0, 0.5, 1.0, 3.0]),
        "xtc_probability": st.sampled_from([0.0, 0.0, 1.0]),
        "xtc_threshold": st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.6]),
        "dynatemp_range": st.sampled_from([0.0, 0.0, 0.5, 2.0]),
        "dynatemp_exponent": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        "min_keep": st.sampled_from([0, 0, 1, 3, N + 1]),
        "repeat_penalty": st.sampled_from([0.001, 0.7, 1.0, 1.3, 100.0]),
        "repeat_last_n": st.sampled_from([-1, 0, 5, 64]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 1.0]),
        "dry_multiplier": st.sampled_from([0.0, 0.8, 100.0]),
        "dry_base": st.sampled_from([1.0, 1.75, 100.0]),
        "dry_allowed_length": st.sampled_from([0, 2]),
        "dry_penalty_last_n": st.sampled_from([-1, 0, 7]),
        "logit_bias": st.dictionaries(
            st.integers(0, 20), st.sampled_from([-100.0, 1.5, 100.0]), max_size=3
        ),
    }
)
# The weight of a token is 0 in float32 beside the one with a bias, although its probability is 0.02.
EVERYTHING = {
    "temperature": 100.0,
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "logit_bias": {0: 370.0},
}


def run_llama_cpp_chain(row: Logits, history: Sequence[int], options: Settings) -> dict[int, float]:
    """Return the probabilities that llama.cpp would draw from."""
    chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())

    def look_back(count: int) -> int:
        return count if count >= 0 else len(history) + 1

    bias = [C.llama_logit_bias(token, value) for token, value in options.logit_bias.items()]
    penalties = options.repeat_penalty, options.frequency_penalty, options.presence_penalty
    dry = options.dry_multiplier, options.dry_base, options.dry_allowed_length
    for sampler in (
        C.llama_sampler_init_logit_bias(N, len(bias), (C.llama_logit_bias * len(bias))(*bias)),
        C.llama_sampler_init_penalties(N, look_back(options.repeat_last_n), *penalties),
        C.llama_sampler_init_dry(None, *dry, look_back(options.dry_penalty_last_n), None, 0),
        C.llama_sampler_init_top_n_sigma(options.top_n_sigma),
        C.llama_sampler_init_top_k(options.top_k),
        C.llama_sampler_init_typical(options.typical_p, options.min_keep),
        C.llama_sampler_init_top_p(options.top_p, options.min_keep),
        C.llama_sampler_init_min_p(options.min_p, options.min_keep),
        C.llama_sampler_init_xtc(
            options.xtc_probability, options.xtc_threshold, options.min_keep, 1
        ),
        C.llama_sampler_init_temp_ext(
            options.temperature, options.dynatemp_range, options.dynatemp_exponent
        ),
        C.llama_sampler_init_dist(1),
    ):
        C.llama_sampler_chain_add(chain, sampler)
    for token in history:
        C.llama_sampler_accept(chain, token)
    data = (C.llama_token_data * N)(
        *[C.llama_token_data(token, float(value), 0.0) for token, value in enumerate(row)]
    )
    array = C.llama_token_data_array(data, N, -1, False)
    C.llama_sampler_apply(chain, ctypes.byref(array))
    C.llama_sampler_free(chain)
    return {int(array.data[at].id): array.data[at].p for at in range(array.size)}


# A cut near an edge may be rounded differently, and llama.cpp gives no result for many settings.
@settings(max_examples=400, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.integers(0, 2**32), st.lists(st.integers(0, 8), max_size=30), SETTINGS)
@example(0, [0], {**EVERYTHING, "top_p": 0.0, "min_keep": 3})
@example(0, [0], {**EVERYTHING, "xtc_probability": 1.0, "xtc_threshold": 0.0})
@example(
    0,
    [0],
    {**EVERYTHING, "xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 5, "temperature": 1.0},
)
def test_distribution_is_that_of_llama_cpps_chain(
    seed: int, history: list[int], chosen: dict[str, Any]
) -> None:
    options = Settings(**chosen)
    far = max([abs(value) for value in options.logit_bias.values()], default=0.0) >= 100.0
    far = far or options.dry_multiplier > 0.0 or options.repeat_penalty in (0.001, 100.0)
    # llama.cpp's entropy is NaN if a probability is 0 in float32.
    assume(options.typical_p == 1.0 or not far)
    # It still counts tokens removed by top-n-sigma as candidates: in an entropy, for `min_keep`, and
    # for XTC with a threshold of 0.
    plain = options.typical_p == 1.0 and not options.min_keep and not options.dynatemp_range
    plain = plain and not (options.excludes and options.xtc_threshold == 0.0)
    assume(options.top_n_sigma < 0.0 or plain)
    row = np.random.default_rng(seed).normal(0, 3, N).astype(np.float32)
    sampler = Sampler(options)
    distribution = sampler.distribution(sampler.adjusted(row, history))
    expected = run_llama_cpp_chain(row, history, options)
    # The root of its entropy is NaN if rounding makes the entropy negative.
    assume(not any(map(math.isnan, expected.values())))
    for token in set(distribution.ids.tolist()) | set(expected):
        assert abs(distribution.probability_of(token) - expected.get(token, 0.0)) < 2e-3
