"""A draft with a different vocabulary: speculation uses the tokens that both share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.synthetic import TINY_DRAFT, TINY_TARGET, Shape, vocabulary, write_model
from localspec.engine.llama import Batch
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.sampling.settings import Settings
from localspec.protocol.frames import PairFiles, Sampling
from tests.support.gguf_files import relabelled
from tests.support.pairs import rescale
from tests.support.rescoring import assert_alike
from tests.support.running import Running, drafting
from tests.support.statistics import chi_square_z

Load = Callable[..., Running]
TARGET_SIZE, DRAFT_SIZE = 1024, 724
CHANGED = range(400, 420)
SHARED = frozenset(range(DRAFT_SIZE)) - frozenset(CHANGED)


def resize_shape(shape: Shape, count: int) -> Shape:
    return Shape(shape.n_layer, shape.n_embd, shape.n_ff, shape.n_head, count, n_ctx=2048)


def make_vocabulary(count: int) -> list[str]:
    """Return a vocabulary with special tokens before words, so that a shorter one has them too."""
    tokens = vocabulary(count)
    return [*tokens[:256], *tokens[-5:], *tokens[256:-5]]


def write_pair(folder: Path, target_size: int, draft_size: int) -> PairFiles:
    """Write a pair whose draft follows the target's cycle within its own tokens."""
    order = np.random.default_rng(3).permutation(
        [at for at in range(target_size) if not 256 <= at < 261]
    )
    cycle = np.zeros(target_size, dtype=np.int64)
    cycle[order] = np.roll(order, -1)
    write_model(
        folder / "t.gguf",
        resize_shape(TINY_TARGET, target_size),
        cycle,
        tokens=make_vocabulary(target_size),
    )
    draft_cycle = np.resize(cycle, draft_size)
    draft_cycle[draft_cycle >= draft_size] = 0
    draft_tokens = [
        f"{text}?" if at in CHANGED else text for at, text in enumerate(make_vocabulary(draft_size))
    ]
    write_model(
        folder / "d.gguf",
        resize_shape(TINY_DRAFT, draft_size),
        draft_cycle,
        seed=2,
        tokens=draft_tokens,
    )
    return PairFiles("shared", str(folder / "t.gguf"), str(folder / "d.gguf"))


@pytest.fixture(
    params=[(TARGET_SIZE, DRAFT_SIZE), (DRAFT_SIZE, TARGET_SIZE)], ids=["fewer", "more"]
)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> PairFiles:
    return write_pair(tmp_path, *request.param)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, int]]:
    """Record every token that is added to a batch of the target or of the draft."""
    recorded: list[tuple[Batch, int]] = []
    add = Batch.add

    def recording_add(self: Batch, token: int, *more: Any) -> int:
        recorded.append((self, token))
        return add(self, token, *more)

    monkeypatch.setattr(Batch, "add", recording_add)
    return recorded


def list_draft_inputs(engine: Running, rows: Sequence[tuple[Batch, int]]) -> set[int]:
    """Return the tokens that the draft has read."""
    assert engine.pair.drafter is not None
    return {token for batch, token in rows if batch is engine.pair.drafter._batch}


def test_greedy_text_is_the_targets_and_only_shared_tokens_are_drafted(
    files: PairFiles, rows: list[tuple[Batch, int]], load: Load
) -> None:
    engine = load(files)
    drafted = accepted = 0
    for first_token in range(0, DRAFT_SIZE, 90):
        prompt = [first_token, first_token + 1, min(405, first_token + 2)]
        plain = engine.ask(prompt, 64)
        engine.forget()
        rows.clear()
        spec = engine.ask(prompt, 64, speculative=drafting(4))
        assert_alike(files.target, prompt, spec.tokens, plain.tokens)
        drafted += spec.done.speculation.drafted
        accepted += spec.done.speculation.accepted
        proposed = {token for batch, token in rows if batch is engine.pair.shared.batch}
        assert proposed - set(spec.tokens) - set(prompt) <= SHARED
        assert list_draft_inputs(engine, rows) <= SHARED
        engine.forget()
    assert drafted > accepted > drafted / 10


