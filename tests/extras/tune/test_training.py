"""Training of drafts: the fit, the file that is written, and the process that does both."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import gguf
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import TINY_TARGET, follow, target_cycle
from benchmarks.synthetic_eagle import write_eagle
from benchmarks.synthetic_heads import Architecture as HeadsArchitecture
from benchmarks.synthetic_heads import write_heads, write_heads_apart
from benchmarks.synthetic_targets import (
    LayerReader,
    TargetArchitecture,
    write_layer_reader,
    write_target,
)
from localspec.children import engine_environment
from localspec.engine.llama import initialise, quantization
from localspec.errors import LoadFailed, LocalspecError
from localspec.extras.tune import correction, model_file, training
from localspec.extras.tune.job import Job
from localspec.extras.tune.lessons import (
    Lesson,
    count_hits,
    mean_tokens_per_pass,
    read_lessons,
    select_own,
)
from localspec.extras.tune.model_file import EMBEDDINGS, OUTPUT, ModelFile, write_model
from localspec.extras.tune.reading import SidecarReader, TextReader
from localspec.extras.tune.states import StateReader
from localspec.protocol.frames import PairFiles
from localspec.protocol.tuned import NEW_DRAFT
from localspec.registry.header.gguf import TENSOR_TYPES
from tests.support.pairs import N_VOCAB, cycle_pair
from tests.support.running import GREEDY, drafting, running

BUILTIN = Path(training.__file__).parents[2] / "builtin"
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="this installation has no extra tune, with PyTorch"
)


def lesson_of(tokens: list[int], answer: int = 1) -> Lesson:
    """Return a lesson whose labels are the text's own tokens."""
    top = np.array(tokens[answer:], np.int64)[:, None]
    return Lesson("ask", tokens[:-1], answer, answer - 1, top, np.ones(top.shape, np.float32))


def hits_of(path: Path | str, lessons: list[Lesson]) -> float:
    """Return the share of the lessons' tokens that a model predicts."""
    reader = TextReader(path, 1)
    try:
        return float(np.concatenate(count_hits(reader, lessons)).mean())
    finally:
        reader.close()


def job_of(folder: Path, **values: Any) -> Job:
    return Job(
        **{
            "target": str(folder / "target.gguf"),
            "draft": str(folder / "draft.gguf"),
            "output": str(folder / "new.gguf"),
            "texts": [],
            "held_out": [],
            "seconds": 1e6,
            "threads": 1,
            **values,
        }
    )


def cycle_lessons(count: int) -> list[Lesson]:
    cycle = target_cycle(N_VOCAB)
    return [lesson_of([first, *follow(cycle, first, 40)]) for first in range(0, 8 * count, 8)]


def random_positions(
    generator: np.random.Generator, rows: np.ndarray, n: int
) -> correction.Positions:
    states = generator.normal(size=(n, rows.shape[1])).astype(np.float32)
    labels = (states @ rows.T).argmax(1)
    rest = generator.normal(size=n).astype(np.float32) - 3
    return correction.Positions(states, labels, rest)


def test_the_gradient_is_that_of_the_loss() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(5, 4)).astype(np.float32)
    positions = random_positions(generator, rows, 7)
    _, gradient = correction._loss(rows, positions)
    for index in np.ndindex(rows.shape):
        step = np.zeros_like(rows)
        step[index] = 1e-2
        above, below = (correction._loss(rows + sign * step, positions)[0] for sign in (1, -1))
        assert (above - below) / 2e-2 == pytest.approx(gradient[index], abs=2e-3)


def test_a_fit_finds_the_rows_that_wrote_the_texts() -> None:
    generator = np.random.default_rng(1)
    right = generator.normal(size=(20, 16)).astype(np.float32)
    wrong = right + generator.normal(size=right.shape).astype(np.float32)
    learned, unseen = (random_positions(generator, right, n) for n in (4000, 1000))
    fitted = correction.fit_rows(wrong, learned, unseen[:500], lambda _: True)
    judged = unseen[500:]
    before, after = (
        np.mean((judged.states @ rows.T).argmax(1) == judged.labels) for rows in (wrong, fitted)
    )
    assert before < 0.7 < 0.9 < after


