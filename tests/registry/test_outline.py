"""What the names of a pair in the catalogue say about its speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.registry.catalogue import HubFile, load_catalogue
from localspec.registry.header.fit import FreeMemory, LoadOptions
from localspec.registry.hub.outline import find_fitting, outline_forecast, outline_model

GIB = 1 << 30
PAIRS = load_catalogue(Path("/nonexistent")).pairs
WRITERS = [name for name, pair in PAIRS.items() if not {"embed", "rerank"} & {*pair.roles}]


@pytest.mark.parametrize("name", WRITERS)
def test_every_pair_that_writes_has_a_forecast(name: str) -> None:
    pair, load = PAIRS[name], LoadOptions()
    rates = []
    for vram in (0, 4, 12, 24, 200):
        view = outline_forecast(pair, FreeMemory(256 * GIB, vram * GIB), load)
        assert view
        assert view.reading
        assert view.plain.likely
        assert view.plain.low < view.plain.likely < view.plain.high
        assert (view.drafted is None) == (pair.draft is None and pair.sidecar is None)
        rates.append(view.plain.likely)
    assert rates == sorted(rates)


def test_a_name_says_what_a_token_uses() -> None:
    files = [
        HubFile(repo=f"someone/{name}-GGUF", file=f"{name}-Q4_K_M.gguf")
        for name in ("Model-35B-A3B", "Model-35B", "Model")
    ]
    mixture, dense, unknown = map(outline_model, files)
    assert unknown is None
    assert mixture
    assert dense
    sizes = [model.sizes.trunk.dense + sum(model.sizes.trunk.experts) for model in (mixture, dense)]
    assert sizes == pytest.approx([35e9 * 4.85 / 8] * 2)
    used = mixture.sizes.trunk.dense + mixture.sizes.used * sum(mixture.sizes.trunk.experts)
    assert used == pytest.approx(3e9 * 4.85 / 8)


def test_a_pair_that_does_not_fit_says_what_would() -> None:
    pair = PAIRS["coder-7b"]
    needed = pair.estimated_bytes()
    assert find_fitting(pair, FreeMemory(int(needed * 0.9))) == "would fit as Q3_K_M"
    assert find_fitting(pair, FreeMemory(int(needed * 0.3))).endswith("GiB more")
