"""NaN weights end the requests or drafts that they spoil, with a reason, and never the engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from localspec.engine.llama import BadBatch, Context
from localspec.errors import LoadFailed
from localspec.protocol.frames import PairFiles, Sampling
from tests.support.rescoring import NEAR_TIE, worst_gap
from tests.support.running import GREEDY, Running, drafting

Load = Callable[..., Running]
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3),
    Sampling(temperature=0.0, repeat_penalty=1.2),
)
BAD = 77  # a token whose embedding is NaN
PROMPT = [300, 17, 402, 255]


def write_spoiled_copy(file: str, folder: Path, tensor: str, row: int | None, value: float) -> str:
    """Write a copy of a model in which a tensor, or one row of it, has this value."""
    copy = shutil.copy(file, folder / f"spoiled-{Path(file).name}")
    for entry in gguf.GGUFReader(copy, "r+").tensors:
        if entry.name == tensor:
            entry.data[slice(None) if row is None else row] = value
    return str(copy)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tensor", ["token_embd.weight", "output.weight", "blk.0.ffn_down.weight"])
def test_target_with_nan_logits_is_not_loaded(
    contextual_files: PairFiles, load: Load, tmp_path: Path, tensor: str, value: float
) -> None:
    file = write_spoiled_copy(contextual_files.target, tmp_path, tensor, None, value)
    with pytest.raises(LoadFailed, match=r"spoiled-target\.gguf.*damaged"):
        load(PairFiles("spoiled", file, None))


@pytest.mark.parametrize("attention", ["auto", "off"])
@pytest.mark.parametrize("on_device", ["", "first", "none"])
def test_text_with_nan_logits_ends_its_request_alone(
    contextual_files: PairFiles,
    load: Load,
    tmp_path: Path,
    on_device: str,
    attention: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without flash attention, NaN of a text reaches all others in the context.

    `on_device` is the result of an argmax over NaN on the device: the first token, or none (CUDA).
    """
    if on_device == "none":
        sampled_token = Context.sampled_token

        def checked_token(context: Context, row: int) -> int:
            if (token := sampled_token(context, row)) == 0:
                raise BadBatch(f"No token was chosen for row {row}.")
            return token

        monkeypatch.setattr(Context, "sampled_token", checked_token)
    file = write_spoiled_copy(contextual_files.target, tmp_path, "token_embd.weight", BAD, np.nan)
    files = PairFiles("spoiled", file, contextual_files.draft)
    engine = load(files, choose_on_device=bool(on_device), flash_attention=attention)
    truth = engine.ask(PROMPT, 30).tokens
    for sampling in SAMPLINGS:
        engine.forget()
        bystander = engine.start(PROMPT, 30, GREEDY, drafting(2))
        engine.engine.step()
        victim = engine.start([5, BAD, 9], 30, sampling, drafting(2))
        late = engine.start([5, 6, BAD], 30, sampling)
        engine.finish()
        for request in (victim, late):
            failed = engine.answers[request].failed
            assert failed.code == "internal_error"
            assert file in failed.message
            assert "damaged" in failed.message
        tokens = engine.answers[bystander].tokens
        if tokens != truth:
            assert worst_gap(file, PROMPT, tokens) < NEAR_TIE
        engine.ask([5, BAD, *range(60)], 0)  # the prompt is read, but its logits are not used
        assert engine.ask([5, 6, 7], 12).tokens  # no slot retains NaN
        assert engine.ask([5, 6, 7], 12, sampling).done


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8)])
def test_draft_model_with_nan_logits_is_not_used(
    contextual_files: PairFiles, load: Load, tmp_path: Path, sampling: Sampling
) -> None:
    assert contextual_files.draft is not None
    sound_engine = load(contextual_files)
    truth = sound_engine.ask([5, BAD, 9], 30).tokens
    for row in (None, BAD):
        file = write_spoiled_copy(
            contextual_files.draft, tmp_path, "token_embd.weight", row, np.nan
        )
        engine = load(PairFiles("spoiled", contextual_files.target, file))
        answer = engine.ask([5, BAD, 9], 30, sampling, drafting(3))
        assert answer.done.speculation.reason == "NaN or infinite values from the draft model"
        if row is None:
            assert engine.pair.info().speculation == answer.done.speculation.reason
            assert file in engine.pair.info().notes[0]
        if sampling is GREEDY and answer.tokens != truth:
            assert worst_gap(contextual_files.target, [5, BAD, 9], answer.tokens) < NEAR_TIE


def test_token_zero_chosen_on_the_device_is_checked(
    contextual_files: PairFiles, load: Load
) -> None:
    """An argmax over NaN gives token 0, which a model may also mean."""
    engine = load(contextual_files, choose_on_device=True)
    truth = load(contextual_files, choose_on_device=False)
    context = engine.pair.shared.context
    sampled_token, rows = context.sampled_token, []

    def often_zero(row: int) -> int:
        rows.append(row)
        return 0 if len(rows) == 5 else sampled_token(row)

    context.sampled_token = often_zero  # type: ignore[method-assign]
    answer = engine.ask(PROMPT, 30, GREEDY, drafting(2))
    assert len(rows) == 5
    expected = truth.ask(PROMPT, 30).tokens
    if answer.tokens != expected:
        assert worst_gap(contextual_files.target, PROMPT, answer.tokens) < NEAR_TIE
