"""Bias, penalties, DRY, truncations and temperature together, held against llama.cpp's own chain."""

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
# A token's weight is 0 in float32 beside the one with a bias, and its probability is 0.02 even so.
EVERYTHING = {
    "temperature": 100.0,
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "logit_bias": {0: 370.0},
}


def theirs(row: Logits, history: Sequence[int], asked: Settings) -> dict[int, float]:
    """The probabilities that llama.cpp would draw from."""
    chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())

    def look_back(count: int) -> int:
        return count if count >= 0 else len(history) + 1

    bias = [C.llama_logit_bias(token, value) for token, value in asked.logit_bias.items()]
    penalties = asked.repeat_penalty, asked.frequency_penalty, asked.presence_penalty
    dry = asked.dry_multiplier, asked.dry_base, asked.dry_allowed_length
    for sampler in (
        C.llama_sampler_init_logit_bias(N, len(bias), (C.llama_logit_bias * len(bias))(*bias)),
        C.llama_sampler_init_penalties(N, look_back(asked.repeat_last_n), *penalties),
        C.llama_sampler_init_dry(None, *dry, look_back(asked.dry_penalty_last_n), None, 0),
        C.llama_sampler_init_top_n_sigma(asked.top_n_sigma),
        C.llama_sampler_init_top_k(asked.top_k),
        C.llama_sampler_init_typical(asked.typical_p, asked.min_keep),
        C.llama_sampler_init_top_p(asked.top_p, asked.min_keep),
        C.llama_sampler_init_min_p(asked.min_p, asked.min_keep),
        C.llama_sampler_init_xtc(asked.xtc_probability, asked.xtc_threshold, asked.min_keep, 1),
        C.llama_sampler_init_temp_ext(
            asked.temperature, asked.dynatemp_range, asked.dynatemp_exponent
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


# A cut within rounding of an edge may fall otherwise, and many settings have no answer of llama.cpp's.
@settings(max_examples=400, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.integers(0, 2**32), st.lists(st.integers(0, 8), max_size=30), SETTINGS)
@example(0, [0], {**EVERYTHING, "top_p": 0.0, "min_keep": 3})
@example(0, [0], {**EVERYTHING, "xtc_probability": 1.0, "xtc_threshold": 0.0})
@example(
    0,
    [0],
    {**EVERYTHING, "xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 5, "temperature": 1.0},
)
def test_the_distribution_is_that_of_llama_cpps_chain(
    seed: int, history: list[int], chosen: dict[str, Any]
) -> None:
    asked = Settings(**chosen)
    far = max([abs(value) for value in asked.logit_bias.values()], default=0.0) >= 100.0
    far = far or asked.dry_multiplier > 0.0 or asked.repeat_penalty in (0.001, 100.0)
    # llama.cpp's entropy is no number where a probability is 0 in float32.
    assume(asked.typical_p == 1.0 or not far)
    # It counts what top-n-sigma has put out as a candidate still: in an entropy, to be kept, and as
    # likely enough for XTC where anything is.
    plain = asked.typical_p == 1.0 and not asked.min_keep and not asked.dynatemp_range
    plain = plain and not (asked.excludes and asked.xtc_threshold == 0.0)
    assume(asked.top_n_sigma < 0.0 or plain)
    row = np.random.default_rng(seed).normal(0, 3, N).astype(np.float32)
    sampler = Sampler(asked)
    found = sampler.distribution(sampler.adjusted(row, history))
    wanted = theirs(row, history, asked)
    # Nor is the root of its entropy one where rounding has that below 0.
    assume(not any(map(math.isnan, wanted.values())))
    for token in set(found.ids.tolist()) | set(wanted):
        assert abs(found.probability_of(token) - wanted.get(token, 0.0)) < 2e-3