def test_what_the_target_has_not_read_of_texts_of_others_is_not_learned(tmp_path: Path) -> None:
    initialise()
    pair = cycle_pair(tmp_path)
    own, other = cycle_lessons(2)
    other = replace(other, is_own=False)
    teacher = TextReader(pair.target, 1)
    lessons = [own, other, other, own]
    taught = read_lessons(teacher, lessons, lambda count: count < 2)
    teacher.close()
    assert [(len(lesson.shares[0]) > 1, lesson.is_own) for lesson in taught] == [
        (True, True),
        (True, False),
    ]
    assert select_own(lessons[2:]) == [own]


def test_a_fit_that_does_not_help_changes_nothing() -> None:
    """The texts to learn from have random labels, and the rows are right for the others."""
    generator = np.random.default_rng(2)
    right = generator.normal(size=(20, 16)).astype(np.float32)
    learned, unseen = (random_positions(generator, right, 500) for _ in range(2))
    learned.labels[:] = generator.integers(0, 20, 500)
    assert correction.fit_rows(right, learned, unseen, lambda _: True) is right


@pytest.mark.parametrize("allowed", [0, 1, 33, 70])
def test_a_fit_ends_when_its_time_is_over(allowed: int) -> None:
    """With the best rows until then, in the middle of an epoch, too."""
    generator = np.random.default_rng(1)
    right = generator.normal(size=(20, 16)).astype(np.float32)
    wrong = right + generator.normal(size=right.shape).astype(np.float32)
    learned, unseen = (random_positions(generator, right, n) for n in (4000, 1000))
    calls: list[float] = []

    def go_on(epoch: float) -> bool:
        calls.append(epoch)
        return len(calls) <= allowed

    fitted = correction.fit_rows(wrong, learned, unseen, go_on)
    assert len(calls) == allowed + 1
    assert calls == pytest.approx([call / 32 for call in range(allowed + 1)])
    before, after = (correction._mean_loss(rows, unseen) for rows in (wrong, fitted))
    assert after < before if allowed else after == before


