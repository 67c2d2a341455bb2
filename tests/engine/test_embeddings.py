"""Texts as numbers, beside BERT computed apart in numpy; passes, turns and refusals."""

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
from localspec.extras.embeddings.engine import (
    EmbeddingModel,
    Encoder,
    InputPreparer,
    normalize_vector,
)
from localspec.protocol.frames import (
    Embed,
    EngineSettings,
    Failed,
    Frame,
    PairFiles,
    Reply,
    Rerank,
)
from localspec.registry.header.model import read_local_model
from tests.support.encoders import Bert
from tests.support.gguf_files import U32, with_key
from tests.support.pairs import contextual_pair

BERT = Bert.random()
TEXTS = ["the cat sat", "hello, world 42!", "sitting " * 8, "x", "a b c d e f g"]


class Loaded:
    """A model, and an engine driven by hand."""

    def __init__(self, file: Path, longest: int = 0) -> None:
        initialise()
        self.pooling = read_local_model(file).pooling
        files = PairFiles("it", str(file), pooling=self.pooling)
        self.model = EmbeddingModel(files, EngineSettings(), lambda *_: None, longest)
        self.said: list[Frame] = []
        self.encoder = Encoder(self.model, self.said.append)
        self.preparer = InputPreparer(self.model)
        self.passes: list[int] = []  # texts of each
        plain = self.model.encode

        def counted(texts: Any) -> Any:
            self.passes.append(len(texts))
            return plain(texts)

        self.model.encode = counted  # type: ignore[method-assign]

    def run(self) -> list[Frame]:
        self.said.clear()
        self.passes.clear()
        while self.encoder.active:
            self.encoder.step()
        return list(self.said)

    def vectors(self, *inputs: Any, **more: Any) -> list[Any]:
        self.encoder.submit(self.preparer.begin(Embed(1, [*inputs], **more)))
        (reply,) = self.run()
        assert isinstance(reply, Reply)
        return [np.frombuffer(each, "<f4") for each in reply.value["vectors"]]


@contextmanager
def loaded(file: Path, longest: int = 0) -> Iterator[Loaded]:
    found = Loaded(file, longest)
    yield found
    found.model.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def bert(folder: Path) -> Iterator[Loaded]:
    with loaded(BERT.write(folder / "mean.gguf")) as found:
        yield found


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_the_same_weights_computed_apart(pooling: str, folder: Path) -> None:
    with loaded(BERT.write(folder / f"{pooling}-2.gguf", pooling=pooling)) as found:
        assert found.pooling == pooling
        for text, vector in zip(TEXTS, found.vectors(*TEXTS), strict=True):
            assert np.abs(vector - BERT.vector(BERT.tokens(text), pooling)).max() < 1e-3


def test_a_batch_is_one_pass_and_equals_singles_in_text_and_tokens(bert: Loaded) -> None:
    together = bert.vectors(*TEXTS)
    assert bert.passes == [len(TEXTS)]
    alone = [bert.vectors(each)[0] for each in TEXTS]
    as_tokens = bert.vectors(*(BERT.tokens(each) for each in TEXTS))
    rounding = 2e-3 if gpus() else 1e-4  # a GPU's kernels for few rows and for many round otherwise
    for each, other, third in zip(together, alone, as_tokens, strict=True):
        assert np.abs(each - other).max() < rounding
        assert (each == third).all()
        assert abs(float((each.astype(np.float64) ** 2).sum()) - 1) < 1e-6


def test_fewer_dimensions_are_the_first_ones_made_of_length_1_again(bert: Loaded) -> None:
    whole, raw = bert.vectors(TEXTS[0])[0], bert.vectors(TEXTS[0], normalize=-1)[0]
    (cut,) = bert.vectors(TEXTS[0], dimensions=8)
    assert np.abs(cut - whole[:8] / np.linalg.norm(whole[:8])).max() < 1e-6
    assert np.abs(whole - raw / np.linalg.norm(raw)).max() < 1e-6
    assert abs(float(np.abs(normalize_vector(raw, 1)).sum()) - 1) < 1e-6
    assert float(np.abs(normalize_vector(raw, 0)).max()) == pytest.approx(32760)
    with pytest.raises(InvalidRequest, match="128 numbers"):
        bert.preparer.begin(Embed(1, ["x"], dimensions=129))


