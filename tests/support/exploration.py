"""Which examples randomized tests draw: the same in each run, or other ones in `scripts/test explore`."""

from __future__ import annotations

import os

EXPLORES = "LOCALSPEC_TEST_EXPLORE" in os.environ
SEED = int(os.environ.get("LOCALSPEC_TEST_SEED", "1"))
FACTOR = 10 if EXPLORES else 1  # how many times as many examples are drawn


def count_examples(usual: int, variable: str) -> int:
    """Return how many examples a test draws; the environment variable may set the number itself."""
    return int(os.environ.get(variable, FACTOR * usual))
