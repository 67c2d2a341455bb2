"""Training on a GPU, which these tests pretend to have: PyTorch checks devices without computing anything."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import TINY_TARGET, target_cycle
from benchmarks.synthetic_targets import write_target
from localspec.engine import llama
from localspec.engine.llama import initialise
from localspec.extras.tune import reading
from localspec.extras.tune.lessons import Lesson
from localspec.extras.tune.model_file import ModelFile
from localspec.extras.tune.states import Window
from tests.support.pairs import N_VOCAB, cycle_pair

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="this installation has no extra tune, with PyTorch"
)
N_TOKENS = 24


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretend to have a GPU on which each operation fails if one of its inputs is elsewhere."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from localspec.extras.tune import steps

    torch = steps.torch  # type: ignore[attr-defined]
    monkeypatch.setattr(steps, "free_torch_bytes", lambda: 1 << 40)
    with FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)):
        with pytest.raises(Exception, match="same device"):
            torch.ones(2) + torch.ones(2, device="cuda")
        yield torch


@needs_torch
@pytest.mark.usefixtures("gpu")
def test_a_new_draft_is_trained_on_a_gpu(tmp_path: Path) -> None:
    from localspec.extras.tune import eagle, steps

    initialise()
    path = tmp_path / "target.gguf"
    write_target(path, TINY_TARGET, target_cycle(N_VOCAB))
    target = ModelFile(path)
    width = TINY_TARGET.n_embd
    window = Window(
        np.arange(N_TOKENS),
        np.ones((N_TOKENS, 3 * width), np.float16),
        np.tile(np.arange(16), (N_TOKENS, 1)),
        np.full((N_TOKENS, 16), 1 / 16, np.float32),
    )
    layer = eagle.EagleLayer.draw(target, (0, 1, 1), np.arange(N_VOCAB), [window])
    layer.weights = steps.place_weights(layer.weights)
    loss = eagle._loss(layer, eagle._Batch.of([window, window], target, layer))
    assert loss.device.type == "cuda"
    assert loss.requires_grad


@needs_torch
def test_all_weights_are_trained_on_a_gpu(tmp_path: Path, gpu: Any) -> None:
    from localspec.extras.tune import network, steps

    initialise()
    pair = cycle_pair(tmp_path)
    assert pair.draft is not None
    decoder = network.Decoder(ModelFile(Path(pair.draft)))
    decoder.weights = steps.place_weights(decoder.weights)
    top = np.arange(N_TOKENS)[:, None]
    lesson = Lesson("ask", [1] * N_TOKENS, 1, 0, top, np.ones(top.shape, np.float32))
    loss = network._loss(decoder, [lesson], gpu.device("cuda"))
    assert loss.device.type == "cuda"
    assert loss.requires_grad


@needs_torch
@pytest.mark.parametrize(("free", "device"), [(0, "cpu"), (1 << 30, "cpu"), (1 << 40, "cuda")])
def test_a_gpu_trains_what_it_can_hold(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, free: int, device: str
) -> None:
    from localspec.extras.tune import steps

    monkeypatch.setattr(steps, "free_torch_bytes", lambda: free)
    placed = steps.place_weights({"weight": gpu.ones(8, 8)})["weight"]
    assert placed.device.type == device
    assert placed.requires_grad


@pytest.mark.parametrize("wanted", [-1, 0, 7])
def test_models_are_read_on_a_gpu_that_can_hold_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    models = [tmp_path / "big-00001-of-00002.gguf", tmp_path / "draft.gguf"]
    for path in (*models, tmp_path / "big-00002-of-00002.gguf"):
        with path.open("wb") as file:
            file.truncate(10 << 30)
    for free, fits in ((33 << 30, False), (35 << 30, True)):
        monkeypatch.setattr(reading, "free_gpu_bytes", lambda free=free: free)
        placed = reading.place_layers(wanted, *map(str, models))
        assert placed == (wanted if fits else 0)


def test_memory_is_free_where_there_is_a_gpu() -> None:
    initialise()
    assert bool(llama.free_gpu_bytes()) == bool(llama.gpus())