def test_an_input_that_is_too_long_is_refused_with_the_limit_or_cut_where_that_is_asked(
    bert: Loaded,
) -> None:
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


def test_a_request_with_many_texts_holds_up_none_with_one_and_can_be_cancelled(
    bert: Loaded,
) -> None:
    many = Embed(1, [[*BERT.tokens("a " * 60)]] * 200)
    bert.encoder.submit(bert.preparer.begin(many))
    bert.encoder.submit(bert.preparer.begin(Embed(2, ["x"])))
    bert.said.clear()
    for _ in range(3):
        bert.encoder.step()
    (reply,) = bert.said
    assert isinstance(reply, Reply)
    assert reply.id == 2
    assert bert.encoder.cancel(1)
    assert not bert.encoder.cancel(1)
    assert not bert.encoder.active
    assert isinstance(bert.said[-1], Failed)
    assert bert.said[-1].code == "cancelled"


def test_of_a_pass_that_is_stopped_nothing_is_kept_and_it_is_made_again(bert: Loaded) -> None:
    before = bert.vectors(*TEXTS)
    bert.encoder.submit(bert.preparer.begin(Embed(7, [*TEXTS])))
    bert.encoder.interruption.request_left(7)
    bert.said.clear()
    bert.encoder.step()
    assert not bert.said
    bert.encoder.interruption.clear()
    (reply,) = bert.run()
    assert isinstance(reply, Reply)
    assert reply.value["vectors"] == [each.tobytes() for each in before]


def test_numbers_that_are_none_fail_their_own_request(
    bert: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, bad = bert.model.encode, BERT.tokens("the")

    def encode(texts: Any) -> Any:
        if bad in texts:
            raise NotFinite("no numbers")
        return plain(texts)

    monkeypatch.setattr(bert.model, "encode", encode)
    bert.encoder.submit(bert.preparer.begin(Embed(1, ["cat", "the"])))
    bert.encoder.submit(bert.preparer.begin(Embed(2, ["cat", "x"])))
    by_id = {each.id: each for each in bert.run() if isinstance(each, Failed | Reply)}
    assert isinstance(by_id[1], Failed)
    assert isinstance(by_id[2], Reply)


def test_a_reranker_scores_the_documents_as_its_weights_do(folder: Path) -> None:
    with loaded(BERT.write(folder / "rank.gguf", pooling="rank")) as found:
        documents = ["hello world", "the cat", "x y z " * 30]
        with pytest.raises(ContextExceeded, match="Document 3, with the query, has"):
            found.preparer.begin(Rerank(1, "cat", documents))
        inputs = found.preparer.begin(Rerank(1, "cat", documents, truncate=True))
        found.encoder.submit(inputs)
        (reply,) = found.run()
        assert isinstance(reply, Reply)
        query, first = BERT.tokens("cat"), BERT.tokens("hello world")
        assert inputs.texts[0][: len(query)] == query
        assert inputs.texts[0][len(query) :][: len(first) - 2] == first[1:-1]
        assert 40 < len(inputs.texts[2]) <= 64
        wanted = [float(BERT.vector(each, "rank")[0]) for each in inputs.texts]
        assert reply.value["scores"] == pytest.approx(wanted, abs=0.02)


def test_a_model_that_could_write_embeds_by_its_last_token_in_passes_of_any_width(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "decoder.gguf"
    target = Path(contextual_pair(folder / "pair").target).read_bytes()
    file.write_bytes(with_key(target, "llama.pooling_type", U32, 3))
    long, short = [each % 400 for each in range(1, 1500, 2)], [5, 6, 7]
    with loaded(file) as found:
        assert found.pooling == "last"
        assert not found.model.whole
        first = found.vectors(long, short, short[::-1])
        assert found.passes == [1, 2]
        assert np.abs(first[1] - first[2]).max() > 1e-3
    monkeypatch.setattr(embedding, "PASS_ROWS", 2048)
    with loaded(file) as found:
        for each, other in zip(first, found.vectors(long, short, short[::-1]), strict=True):
            assert np.abs(each - other).max() < 1e-3