def test_unshared_token_is_never_drafted(files: PairFiles, load: Load) -> None:
    """Every token is about equally likely, so the draft would propose others without the restriction."""
    for path in (files.target, files.draft):
        assert path
        rescale(Path(path), {"output.weight": 1e-4})  # every token is about equally likely
    engine = load(files)
    answers = [
        engine.ask(
            [5], 60, sampling=_sampling(seed), speculative=drafting(5, verification="rejection")
        )
        for seed in range(6)
    ]
    assert engine.pair.drafter is not None
    beyond = [token for answer in answers for token in answer.tokens if token not in SHARED]
    assert sum(answer.done.speculation.drafted for answer in answers) > 100
    if engine.pair.vocab.size == TARGET_SIZE:
        assert beyond, "the target itself writes what the draft does not know"


@pytest.mark.slow
def test_sampled_drafts_keep_the_targets_distribution(tmp_path: Path, load: Load) -> None:
    """This also holds for tokens that the draft cannot propose."""
    files = write_pair(tmp_path, TARGET_SIZE, DRAFT_SIZE)
    for path in (files.target, files.draft):
        assert path
        rescale(Path(path), {"output.weight": 0.05})
    engine = load(files)
    sampling = Sampling(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0)
    sampler = Sampler(Settings(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0))
    speculative = drafting(2, verification="rejection")
    answers = [engine.ask([5, 9], 3, sampling, speculative) for _ in range(500)]
    assert sum(answer.done.speculation.accepted for answer in answers) > 10
    by_first: dict[int, list[int]] = {}
    for answer in answers:
        by_first.setdefault(answer.tokens[0], []).append(answer.tokens[1])
    size = engine.pair.vocab.size
    samples = []
    for first_token, drawn in by_first.items():
        if len(drawn) <= 20:
            continue
        (entry,) = engine.ask([5, 9, first_token], 1, top_logprobs=size).logprobs
        row = np.full(size, -np.inf, dtype=np.float32)
        for token, _, value in entry.top:
            row[token] = value
        exact = sampler.distribution(row)
        samples.append((drawn, {int(t): exact.probability_of(int(t)) for t in exact.ids}))
    assert any(token not in SHARED for _, cells in samples for token in cells)
    assert chi_square_z(*samples) < 4.5


def test_note_reports_how_much_is_shared(files: PairFiles, load: Load) -> None:
    (note,) = load(files).pair.info().notes
    assert note.startswith("Token 400 is 'Ġw139' in the target and 'Ġw139?' in the draft; ")
    assert "of the target's tokens are never drafted, an estimated" in note


EDITS: dict[str, dict[str, int]] = {
    "eos as in base models": {"tokenizer.ggml.eos_token_id": 3},
    "another turn's end": {"tokenizer.ggml.eot_token_id": 3},
    "control tokens as normal ones": {"tokenizer.ggml.token_type": 1},
    "words as user-defined ones": {"tokenizer.ggml.token_type": 4},
}


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "tekken"])
@pytest.mark.parametrize("edit", EDITS)
def test_harmless_differences_change_no_answer(
    edit: str,
    pre: str,
    contextual: Running,
    contextual_files: PairFiles,
    tmp_path: Path,
    load: Load,
) -> None:
    assert contextual_files.draft
    draft = relabelled(Path(contextual_files.draft), pre, tmp_path / "draft.gguf")
    reader = gguf.GGUFReader(draft, "r+")
    for key, value in EDITS[edit].items():
        field = reader.get_field(key)
        assert field is not None
        for part in field.data:
            field.parts[part][:] = value
    engine = load(PairFiles("edited", contextual_files.target, str(draft)))
    for first_token in (3, 77, 191):
        contextual.forget()
        prompt = [first_token, first_token + 5]
        plain = contextual.ask(prompt, 40)
        spec = engine.ask(prompt, 40, speculative=drafting(4))
        assert_alike(contextual_files.target, prompt, spec.tokens, plain.tokens)
        assert spec.done.speculation.accepted > 0


def _sampling(seed: int) -> Sampling:
    return Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