def test_rows_are_fitted_within_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few texts as possible are read where there is no time: one to learn from, and one to compare."""
    initialise()
    pair = cycle_pair(tmp_path, 0.3)
    assert pair.draft is not None
    read: list[int] = []
    texts = TextReader.read

    def count(reader: TextReader, tokens: list[int], first: int) -> Any:
        read.append(len(tokens))
        return texts(reader, tokens, first)

    monkeypatch.setattr(TextReader, "read", count)
    training._train_rows(job_of(tmp_path, seconds=1e-9), cycle_lessons(40))
    assert len(read) == 2
    assert ModelFile(tmp_path / "new.gguf").names


def replay(hits: list[bool], depth: int) -> int:
    """Return the passes of one answer, token by token."""
    passes = position = 0
    while position < len(hits):
        passes += 1
        drafted = 0
        while drafted < depth and position < len(hits) and hits[position]:
            drafted, position = drafted + 1, position + 1
        position += 1  # the target's own token
    return passes


@given(st.lists(st.lists(st.booleans(), max_size=30), max_size=5), st.integers(1, 6))
def test_tokens_per_pass_are_those_of_a_replay(answers: list[list[bool]], depth: int) -> None:
    passes = sum(replay(answer, depth) for answer in answers)
    expected = sum(map(len, answers)) / passes if passes else 0.0
    assert mean_tokens_per_pass([np.array(a, bool) for a in answers], depth) == expected


def test_a_copy_differs_in_nothing_but_what_was_changed(tmp_path: Path) -> None:
    file, path = ModelFile(BUILTIN / "draft.gguf"), tmp_path / "copy.gguf"
    matrix = file.read_tensor(EMBEDDINGS)
    matrix[7] *= 2
    file.write_copy(path, {OUTPUT: matrix})
    copy = ModelFile(path)
    assert set(copy.names) == {*file.names, OUTPUT}
    for name in file.names:
        assert np.array_equal(copy.read_tensor(name), file.read_tensor(name))
    difference = np.abs(copy.read_tensor(OUTPUT) - matrix).max(1)
    assert difference.max() <= np.abs(matrix).max() / 127
    assert gguf_values(path) == gguf_values(BUILTIN / "draft.gguf")


def gguf_values(path: Path) -> dict[str, Any]:
    """Return the metadata as another reader sees it."""
    fields = gguf.GGUFReader(path).fields.items()
    return {name: field.contents() for name, field in fields if not name.startswith("GGUF.")}


def test_a_copy_without_changes_is_the_same_file(tmp_path: Path) -> None:
    ModelFile(BUILTIN / "draft.gguf").write_copy(tmp_path / "copy.gguf", {})
    assert (tmp_path / "copy.gguf").read_bytes() == (BUILTIN / "draft.gguf").read_bytes()


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.booleans()
        | st.integers(0, 2**32 - 1)
        | st.floats(width=32, allow_nan=False)
        | st.text(max_size=40)
        | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
        max_size=5,
    )
)
def test_a_new_file_says_what_was_written(metadata: dict[str, Any]) -> None:
    initialise()
    generator = np.random.default_rng(len(metadata))
    shapes = {"b.weight": (5, 64), "a.weight": (7,)}
    weights = {
        name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }
    ids = np.array([3, 0, 2**40])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new.gguf"
        write_model(path, metadata, weights, ids)
        file = ModelFile(path)
        for key, value in metadata.items():
            written = file.read_value(key)
            assert (list(written.values()) if isinstance(value, list) else written) == value
        assert np.array_equal(file.read_tensor("a.weight"), weights["a.weight"])
        difference = file.read_tensor("b.weight") - weights["b.weight"]
        assert np.abs(difference).max() <= np.abs(weights["b.weight"]).max() / 127
        theirs = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
        assert theirs.keys() == {"a.weight", "b.weight", "d2t"}
        assert np.array_equal(theirs["d2t"], ids)


def test_a_new_file_has_a_tokenizer(tmp_path: Path) -> None:
    initialise()
    target = ModelFile(BUILTIN / "target.gguf")
    write_model(tmp_path / "new.gguf", target.tokenizer, {}, np.array([0]))
    assert ModelFile(tmp_path / "new.gguf").tokenizer == target.tokenizer


def test_rows_of_a_small_vocabulary_are_the_tokens_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    write_eagle(path, TINY_TARGET, target_cycle(N_VOCAB), n_known=300)
    assert np.array_equal(ModelFile(path).read_output_tokens(), np.arange(300))


@given(st.lists(st.integers(0, N_VOCAB - 1), max_size=20))
def test_some_rows_of_a_matrix_are_those_of_all(rows: list[int]) -> None:
    file = ModelFile(BUILTIN / "draft.gguf")
    chosen = file.read_rows(EMBEDDINGS, np.array(rows, np.int64))
    assert np.array_equal(chosen, file.read_tensor(EMBEDDINGS)[rows])


@pytest.mark.parametrize("kind", sorted(set(TENSOR_TYPES) & set(gguf.GGML_QUANT_SIZES)))
def test_values_are_those_of_another_reader(kind: int) -> None:
    """Random bytes are read by both; what can be written comes back nearly as it was."""
    initialise()
    _, block, block_size = TENSOR_TYPES[kind]
    generator = np.random.default_rng(kind)
    values = generator.normal(size=(3, 512)).astype(np.float32)
    written = quantization.choose_type(kind)
    data = quantization.quantize(values, written)
    error = np.abs(quantization.dequantize(data, written, values.size) - values.ravel()).mean()
    assert error < 0.4
    if written == kind:
        theirs = gguf.dequantize(data, gguf.GGMLQuantizationType(kind)).ravel()
        ours = quantization.dequantize(data, kind, values.size)
        assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="another number of bytes"):
        quantization.dequantize(data[:-1], written, values.size)
    zeros = np.zeros(values.size // block * block_size, np.uint8)
    has_weights = TENSOR_TYPES[kind][0] not in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")
    with nullcontext() if has_weights else pytest.raises(LoadFailed, match="has no weights"):
        assert len(quantization.dequantize(zeros, kind, values.size)) == values.size


@pytest.mark.parametrize("acceptance", [0.3, 0.7])
def test_rows_of_a_wrong_draft_are_made_right(tmp_path: Path, acceptance: float) -> None:
    initialise()
    pair = cycle_pair(tmp_path, acceptance)
    lessons = cycle_lessons(40)
    assert pair.draft is not None
    training._train_rows(job_of(tmp_path), lessons)
    before, after = (hits_of(path, lessons) for path in (pair.draft, tmp_path / "new.gguf"))
    assert before == pytest.approx(acceptance, abs=0.15)
    assert after > 0.95


def write_sidecar(folder: Path, kind: str) -> PairFiles:
    """Return a target that follows the cycle, with a sidecar that is right about a third of the tokens."""
    target, sidecar = folder / "target.gguf", folder / "draft.gguf"
    cycle = target_cycle(N_VOCAB)
    if kind == "mtp":
        write_heads_apart(target, sidecar, architecture="qwen35", acceptance=0.3)
    else:
        shape = replace(TINY_TARGET, n_embd=128, n_ctx=2048)  # wide enough for blocks
        write_target(target, shape, cycle, "llama")
        write_layer_reader(sidecar, cast(LayerReader, kind), shape, cycle, 0.3)
    return PairFiles("wrong", str(target), str(sidecar))


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash"])
def test_rows_of_a_wrong_sidecar_are_made_right(tmp_path: Path, kind: str) -> None:
    """The drafts that answers get are right, not only those that the training reads."""
    initialise()
    files = write_sidecar(tmp_path, kind)
    training._train_rows(job_of(tmp_path), cycle_lessons(64))
    assert_made_right(files, tmp_path / "new.gguf")


@pytest.mark.parametrize("architecture", get_args(HeadsArchitecture))
def test_rows_of_wrong_heads_in_the_file_of_the_target_are_made_right(
    tmp_path: Path, architecture: HeadsArchitecture
) -> None:
    initialise()
    target = write_heads(tmp_path / "target.gguf", acceptance=0.3, architecture=architecture)
    job = job_of(tmp_path, draft="", scratch=str(tmp_path))
    with training._heads_apart(job) as job:
        training._check_possible(job)
        heads = ModelFile(Path(job.draft))
        assert heads.is_sidecar
        assert set(heads.names) < set(ModelFile(target).names)
        training._train_rows(job, cycle_lessons(64))
    assert not Path(job.draft).exists()
    assert_made_right(PairFiles("heads", str(target), None), tmp_path / "new.gguf")


def test_a_target_without_heads_has_none_to_train(tmp_path: Path) -> None:
    cycle_pair(tmp_path)
    job = job_of(tmp_path, draft="", scratch=str(tmp_path))
    with training._heads_apart(job) as job, pytest.raises(LocalspecError, match="has no heads"):
        training._check_possible(job)


def assert_made_right(files: PairFiles, tuned: Path) -> None:
    """Check that a draft that was right about a third of the tokens is right about more than nine tenths."""
    accepted = {}
    for draft in (files.draft, str(tuned)):
        with running(PairFiles("pair", files.target, draft)) as engine:
            assert engine.pair.drafter is not None
            rule = drafting(3, engine.pair.drafter.kind)
            answers = [engine.ask([token], 40, GREEDY, rule) for token in range(3, 80, 8)]
            assert all(
                answer.tokens == follow(target_cycle(N_VOCAB), token, 40)
                for answer, token in zip(answers, range(3, 80, 8), strict=True)
            )
            figures = [answer.done.speculation for answer in answers]
            accepted[draft] = sum(f.accepted for f in figures) / sum(f.drafted for f in figures)
    assert accepted[files.draft] < 0.4
    assert accepted[str(tuned)] > 0.9


def test_a_sidecar_whose_logits_do_not_come_from_its_matrix_is_refused(tmp_path: Path) -> None:
    """DSpark adds what the token before says; here it says everything."""
    initialise()
    write_sidecar(tmp_path, "dspark")
    with pytest.raises(correction.NotLinear):
        training._train_rows(job_of(tmp_path), cycle_lessons(4))
    assert not (tmp_path / "new.gguf").exists()


def test_a_draft_whose_logits_are_no_states_times_its_matrix_is_refused(tmp_path: Path) -> None:
    initialise()
    pair = cycle_pair(tmp_path)
    assert pair.draft is not None
    matrix = ModelFile(Path(pair.draft)).read_tensor(OUTPUT)
    tokens = np.arange(len(matrix))
    reader = TextReader(pair.draft, 1)
    for states in (matrix, np.random.default_rng(0).permutation(matrix)):
        wrong = states is not matrix
        with pytest.raises(correction.NotLinear) if wrong else nullcontext():
            correction.collect_positions(
                reader, cycle_lessons(1), states, tokens, tokens > 0, lambda _: True
            )
    reader.close()


@needs_torch
@pytest.mark.parametrize("acceptance", [0.3, 0.7])
def test_all_weights_of_a_wrong_draft_are_made_right(tmp_path: Path, acceptance: float) -> None:
    initialise()
    pair = cycle_pair(tmp_path, acceptance)
    lessons = cycle_lessons(40)
    assert training._train_draft(job_of(tmp_path), lessons) == "all weights"
    assert pair.draft is not None
    assert hits_of(pair.draft, lessons) < 0.9
    assert hits_of(tmp_path / "new.gguf", lessons) > 0.95


def train_new_draft(folder: Path, architecture: TargetArchitecture) -> PairFiles:
    """Return a target that follows the cycle, with a draft that was made for it."""
    initialise()
    target = folder / "target.gguf"
    write_target(target, replace(TINY_TARGET, n_ctx=2048), target_cycle(N_VOCAB), architecture)
    job = job_of(folder, draft="", method="new", scratch=str(folder), seconds=1e6)
    teacher = training._open_teacher(job)
    taught = read_lessons(teacher, cycle_lessons(64), lambda _count: True)
    teacher.close()
    assert training._make_draft(job, teacher, taught) == NEW_DRAFT
    assert {path.name for path in folder.iterdir()} == {"target.gguf", "new.gguf"}
    return PairFiles(architecture, str(target), str(folder / "new.gguf"))


@needs_torch
@pytest.mark.parametrize("architecture", get_args(TargetArchitecture))
def test_a_new_draft_predicts_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: TargetArchitecture
) -> None:
    """Most of its drafts in a row are accepted, in answers that begin where no lesson did."""
    from localspec.extras.tune import steps

    monkeypatch.setattr(steps, "is_bfloat16_faster", lambda _device: False)
    with running(train_new_draft(tmp_path, architecture)) as engine:
        assert engine.pair.drafter is not None
        answers = {
            first: engine.ask([first], 40, GREEDY, drafting(3, "eagle3"))
            for first in range(3, 80, 8)
        }
    for first, answer in answers.items():
        assert answer.tokens == follow(target_cycle(N_VOCAB), first, 40)
    figures = [answer.done.speculation for answer in answers.values()]
    assert sum(f.accepted for f in figures) > 0.8 * sum(f.drafted for f in figures)


@pytest.mark.parametrize("method", ["new", "weights"])
def test_what_cannot_be_trained_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    initialise()
    cycle_pair(tmp_path)
    job = job_of(tmp_path, method=method, scratch=str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(LocalspecError, match="trained with PyTorch, which is not installed; run: "):
        training.train(job)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    part = tmp_path / "part.gguf"
    write_model(
        part, {"general.architecture": "llama"}, {"a": np.zeros(2, np.float32)}, np.array([0])
    )
    with pytest.raises(LocalspecError, match="several files") if method == "new" else nullcontext():
        training._check_possible(job_of(tmp_path, method=method, target=str(part)))


def random_layer(n_layers: int, width: int = 64, n_vocab: int = N_VOCAB) -> Any:
    """Return a layer with random weights, in which each of them matters."""
    from localspec.extras.tune import eagle

    generator = np.random.default_rng(0)
    shape = eagle.EagleShape(width, (1,) * n_layers)
    sizes = {
        "fc": (width, n_layers * width),
        "output": (n_vocab, width),
        "blk.0.attn_q": (width, 2 * width),
        "blk.0.attn_k": (shape.n_head_kv * shape.head_length, 2 * width),
        "blk.0.attn_v": (shape.n_head_kv * shape.head_length, 2 * width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_gate": (shape.n_ff, width),
        "blk.0.ffn_up": (shape.n_ff, width),
        "blk.0.ffn_down": (width, shape.n_ff),
        **{f"blk.0.{norm}": (width,) for norm in ("attn_norm", "attn_norm_2", "ffn_norm")},
        "output_norm": (width,),
    }
    weights = {
        f"{name}.weight": generator.normal(1.0 * (len(size) == 1), size[-1] ** -0.5, size)
        for name, size in sizes.items()
    }
    tensors = {name: eagle.torch.tensor(x.astype(np.float32)) for name, x in weights.items()}  # type: ignore[attr-defined]
    return eagle.EagleLayer(shape, np.arange(n_vocab), tensors)


@needs_torch
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_new_draft_computes_what_llama_cpp_computes(
    tmp_path: Path, architecture: TargetArchitecture
) -> None:
    from localspec.extras.tune import eagle

    initialise()
    target, sidecar = tmp_path / "target.gguf", tmp_path / "new.gguf"
    write_target(target, TINY_TARGET, target_cycle(N_VOCAB), architecture)
    layer, file = random_layer(3), ModelFile(target)
    layers = (2, 2, 2) if architecture == "qwen2" else (0, 1, 1)
    layer.shape = replace(layer.shape, layers=layers)
    layer.write(sidecar, file)
    layer = eagle.EagleLayer.open(sidecar)  # as it was quantized
    assert layer.shape.layers == layers
    reader = SidecarReader(target, sidecar, 1)
    tokens = follow(target_cycle(N_VOCAB), 7, 24)
    theirs = np.concatenate(list(reader.read(tokens, 8)))
    states = reader._read_target(tokens)
    reader.close()
    tensor = eagle.torch.tensor  # type: ignore[attr-defined]
    embeddings = tensor(file.read_rows(EMBEDDINGS, np.array(tokens)))[None]
    ours = (
        layer.logits(layer.unroll(embeddings, tensor(states)[None], 1)[0])[0, 8:].detach().numpy()
    )
    shifted = layer.unroll(embeddings, tensor(np.roll(states, 1, 0))[None], 1)[0]
    wrong = layer.logits(shifted)[0, 8:].detach().numpy()
    assert np.abs(ours - theirs).max() < 0.1 * theirs.std() < np.abs(wrong - theirs).max()


@needs_torch
def test_drafts_in_a_row_follow_from_the_states_of_those_before() -> None:
    """Where the states of earlier drafts take the place of the target's, one draft is the last of the row."""
    from localspec.extras.tune import eagle

    torch, layer, length = eagle.torch, random_layer(1), 12  # type: ignore[attr-defined]
    layer.weights["fc.weight"] = torch.eye(64)
    generator = torch.Generator().manual_seed(1)
    embeddings, states = (torch.randn(1, length, 64, generator=generator) for _ in range(2))
    rows = layer.unroll(embeddings, states, 4)
    for last in range(5, length):
        for count in range(1, 4):
            replaced = states.clone()
            for draft in range(count):
                at = last - count + draft
                replaced[0, at] = layer.unroll(embeddings, replaced, 1)[0][0, at]
            alone = layer.unroll(embeddings, replaced, 1)[0][0, last]
            assert torch.allclose(alone, rows[count][0, last], rtol=1e-3, atol=1e-3)
            assert not torch.allclose(alone, rows[count - 1][0, last], rtol=1e-2, atol=1e-2)


