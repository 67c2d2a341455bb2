"""Embeddings agree with BERT computed in numpy; passes, fairness and refusals are tested too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.engine.llama import NotFinite, gpus, initialise
from localspec.errors import ContextExceeded, InvalidRequest
from localspec.extras.embeddings import engine as embedding
from localspec.extras.embeddings.engine import EmbeddingModel, Encoder, InputPreparer
from localspec.protocol.frames import Embed, EngineSettings, Failed, Frame, PairFiles, Reply, Rerank
from localspec.registry.header.model import read_local_model
from tests.support.encoders import Bert
from tests.support.gguf_files import U32, with_key
from tests.support.pairs import contextual_pair

BERT = Bert.random()
TEXTS = ["the cat sat", "hello, world 42!", "sitting " * 8, "x", "a b c d e f g"]


class ManualEngine:
    """A loaded model and its encoder, which tests drive by hand."""

    def __init__(self, file: Path, longest: int = 0) -> None:
        initialise()
        self.pooling = read_local_model(file).pooling
        files = PairFiles("it", str(file), pooling=self.pooling)
        self.model = EmbeddingModel(files, EngineSettings(), lambda *_: None, longest)
        self.frames: list[Frame] = []
        self.encoder = Encoder(self.model, self.frames.append)
        self.preparer = InputPreparer(self.model)
        self.passes: list[int] = []  # the number of texts in each pass
        encode = self.model.encode

        def counting_encode(texts: Any) -> Any:
            self.passes.append(len(texts))
            return encode(texts)

        self.model.encode = counting_encode  # type: ignore[method-assign]

    def run(self) -> list[Frame]:
        self.frames.clear()
        self.passes.clear()
        while self.encoder.active:
            self.encoder.step()
        return list(self.frames)

    def vectors(self, *inputs: Any, **more: Any) -> list[Any]:
        self.encoder.submit(self.preparer.begin(Embed(1, [*inputs], **more)))
        (reply,) = self.run()
        assert isinstance(reply, Reply)
        return [np.frombuffer(vector, "<f4") for vector in reply.value["vectors"]]


@contextmanager
def open_engine(file: Path, longest: int = 0) -> Iterator[ManualEngine]:
    engine = ManualEngine(file, longest)
    yield engine
    engine.model.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def bert(folder: Path) -> Iterator[ManualEngine]:
    with open_engine(BERT.write(folder / "mean.gguf")) as engine:
        yield engine


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_agree_with_numpy(pooling: str, folder: Path) -> None:
    with open_engine(BERT.write(folder / f"{pooling}-2.gguf", pooling=pooling)) as engine:
        assert engine.pooling == pooling
        for text, vector in zip(TEXTS, engine.vectors(*TEXTS), strict=True):
            assert np.abs(vector - BERT.vector(BERT.tokens(text), pooling)).max() < 1e-3


def test_batch_is_one_pass_and_equals_single_inputs(bert: ManualEngine) -> None:
    together = bert.vectors(*TEXTS)
    assert bert.passes == [len(TEXTS)]
    alone = [bert.vectors(text)[0] for text in TEXTS]
    as_tokens = bert.vectors(*(BERT.tokens(text) for text in TEXTS))
    # A GPU has other kernels for many rows, which round differently.
    rounding = 2e-3 if gpus() else 1e-4
    for batched, single, tokenized in zip(together, alone, as_tokens, strict=True):
        assert np.abs(batched - single).max() < rounding
        assert (batched == tokenized).all()
        assert abs(float((batched.astype(np.float64) ** 2).sum()) - 1) < 1e-6


def test_fewer_dimensions_are_the_first_ones_normalized(bert: ManualEngine) -> None:
    full, raw = bert.vectors(TEXTS[0])[0], bert.vectors(TEXTS[0], normalize=-1)[0]
    (cut,) = bert.vectors(TEXTS[0], dimensions=8)
    assert np.abs(cut - full[:8] / np.linalg.norm(full[:8])).max() < 1e-6
    assert np.abs(full - raw / np.linalg.norm(raw)).max() < 1e-6
    assert abs(float(np.abs(embedding.normalize_vector(raw, 1)).sum()) - 1) < 1e-6
    assert float(np.abs(embedding.normalize_vector(raw, 0)).max()) == pytest.approx(32760)
    with pytest.raises(InvalidRequest, match="128 numbers"):
        bert.preparer.begin(Embed(1, ["x"], dimensions=129))


def test_long_input_is_refused_or_truncated_on_request(bert: ManualEngine) -> None:
    long = "a " * 100
    with pytest.raises(ContextExceeded, match=r"Input 2 has 102 tokens.*at most 64") as caught:
        bert.preparer.begin(Embed(1, ["x", long]))
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (102, 64)
    cut = bert.preparer.begin(Embed(1, [long], truncate=True)).texts[0]
    assert cut == BERT.tokens("a " * 62)
    for wrong in ([len(BERT.words)], [-1]):
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            bert.preparer.begin(Embed(1, [[*wrong]]))
    with pytest.raises(InvalidRequest, match="Input 1 is empty"):
        bert.preparer.begin(Embed(1, [[]]))


def test_large_request_delays_no_small_one_and_can_be_cancelled(bert: ManualEngine) -> None:
    large_request = Embed(1, [[*BERT.tokens("a " * 60)]] * 200)
    bert.encoder.submit(bert.preparer.begin(large_request))
    bert.encoder.submit(bert.preparer.begin(Embed(2, ["x"])))
    bert.frames.clear()
    for _ in range(3):
        bert.encoder.step()
    (reply,) = bert.frames
    assert isinstance(reply, Reply)
    assert reply.id == 2
    assert bert.encoder.cancel(1)
    assert not bert.encoder.cancel(1)
    assert not bert.encoder.active
    assert isinstance(bert.frames[-1], Failed)
    assert bert.frames[-1].code == "cancelled"


def test_interrupted_pass_is_discarded_and_repeated(bert: ManualEngine) -> None:
    vectors_before = bert.vectors(*TEXTS)
    bert.encoder.submit(bert.preparer.begin(Embed(7, [*TEXTS])))
    bert.encoder.interruption.request_left(7)
    bert.frames.clear()
    bert.encoder.step()
    assert not bert.frames
    bert.encoder.interruption.clear()
    (reply,) = bert.run()
    assert isinstance(reply, Reply)
    assert reply.value["vectors"] == [vector.tobytes() for vector in vectors_before]


def test_nan_fails_its_own_request(bert: ManualEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bad = bert.model.encode, BERT.tokens("the")

    def encode(texts: Any) -> Any:
        if bad in texts:
            raise NotFinite("no numbers")
        return plain(texts)

    monkeypatch.setattr(bert.model, "encode", encode)
    bert.encoder.submit(bert.preparer.begin(Embed(1, ["cat", "the"])))
    bert.encoder.submit(bert.preparer.begin(Embed(2, ["cat", "x"])))
    by_id = {frame.id: frame for frame in bert.run() if isinstance(frame, Failed | Reply)}
    assert isinstance(by_id[1], Failed)
    assert isinstance(by_id[2], Reply)


def test_a_reranker_scores_the_documents_as_its_weights_do(folder: Path) -> None:
    with open_engine(BERT.write(folder / "rank.gguf", pooling="rank")) as engine:
        documents = ["hello world", "the cat", "x y z " * 30]
        with pytest.raises(ContextExceeded, match="Document 3, with the query, has"):
            engine.preparer.begin(Rerank(1, "cat", documents))
        inputs = engine.preparer.begin(Rerank(1, "cat", documents, truncate=True))
        engine.encoder.submit(inputs)
        (reply,) = engine.run()
        assert isinstance(reply, Reply)
        query, first_document = BERT.tokens("cat"), BERT.tokens("hello world")
        assert inputs.texts[0][: len(query)] == query
        assert inputs.texts[0][len(query) :][: len(first_document) - 2] == first_document[1:-1]
        assert 40 < len(inputs.texts[2]) <= 64
        expected_scores = [float(BERT.vector(tokens, "rank")[0]) for tokens in inputs.texts]
        assert reply.value["scores"] == pytest.approx(expected_scores, abs=0.02)


def test_decoder_embeds_by_its_last_token_in_passes_of_any_width(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "decoder.gguf"
    target = Path(contextual_pair(folder / "pair").target).read_bytes()
    file.write_bytes(with_key(target, "llama.pooling_type", U32, 3))
    long, short = [number % 400 for number in range(1, 1500, 2)], [5, 6, 7]
    with open_engine(file) as engine:
        assert engine.pooling == "last"
        assert not engine.model.whole
        vectors = engine.vectors(long, short, short[::-1])
        assert engine.passes == [1, 2]
        assert np.abs(vectors[1] - vectors[2]).max() > 1e-3
    monkeypatch.setattr(embedding, "PASS_ROWS", 2048)
    with open_engine(file) as engine:
        for vector, wide in zip(vectors, engine.vectors(long, short, short[::-1]), strict=True):
            assert np.abs(vector - wide).max() < 1e-3
