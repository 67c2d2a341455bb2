"""Where memory runs out, a smaller plan is tried, and said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import TINY_DRAFT, TINY_TARGET, follow, target_cycle, write_pair
from localspec.engine import llama
from localspec.engine.llama import model
from localspec.engine.pair import models
from localspec.engine.pair.load import load_pair
from localspec.engine.pair.pair import LoadedPair
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles, Sampling, SpeculationSettings
from tests.support.running import running


def steps(settings: EngineSettings, context: int, gpu: bool) -> list[str]:
    """Everything that is tried, in order."""
    said = []
    while found := models.choose_smaller_plan(settings, 32, context, gpu):
        settings, told = found.settings, found.told
        context = settings.n_ctx or context
        said.append(told.split(",")[0])
    return said


def test_the_targets_layers_leave_the_gpu_first_and_the_draft_last() -> None:
    said = steps(EngineSettings(), 8192, gpu=True)
    assert said[0] == "Only 24 layers of the target are on the GPU"
    assert said[-4:] == [
        "Only 0 layers of the target are on the GPU",
        "The context is limited to 4096 tokens",
        "The context is limited to 2048 tokens",
        "The draft runs on the CPU: the GPU is full.",
    ]


def test_without_a_gpu_only_the_context_can_give() -> None:
    assert steps(EngineSettings(), 5000, gpu=False) == [
        "The context is limited to 2500 tokens",
        "The context is limited to 2048 tokens",
    ]


@pytest.fixture
def files(tmp_path: Path) -> PairFiles:
    longer = [replace(shape, n_ctx=8192) for shape in (TINY_TARGET, TINY_DRAFT)]
    target, draft = write_pair(tmp_path, longer[0], longer[1])
    return PairFiles(name="tiny", target=str(target), draft=str(draft))


def failing(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """Let a function of llama.cpp fail as it does where memory runs out."""
    real: Callable[..., Any] = getattr(llama.C, name)
    left = [times]

    def function(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            model._on_log(4, b"alloc_tensor_range: failed to allocate CPU buffer of size 9\n", None)
            model._on_log(4, b"failed to initialize the context\n", None)
            return None
        return real(*arguments)

    monkeypatch.setattr(llama.C, name, function)


def load(files: PairFiles, said: list[str] | None = None) -> LoadedPair:
    settings = EngineSettings(n_ctx=4096, parallel=1)
    return load_pair(
        files, settings, lambda _stage, _part: None, (said if said is not None else []).append
    )


@pytest.mark.parametrize("function", ["llama_init_from_model", "llama_model_load_from_file"])
def test_a_load_without_memory_is_tried_again_smaller(
    files: PairFiles, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, function, 1)
    said: list[str] = []
    pair = load(files, said)
    try:
        assert pair.n_ctx == 2048
        assert pair.info().notes == [
            "The context is limited to 2048 tokens, because memory is full."
        ]
        assert "failed to allocate CPU buffer" in said[0]
    finally:
        pair.close()


def test_when_nothing_is_left_to_give_it_says_so(
    files: PairFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "llama_init_from_model", 9)
    with pytest.raises(LoadFailed, match="Nothing smaller is left to try; close other programs"):
        load(files)


def test_a_failure_for_another_reason_is_not_tried_again(
    files: PairFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def function(*_: Any) -> None:
        calls.append(1)
        model._on_log(4, b"quantized V cache requires flash attention\n", None)

    monkeypatch.setattr(llama.C, "llama_init_from_model", function)
    with pytest.raises(LoadFailed, match="requires flash attention"):
        load(files)
    assert len(calls) == 1


@pytest.mark.parametrize("depth", [0, 3])
def test_tokens_chosen_where_the_logits_are_are_the_same(files: PairFiles, depth: int) -> None:
    cycle = target_cycle(512)
    with running(files, parallel=2, choose_on_device=True, depth=depth) as engine:
        greedy = {"speculative": SpeculationSettings(depth=depth)}
        for _ in range(2):
            answer = engine.ask([7, 8, 9], 40, **greedy)
            assert answer.tokens == follow(cycle, 9, 40)
        assert engine.pair.shared.context._choosers
        sampled = engine.ask([7, 8, 9], 10, Sampling(temperature=1.0, seed=1), **greedy)
        assert len(sampled.tokens) == 10  # its rows are there again
        scored = engine.ask([7, 8, 9], 5, top_logprobs=2, **greedy)
        assert len(scored.logprobs) == 5
        assert scored.tokens == follow(cycle, 9, 5)


@pytest.mark.parametrize("answer", [-1, 5])
def test_a_device_that_chooses_nothing_or_wrongly_is_found_out_at_load(
    files: PairFiles, answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.C, "llama_get_sampled_token_ith", lambda *_: answer)
    with running(files, choose_on_device=True) as engine:
        assert not engine.pair.chooses_on_device
        assert engine.ask([7, 8, 9], 20).tokens == follow(target_cycle(512), 9, 20)