@needs_torch
def test_a_step_without_a_finite_gradient_is_left_out() -> None:
    from localspec.extras.tune import steps

    torch = steps.torch  # type: ignore[attr-defined]
    weight = torch.ones(1, requires_grad=True)
    factors = iter([np.inf, 1.0, np.nan] * 20)
    steps.run_steps(
        torch.optim.Adam([weight], lr=0.1),
        [weight],
        60,
        1e6,
        1,
        lambda: (weight * next(factors)).sum(),
        lambda _done: None,
    )
    assert 0 < weight.item() < 0.5


def test_states_that_half_precision_does_not_hold_stay_finite(tmp_path: Path) -> None:
    initialise()
    write_target(tmp_path / "target.gguf", TINY_TARGET, target_cycle(N_VOCAB))
    reader = StateReader(str(tmp_path / "target.gguf"), 1, str(tmp_path))
    reader._context.states = lambda *_: np.full((40, 192), -1e9, np.float32)  # type: ignore[method-assign]
    taught = read_lessons(reader, cycle_lessons(1), lambda _count: True)
    reader.close()
    (window,) = reader.windows(taught)
    assert np.isfinite(window.states).all()
    assert window.states.min() < -6e4


def test_texts_that_are_too_short_are_an_error(tmp_path: Path) -> None:
    initialise()
    write_target(tmp_path / "target.gguf", TINY_TARGET, target_cycle(N_VOCAB))
    for lessons in ([], [lesson_of([3, 4, 5])]):
        reader = StateReader(str(tmp_path / "target.gguf"), 1, str(tmp_path))
        taught = read_lessons(reader, lessons, lambda _count: True)
        reader.close()
        with pytest.raises(LoadFailed, match="too short"):
            reader.windows(taught)


