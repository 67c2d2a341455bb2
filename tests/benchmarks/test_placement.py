"""`scripts/bench placement` from end to end, with a worker as the GPU; times mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import placement
from localspec.engine.llama import rpc
from localspec.engine.llama.rpc import has_rpc_backend
from tests.support import architectures
from tests.support.rpc import rpc_worker


@pytest.mark.skipif(not has_rpc_backend(), reason="this llama.cpp was built without GGML_RPC")
def test_three_ways_are_compared(
    tmp_path: Path, fake_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "GREETING_S", 60.0)
    shape = architectures.Shape(embd=256, heads=2, ff=1536, layers=6)
    monkeypatch.setattr(architectures, "shape", lambda _: shape)
    file, out = architectures.write("qwen3moe", tmp_path, experts=True), tmp_path / "out.json"
    arguments = [str(file), "--memory", "76", "--context", "512", "--prompt", "40", "--tokens", "8"]
    arguments += ["--repetitions", "1", "--threads", "1", "--json", str(out)]
    with rpc_worker() as (endpoint, _):
        arguments += ["--rpc", endpoint, "--llama-server", str(fake_server)]
        assert placement.main(arguments) == 0
    apart, whole, server = json.loads(out.read_text())
    assert "experts of the first" in apart["placed"]
    assert "layers there" in whole["placed"]
    assert "experts" not in whole["placed"]
    assert all(way["reading"] > 0 < way["writing"] for way in (apart, whole))
    assert (server["way"], server["writing"]) == ("llama-server --fit", 42.0)
