"""What a pair of the catalogue needs and how fast it should be, before any of its headers was read.

Names say how many parameters a model has, how many of them a token uses, and how they are quantized.
"""

from __future__ import annotations

import re
from dataclasses import replace

from localspec.protocol.pairs import ForecastView
from localspec.registry.catalogue import CataloguePair, HubFile
from localspec.registry.file_names import count_bits, split_quant
from localspec.registry.header.fit import FreeMemory, LoadOptions
from localspec.registry.header.rate import (
    GIB,
    LayerBytes,
    ModelBytes,
    Outline,
    Placement,
    RateEstimate,
    forecast,
)

# As in "35B-A3B": parameters, and those that a token uses, in billions or millions.
_SIZES = re.compile(r"(?<![a-z0-9.])e?(\d+(?:\.\d+)?)([bm])(?:-a(\d+(?:\.\d+)?)b)?(?![a-z0-9])")
# The same of mixtures whose names do not tell.
_USED = {"gpt-oss-20b": 3.6, "gpt-oss-120b": 5.1}
_USED_EXPERTS = 1 / 16  # the share that a token uses, of which there are 8 of 128 in many
# Layers of a model of a billion parameters, and how they grow with these.
_LAYERS, _LAYERS_POWER = 14, 0.42
_SIDECAR_SHARE = 0.04  # of the target's parameters, in a sidecar whose size is unknown
_CACHE_SHARE = 1.2  # bytes of a pair ÷ those of its files, as in `CataloguePair.estimated_bytes`
# What a quantization takes, in bits a weight, the best first.
_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.85, "Q3_K_M": 3.9, "Q2_K": 3.0}
_NAME_DEVIATION = 0.2  # of the logarithm of a speed, because names are not headers


def outline_model(file: HubFile, *, sidecar: bool = False) -> Outline | None:
    """Return the outline of a model, or None if its names do not tell its size."""
    name = file.repo.partition("/")[2].lower()
    match, quant = _SIZES.search(name), split_quant(file.file)[1]
    bits = _BITS.get(quant) or (count_bits(quant) or 16) + 0.7
    billions = float(match[1]) / (1 if match[2] == "b" else 1e3) if match else 0.0
    billions *= _SIDECAR_SHARE if sidecar else 1
    size = file.size_gib * GIB or billions * 1e9 * bits / 8
    if not size:
        return None
    used = float(match[3]) if match and match[3] else billions
    used = next((each for key, each in _USED.items() if key in name), used)
    share = used / billions if used < billions else 1.0
    # Half of what a token reads may be experts, of which it uses this share.
    chosen = min(_USED_EXPERTS, share / 2)
    experts = size * (1 - share) / (1 - chosen)
    layers = 1 if sidecar else max(round(_LAYERS * max(billions, 0.1) ** _LAYERS_POWER), 8)
    kind = "MXFP4" if "MXFP4" in quant else re.sub(r"_(XL|[SML])$", "", quant)
    apart = (experts / layers,) * layers if experts else ()
    weights = ModelBytes(
        0.0,
        0.0,
        LayerBytes(size - experts, apart),
        LayerBytes(),
        chosen if experts else 1.0,
        tuple(range(len(apart))),
        {"layers": {kind: size - experts}, "experts": {kind: experts}},
    )
    return Outline(layers, layers, "mtp" if sidecar else None, weights)


def outline_forecast(
    pair: CataloguePair, free: FreeMemory, load: LoadOptions
) -> ForecastView | None:
    """Return how fast a pair should be if memory holds it; None if that cannot be told."""
    target = outline_model(pair.target)
    if not load.foreseeable or target is None or {"embed", "rerank"} & {*pair.roles}:
        return None
    side = pair.draft or pair.sidecar
    draft = outline_model(side, sidecar=pair.draft is None) if side else None
    speeds = replace(
        load.speeds,
        deviation={
            key: (each**2 + _NAME_DEVIATION**2) ** 0.5
            for key, each in load.speeds.deviation.items()
        },
    )
    estimate = RateEstimate(target, draft, speeds)
    return forecast(estimate, _place(estimate, int(free.vram / _CACHE_SHARE)))


def _place(pair: RateEstimate[Outline], vram: int) -> Placement:
    """Return where the models would lie: what a pass reads least of leaves the GPU first."""
    draft = pair.draft_weights
    rest = vram - (draft.trunk.dense if draft else 0.0)
    trunk, experts = pair.weights.trunk, sum(pair.weights.trunk.experts)
    if not vram or rest <= 0:
        return Placement(0, draft_layers=0)
    if trunk.dense + experts <= rest:
        return Placement()
    if trunk.dense <= rest and experts:
        share = 1 - (rest - trunk.dense) / experts
        return Placement(-1, cpu_experts=round(share * len(trunk.experts)))
    layers = int(rest / (trunk.dense + experts) * pair.target.layers)
    return Placement(layers + 1 if layers else 0)


def find_fitting(pair: CataloguePair, free: FreeMemory) -> str:
    """Return what of a pair that does not fit would, as a clause."""
    total, quant = free.ram + free.vram, split_quant(pair.target.file)[1]
    bits = _BITS.get(quant) or (count_bits(quant) or 16) + 0.7
    needed = pair.estimated_bytes()
    for smaller, smaller_bits in _BITS.items():
        if smaller_bits < bits and needed * smaller_bits / bits <= total:
            return f"would fit as {smaller}"
    return f"needs {(needed - total) / GIB:.0f} GiB more"