def write_with_divisors(path: Path) -> None:
    """Write the built-in draft with divisors of its angles as Llama 3.1 has them, but of a short context."""
    file = ModelFile(BUILTIN / "draft.gguf")
    width = int(file.read_value("llama.rope.dimension_count"))
    base = float(file.read_value("llama.rope.freq_base", 10000.0))
    wavelengths = 2 * np.pi * base ** (np.arange(0, width, 2) / width)
    share = np.clip((256 / wavelengths - 1) / 3, 0, 1)
    divisors = (1 / ((1 - share) / 32 + share)).astype(np.float32)
    assert divisors.min() < 2 < divisors.max()
    start = bytearray(file._bytes[: file._header.table_offset])
    rows = [
        model_file._Row(name, tensor.shape, tensor.kind, file._read_bytes(tensor))
        for name, tensor in file._tensors.items()
    ]
    rows.append(
        model_file._Row(
            "rope_freqs.weight", divisors.shape, model_file._F32, divisors.view(np.uint8)
        )
    )
    struct.pack_into("<Q", start, model_file._COUNT_OFFSET, len(rows))
    model_file._write(path, start, rows, file._alignment)


@needs_torch
@pytest.mark.parametrize("has_divisors", [False, True])
def test_the_decoder_computes_what_llama_cpp_computes(tmp_path: Path, has_divisors: bool) -> None:
    from localspec.extras.tune import network

    initialise()
    path = BUILTIN / "draft.gguf"
    if has_divisors:
        path = tmp_path / "draft.gguf"
        write_with_divisors(path)
    tokens = [100 + number * 7 % 300 for number in range(400)]
    decoder = network.Decoder(ModelFile(path))
    ours = decoder.logits(decoder(network.torch.tensor([tokens])))[0].detach().numpy()  # type: ignore[attr-defined]
    reader = TextReader(path, 1)
    theirs = np.concatenate(list(reader.read(tokens, 0)))
    reader.close()
    assert np.abs(ours - theirs).mean() < 0.03 * theirs.std()


