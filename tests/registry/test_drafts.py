"""Tests of finding models that other programs left on this disk, and of ranking them as drafts."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import TINY_DRAFT, TINY_TARGET, Shape, target_cycle, write_model
from benchmarks.synthetic_block import write_block
from benchmarks.synthetic_eagle import write_eagle
from benchmarks.synthetic_heads import TINY_HEADS, write_heads, write_heads_apart
from benchmarks.synthetic_sidecar import write_with_sidecar
from localspec.errors import LocalspecError
from localspec.protocol.pairs import DraftView
from localspec.registry.disk.discovery import FoundModel, find_models
from localspec.registry.disk.drafts import (
    Trial,
    acceptance_interval,
    estimate_gains,
    find_own_drafts,
    judge_all,
    rank_drafts,
)
from localspec.registry.header.model import read_local_model
from localspec.registry.store.local import add_own_pair
from localspec.registry.store.store import Store
from tests.support.gguf_files import BOOL, U32, model, sha256


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder with a model of every program."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    files = {
        Path(os.environ["HF_HUB_CACHE"]) / "models--a--b/snapshots/c/hub.gguf": 3,
        tmp_path / ".lmstudio/models/a/b/studio.gguf": 4,
        tmp_path / "mine/lone.gguf": 5,
        tmp_path / "mine/mmproj-lone.gguf": 6,
        tmp_path / "mine/part-00002-of-00002.gguf": 7,
    }
    for path, seed in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        model(seed=seed).write(path)
    ollama = model(seed=8).data()
    root = tmp_path / ".ollama/models"
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{sha256(ollama)}",
    }
    manifest = root / "manifests/registry.ollama.ai/library/qwen/0.5b"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [{"mediaType": "other", "digest": "x"}, layer]}))
    (manifest.parent / "broken").write_text("{")
    (root / "blobs").mkdir()
    (root / "blobs" / f"sha256-{sha256(ollama)}").write_bytes(ollama)
    return tmp_path


def test_every_program_is_searched(home: Path, store: Store) -> None:
    add_own_pair(store, "p", model(layers=3, seed=1).write(home / "pair.gguf"))
    (home / "mine/again.gguf").hardlink_to(home / "mine/lone.gguf")
    candidates = find_models(store, [home / "mine", home / "absent"])
    assert [(candidate.origin.split("/")[0], candidate.name) for candidate in candidates] == [
        ("pair p", "pair.gguf"),
        ("Hugging Face cache", "hub.gguf"),
        ("LM Studio", "studio.gguf"),
        ("Ollama", "qwen:0.5b"),
        ("", "again.gguf"),  # the same file as lone.gguf: once
    ]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, list[FoundModel]]:
    files = {
        "target": model(layers=8, width=32),
        "small": model(layers=1),
        "middle": model(layers=4, width=16),
        "other": model(layers=1).put("tokenizer.ggml.add_bos_token", BOOL, True),
        "large": model(layers=9, width=32),
        "mamba": model(layers=1, architecture="mamba"),
    }
    entries = [
        FoundModel(file.write(tmp_path / f"{name}.gguf"), f"{name}.gguf", "here")
        for name, file in files.items()
    ]
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    return tmp_path / "target.gguf", [*entries, FoundModel(broken, "broken.gguf", "here")]


def rank(
    target: Path, models: list[FoundModel], measure: Callable[[DraftView], Trial] | None = None
) -> list[DraftView]:
    return rank_drafts(target, models, measure).drafts or []


def test_matching_drafts_come_first_in_order_of_size(models: tuple[Path, list[FoundModel]]) -> None:
    ranked = rank(*models)
    assert [draft.name for draft in ranked if draft.matched] == ["small.gguf", "middle.gguf"]
    assert ranked[0].ratio > ranked[1].ratio > 1
    reasons = {draft.name: draft.reason for draft in ranked if not draft.matched}
    assert "add_bos_token is false in the target and true in" in reasons["other.gguf"]
    assert "not smaller than the target" in reasons["large.gguf"]
    assert "cannot roll back tokens" in reasons["mamba.gguf"]
    assert "truncated" in reasons["broken.gguf"]
    assert all(reason.endswith(".") for reason in reasons.values())


def make_trial(rate: float, step_ms: float = 1.0, count: int = 100) -> Trial:
    texts = [(count, round(rate * count))] * 6
    return Trial(texts, {1: 20.0, 2: 22.0, 4: 24.0, 8: 30.0}, {1: step_ms}, 0.3)


def test_measured_drafts_are_ranked_by_their_gain(models: tuple[Path, list[FoundModel]]) -> None:
    rates = {"small": 0.5, "middle": 0.8}
    ranked = rank(*models, measure=lambda view: make_trial(rates[Path(view.name).stem]))
    assert [view.name for view in ranked[:2]] == ["middle.gguf", "small.gguf"]
    assert not ranked[1].tied
    ranked = rank(*models, measure=lambda _: make_trial(0.5, count=20))
    assert [view.tied for view in ranked[:2]] == [False, True]


def test_a_draft_that_cannot_be_measured_does_not_match(
    models: tuple[Path, list[FoundModel]],
) -> None:
    def measure(view: DraftView) -> Trial:
        if view.name == "small.gguf":
            raise LocalspecError("The worker died.")
        return make_trial(0.5)

    ranked = rank(*models, measure=measure)
    assert [view.name for view in ranked if view.matched] == ["middle.gguf"]
    assert "The worker died." in {view.reason for view in ranked}


@pytest.fixture
def with_heads(tmp_path: Path) -> tuple[Path, list[FoundModel]]:
    """Return a target with MTP heads, and sidecars and a model that draft for it."""
    target, cycle = tmp_path / "target.gguf", target_cycle(TINY_HEADS.n_vocab)
    write_heads(target, architecture="qwen35")
    write_heads_apart(tmp_path / "trunk.gguf", tmp_path / "mtp-a.gguf", architecture="qwen35")
    write_eagle(tmp_path / "eagle3-a.gguf", TINY_HEADS, cycle)
    write_eagle(tmp_path / "eagle3-deep.gguf", TINY_HEADS, cycle, layers=(0, 1, 7))
    write_block(tmp_path / "dflash-a.gguf", TINY_HEADS, cycle)
    write_block(tmp_path / "dspark-a.gguf", TINY_HEADS, cycle, kind="dspark")
    write_model(tmp_path / "small.gguf", Shape(1, 16, 32, 1, TINY_HEADS.n_vocab), cycle)
    (tmp_path / "trunk.gguf").unlink()
    files = sorted(tmp_path.glob("*.gguf"))
    return target, [FoundModel(file, file.name, "here") for file in files]


@pytest.mark.parametrize(
    "target", ["gemma-4-E4B-it-Q8_0.gguf", "gemma-3-4b-cooking-assistant-Q8_0.gguf"]
)
@pytest.mark.parametrize(
    "sidecar",
    [
        "gemma-4-E4B-it-Q8_0-MTP.gguf",
        "Qwen3.8-27B-mtp-Q8_0.gguf",
        "MTP/gemma-4-E4B-it-Q8_0.gguf",
        "mtp/heads.gguf",
        "eagle3-q.gguf",
        "whatever.gguf",
        "Big-eagle3-Dynamic+x (1).GGUF",
    ],
)
@pytest.mark.parametrize("kind", ["mtp", "gemma4", "eagle3", "dflash"])
def test_a_sidecar_beside_a_target_is_known_by_its_header(
    tmp_path: Path, kind: str, target: str, sidecar: str
) -> None:
    path, drafting, cycle = tmp_path / target, tmp_path / sidecar, target_cycle(TINY_TARGET.n_vocab)
    drafting.parent.mkdir(exist_ok=True)
    if kind == "mtp":
        write_heads_apart(path, drafting, architecture="qwen35")
    elif kind == "gemma4":
        (tmp_path / "made").mkdir()
        for made, place in zip(
            write_with_sidecar(tmp_path / "made"), (path, drafting), strict=True
        ):
            made.rename(place)
    else:
        write_model(path, TINY_TARGET, cycle)
        (write_eagle if kind == "eagle3" else write_block)(drafting, TINY_TARGET, cycle)
    write_model(tmp_path / "eagle3-is-a-model.gguf", TINY_DRAFT, cycle)
    write_model(tmp_path / "other-mtp-Q8_0.gguf", TINY_TARGET, cycle)
    (tmp_path / "dflash-damaged.gguf").write_bytes(b"GGUF")
    assert find_own_drafts(path) == [drafting]
    found = [FoundModel(file, file.name, "here") for file in tmp_path.rglob("*.[gG]*")]
    (judged,) = (item for item in judge_all(found) if item.path == str(path))
    assert judged.drafts[0] == str(drafting)


def test_own_heads_and_sidecars_come_in_the_order_in_which_they_are_taken(
    with_heads: tuple[Path, list[FoundModel]],
) -> None:
    ranked = rank(*with_heads)
    assert [(view.name, view.kind, view.matched) for view in ranked] == [
        ("its own MTP heads", "mtp-embedded", True),
        ("mtp-a.gguf", "mtp-sidecar", True),
        ("dflash-a.gguf", "dflash", True),
        ("dspark-a.gguf", "dspark", True),
        ("eagle3-a.gguf", "eagle3", True),
        ("small.gguf", "model", True),
        ("eagle3-deep.gguf", "eagle3", False),
    ]
    assert "the target has 2" in ranked[-1].reason
    assert ranked[0].file == ""  # `add` takes the target's own heads where no draft is named
    assert (
        0
        < ranked[0].size
        < ranked[0].ratio * ranked[0].size
        == pytest.approx(read_local_model(with_heads[0]).weights)
    )


def test_heads_and_sidecars_are_ranked_with_models_once_measured(
    with_heads: tuple[Path, list[FoundModel]],
) -> None:
    rates = {"mtp-embedded": 0.5, "mtp-sidecar": 0.4, "eagle3": 0.9, "dflash": 0.7, "model": 0.8}

    def measure(view: DraftView) -> Trial:
        if view.kind == "dspark":
            raise LocalspecError("It could not be measured.")
        return make_trial(rates[view.kind])

    ranked = rank(*with_heads, measure)
    kinds = [view.kind for view in ranked if view.matched]
    assert kinds == sorted(rates, key=lambda kind: -rates[kind])
    assert "It could not be measured." in {view.reason for view in ranked}


def test_heads_that_are_not_supported_say_why(tmp_path: Path) -> None:
    target = model(layers=3).put("llama.nextn_predict_layers", U32, 1).write(tmp_path / "a.gguf")
    (heads,) = rank(target, [])
    assert not heads.matched
    assert heads.reason == "MTP heads of the architecture llama are not supported."


def test_a_block_costs_one_pass_for_all_its_tokens() -> None:
    step = make_trial(0.8, step_ms=4.0)
    block = replace(step, block=7, draft_ms={1: 4.0, 8: 4.0})
    gains = estimate_gains({"step": step, "block": block})
    assert gains["block"].speed_up > gains["step"].speed_up
    assert gains["step"].depth < gains["block"].depth <= 7


@given(
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    noise=st.lists(st.floats(1, 3), min_size=6, max_size=6),
)
def test_a_busy_machine_does_not_change_the_ranking(rates: list[float], noise: list[float]) -> None:
    """Drafts of one size are measured, some of them while another program runs."""
    quiet = {index: make_trial(rate) for index, rate in enumerate(rates)}
    noisy = {
        index: replace(
            quiet_trial,
            target_ms={width: ms * noise[index] for width, ms in quiet_trial.target_ms.items()},
        )
        for index, quiet_trial in quiet.items()
    }
    gains = estimate_gains(noisy)
    for index, gain in gains.items():
        for other_index in range(index):
            if quiet[index].texts == quiet[other_index].texts:
                assert gain.speed_up == gains[other_index].speed_up
            else:
                assert (gain.speed_up > gains[other_index].speed_up) == (
                    quiet[index].texts[0][1] > quiet[other_index].texts[0][1]
                )


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0, 1)), min_size=1, max_size=8))
def test_the_interval_contains_the_rate(texts: list[tuple[int, float]]) -> None:
    low, rate, high = acceptance_interval([(n, round(share * n)) for n, share in texts])
    assert 0 <= low <= rate <= high <= 1
    assert high > low


def test_intervals_contain_the_true_rate_nearly_always() -> None:
    """The intended coverage is 95 %, also for texts that differ in how easily they are guessed."""
    rng = random.Random(1)
    hits = 0
    for _ in range(400):
        truth = rng.random()
        texts = []
        for _ in range(6):
            rate = min(1.0, max(0.0, rng.gauss(truth, 0.08 if 0.2 < truth < 0.8 else 0.0)))
            texts.append((80, sum(rng.random() < rate for _ in range(80))))
        low, _, high = acceptance_interval(texts)
        hits += low <= truth <= high
    assert hits >= 370


def test_the_best_depth_follows_the_costs() -> None:
    assert (
        estimate_gains({0: make_trial(0.95)})[0].depth
        > estimate_gains({0: make_trial(0.3)})[0].depth
    )
    expensive = Trial([(100, 60)] * 6, {1: 10.0, 2: 20.0, 3: 30.0}, {1: 1.0}, 0.0)
    assert estimate_gains({0: expensive})[0].speed_up < 1
