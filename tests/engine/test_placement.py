"""A smaller plan is tried and reported when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import pytest

from benchmarks.synthetic import TINY_DRAFT, TINY_TARGET, follow, target_cycle, write_pair
from localspec.engine.llama import model
from localspec.engine.pair import models
from localspec.engine.pair.load import load_pair
from localspec.engine.pair.pair import LoadedPair
from localspec.errors import LoadFailed
from localspec.model_traits import order_experts
from localspec.protocol.frames import EngineSettings, PairFiles, Sampling, SpeculationSettings
from tests.support.running import running


def list_plan_notes(settings: EngineSettings, context: int, gpu: bool) -> list[str]:
    """Return the first clause of the note of every plan that is tried, in order."""
    notes = []
    while plan := models.choose_smaller_plan(settings, 32, context, gpu, heads=1):
        settings, note = plan.settings, plan.told
        context = settings.n_ctx or context
        notes.append(note.split(",")[0])
    return notes


def test_the_targets_layers_leave_a_gpu_first_and_its_drafts_last() -> None:
    notes = list_plan_notes(EngineSettings(), 8192, gpu=True)
    assert notes[0] == "Only 24 layers of the target are on the GPU"
    no_heads = "The model's MTP heads are left out"
    smaller, least = (f"The context is limited to {n} tokens" for n in (4096, 2048))
    on_cpu = "The draft runs on the CPU: the GPU is full."
    none_on_gpu = "Only 0 layers of the target are on the GPU"
    assert notes[-5:] == [none_on_gpu, smaller, least, on_cpu, no_heads]
    half = "The context is limited to 2500 tokens"
    assert list_plan_notes(EngineSettings(), 5000, gpu=False) == [half, least, no_heads]


def test_experts_leave_a_gpu_before_layers() -> None:
    """Only then are layers, the context and the draft given up."""
    names = [f"blk.{at}.ffn_{part}_exps.weight" for at in range(32) for part in ("up", "down")]
    experts, settings, given = order_experts(names), EngineSettings(cpu_experts=10), []
    while plan := models.choose_smaller_plan(settings, 32, 4096, gpu=True, experts=experts):
        settings = plan.settings
        given.append((plan.gives, settings.cpu_experts, settings.n_gpu_layers))
        if plan.gives == "layers":
            break
    assert [apart for _, apart, _ in given[:5]] == [15, 22, 33, 49, 64]
    assert {gives for gives, *_ in given[:-1]} == {"experts"}
    assert given[-2:] == [("experts", 64, -1), ("layers", 64, 24)]
    on_cpu = EngineSettings(n_gpu_layers=0)
    plan = models.choose_smaller_plan(on_cpu, 32, 4096, gpu=True, experts=experts)
    assert plan is not None
    assert plan.gives == "context"


@pytest.fixture
def files(tmp_path: Path) -> PairFiles:
    longer = [replace(shape, n_ctx=8192) for shape in (TINY_TARGET, TINY_DRAFT)]
    target, draft = write_pair(tmp_path, longer[0], longer[1])
    return PairFiles(name="tiny", target=str(target), draft=str(draft))


def fail_when_called(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """Let a function of llama.cpp fail as it does when memory runs out."""
    real: Callable[..., Any] = getattr(C, name)
    remaining = [times]

    def failing_function(*arguments: Any) -> Any:
        if remaining[0]:
            remaining[0] -= 1
            model.on_log(4, b"alloc_tensor_range: failed to allocate CPU buffer of size 9\n", None)
            model.on_log(4, b"failed to initialize the context\n", None)
            return None
        return real(*arguments)

    monkeypatch.setattr(C, name, failing_function)


def load_with_messages(files: PairFiles, messages: list[str]) -> LoadedPair:
    settings = EngineSettings(n_ctx=4096, parallel=1)
    return load_pair(files, settings, lambda *_: None, messages.append)


@pytest.mark.parametrize("function", ["llama_init_from_model", "llama_model_load_from_file"])
def test_a_load_without_memory_is_tried_again_smaller(
    files: PairFiles, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_when_called(monkeypatch, function, 1)
    messages: list[str] = []
    pair = load_with_messages(files, messages)
    (note,) = pair.info().notes
    pair.close()
    assert pair.n_ctx == 2048
    assert note == "The context is limited to 2048 tokens, because memory is full."
    assert "failed to allocate CPU buffer" in messages[0]


def test_load_error_tells_that_no_smaller_plan_is_left(
    files: PairFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_when_called(monkeypatch, "llama_init_from_model", 9)
    with pytest.raises(LoadFailed, match="Nothing smaller is left to try; close other programs"):
        load_with_messages(files, [])


def test_a_failure_for_another_reason_is_not_tried_again(
    files: PairFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def failing_function(*_: Any) -> None:
        calls.append(1)
        model.on_log(4, b"quantized V cache requires flash attention\n", None)

    monkeypatch.setattr(C, "llama_init_from_model", failing_function)
    with pytest.raises(LoadFailed, match="requires flash attention"):
        load_with_messages(files, [])
    assert len(calls) == 1


@pytest.mark.parametrize("depth", [0, 3])
def test_tokens_chosen_on_the_device_are_the_same(files: PairFiles, depth: int) -> None:
    cycle = target_cycle(512)
    with running(files, parallel=2, choose_on_device=True, depth=depth) as engine:
        greedy = {"speculative": SpeculationSettings(depth=depth)}
        for _ in range(2):
            answer = engine.ask([7, 8, 9], 40, **greedy)
            assert answer.tokens == follow(cycle, 9, 40)
        assert engine.pair.shared.context._choosers
        sampled = engine.ask([7, 8, 9], 10, Sampling(temperature=1.0, seed=1), **greedy)
        assert len(sampled.tokens) == 10  # its logits are available again
        scored = engine.ask([7, 8, 9], 5, top_logprobs=2, **greedy)
        assert len(scored.logprobs) == 5
        assert scored.tokens == follow(cycle, 9, 5)


@pytest.mark.parametrize("answer", [-1, 5])
def test_device_that_chooses_wrongly_is_detected_at_load(
    files: PairFiles, answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(C, "llama_get_sampled_token_ith", lambda *_: answer)
    with running(files, choose_on_device=True) as engine:
        assert not engine.pair.chooses_on_device
        assert engine.ask([7, 8, 9], 20).tokens == follow(target_cycle(512), 9, 20)