@needs_torch
def test_divisors_of_angles_are_not_trained(tmp_path: Path) -> None:
    from localspec.extras.tune import network

    initialise()
    write_with_divisors(tmp_path / "draft.gguf")
    file = ModelFile(tmp_path / "draft.gguf")
    decoder = network.Decoder(file)
    network.train_decoder(decoder, cycle_lessons(2), 0.5, 1, lambda _done: None)
    file.write_copy(tmp_path / "new.gguf", decoder.values())
    new = ModelFile(tmp_path / "new.gguf")
    for name in file.names:
        is_same = np.array_equal(new.read_tensor(name), file.read_tensor(name))
        assert is_same is (name == "rope_freqs.weight"), name


@needs_torch
def test_a_draft_that_turns_a_part_of_each_head_is_of_another_kind(tmp_path: Path) -> None:
    from localspec.extras.tune import network

    initialise()
    path = tmp_path / "draft.gguf"
    path.write_bytes((BUILTIN / "draft.gguf").read_bytes())
    field = gguf.GGUFReader(path, "r+").get_field("llama.rope.dimension_count")
    assert field is not None
    field.parts[field.data[0]][0] //= 2
    with pytest.raises(network.UnknownDecoder):
        network.Decoder(ModelFile(path))


def run_process(job: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code of a training process, and what it wrote."""
    run = subprocess.run(
        [sys.executable, "-m", "localspec.extras.tune.training"],
        input=job,
        capture_output=True,
        env=engine_environment(),
        check=False,
    )
    return run.returncode, [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    ("method", "draft"),
    [
        ("rows", str(BUILTIN / "draft.gguf")),
        pytest.param("new", str(BUILTIN / "draft.gguf"), marks=needs_torch),
        pytest.param("new", "", marks=needs_torch),
    ],
)
def test_a_process_trains_and_compares(tmp_path: Path, method: str, draft: str) -> None:
    text = {
        "kind": "ask",
        "prompt": "<|user|>What is os.walk?<|end|><|assistant|>",
        "answer": "A walk. " * 8,
    }
    place = {"kind": "complete", "prefix": "def f(x):\n    re", "suffix": "\n", "answer": "turn x"}
    job = Job(
        target=str(BUILTIN / "target.gguf"),
        draft=draft,
        output=str(tmp_path / "new.gguf"),
        texts=[text, place] * 4,
        held_out=[text, place],
        seconds=20,
        threads=1,
        method=method,
        scratch=str(tmp_path),
        max_state_bytes=1 << 20,
    )
    code, messages = run_process(msgspec.json.encode(job))
    assert code == 0
    result = messages[-1]["result"]
    assert result["method"] == {"rows": "output rows", "new": NEW_DRAFT}[method]
    assert result["tokens_per_pass"].keys() == {"ask", "complete"}
    assert draft or result["tokens_per_pass"]["ask"]["before"] == 1
    assert (tmp_path / "new.gguf").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["new.gguf"]
    stages = {message["stage"] for message in messages[:-1]}
    assert stages >= {"reading", "training", "comparing the new draft"}


def test_a_damaged_draft_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "draft.gguf").write_bytes(b"no model")
    job = job_of(tmp_path, target=str(BUILTIN / "target.gguf"))
    code, messages = run_process(msgspec.json.encode(job))
    assert code == 1
    assert "draft.gguf is not a usable GGUF file" in messages[-1]["error"]


def test_the_output_matrix_of_a_file(tmp_path: Path) -> None:
    pair = cycle_pair(tmp_path)
    assert pair.draft is not None
    assert ModelFile(Path(pair.draft)).output_name == OUTPUT
    assert ModelFile(BUILTIN / "draft.gguf").output_name == EMBEDDINGS
