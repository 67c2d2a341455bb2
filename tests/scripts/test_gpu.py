"""Tests of localspec.machine.gpu: which code runs on which GPU."""

from __future__ import annotations

import pytest

from localspec.machine import architectures_run_on


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("90-real", "9.0", True),
        ("80-real", "8.6", True),  # machine code runs on later steps of its generation
        ("86-real", "8.0", False),
        ("80-real", "9.0", False),
        ("80-virtual", "9.0", True),  # PTX is compiled by the driver
        ("120-virtual", "9.0", False),
        ("75", "12.0", True),  # both
        ("90a-real", "9.0", True),
        ("90a", "10.0", False),
        ("75-real;89-real", "8.9", True),
        ("native", "8.9", True),
        ("89-real", "", True),  # a driver too old to report it
    ],
)
def test_code_runs_on_its_own_generation_and_ptx_on_newer_ones(
    architectures: str, capability: str, runs: bool
) -> None:
    assert architectures_run_on(architectures, capability) is runs
