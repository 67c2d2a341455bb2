"""Which file, and what drafts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.synthetic import Shape, target_cycle, write_model
from localspec.errors import ModelNotFound
from localspec.model_traits import POOLINGS
from localspec.registry.catalogue import Catalogue, CataloguePair, HubFile
from localspec.registry.header import fit
from localspec.registry.header.fit import LoadOptions
from localspec.registry.hub.repository import Reference
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.resolve import PullTarget, decide
from localspec.registry.pulls.resolve import resolve_target as read_wanted
from localspec.registry.store.store import Part, Record, StoredModel
from tests.support.gguf_files import U32, model
from tests.support.hub import TestHub

REPO = "maker/Tiny-8B-GGUF"
SMALL = model(layers=1, filler=30_000, seed=2).data()


@pytest.fixture
def files(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestHub:
    monkeypatch.setenv("HOME", str(tmp_path))
    for quant, filler in (("Q8_0", 800_000), ("Q4_K_M", 400_000), ("Q2_K", 200_000)):
        hub.add(REPO, f"Tiny-8B-{quant}.gguf", model(filler=filler, seed=1).data())
    return hub


def catalogue(**pairs: CataloguePair) -> Catalogue:
    return Catalogue(pairs, {})


def paired(target: str, draft: str) -> CataloguePair:
    return CataloguePair(
        summary="s",
        target=HubFile(repo=target, file="t.gguf"),
        draft=HubFile(repo=draft, file="d.gguf"),
    )


def wanted(**more: object) -> PullTarget:
    return PullTarget(name="w", asked=REPO, target=Reference(repo=REPO), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K_M", "Q2_K", "none"])
def test_the_header_says_what_fits(files: TestHub, puller: Puller, quant: str) -> None:
    """Memory for just this one with its caches at a usual context."""
    offered = {
        each: len(files.files[REPO, f"Tiny-8B-{each}.gguf"].data)
        for each in ("Q8_0", "Q4_K_M", "Q2_K")
    }
    like = puller.look(HubFile(repo=REPO, file="Tiny-8B-Q8_0.gguf")).model
    beside = fit.total_need(like, None, LoadOptions(context=like.context)) - like.weights
    room = offered.get(quant, 0) + beside
    puller.memory = lambda: fit.FreeMemory(room)
    found = decide(puller, wanted(no_draft=True), catalogue())
    taken = quant if quant in offered else "Q2_K"
    assert found.pair.target.file == f"Tiny-8B-{taken}.gguf"
    assert [(each.quant, each.taken) for each in found.offers] == [
        (each, each == taken) for each in offered
    ]
    fits = {each.quant: each.fits for each in found.offers}
    room = offered.get(quant, 0)
    assert fits == {each: "yes" if size <= room else "no" for each, size in offered.items()}


def test_drafts_of_the_catalogue_are_tried_by_likeness_and_must_match(
    files: TestHub, puller: Puller, tmp_path: Path
) -> None:
    write_model(tmp_path / "alien.gguf", Shape(1, 64, 128, 4, 300), target_cycle(300))
    files.add("maker/alien", "d.gguf", (tmp_path / "alien.gguf").read_bytes())
    files.add("maker/large", "d.gguf", model(filler=500_000, seed=3).data())
    files.add("maker/small", "d.gguf", SMALL)
    known = catalogue(
        other=paired("maker/Big-8B", "maker/small"),
        family=paired("maker/Tiny-14B-GGUF", "maker/small"),
        gone=paired("maker/tiny-8b", "maker/gone"),
        alien=paired("else/Tiny-8B", "maker/alien"),
    )
    found = decide(puller, wanted(), known)
    assert found.pair.draft == HubFile(repo="maker/small", file="d.gguf")
    assert found.said == ("Draft: maker/small/d.gguf, which the catalogue lists for family.",)
    found = decide(puller, wanted(), catalogue(same=paired("maker/Tiny-8B", "maker/large")))
    assert found.pair.draft is None, "as large as the target"


def test_files_of_other_programs_are_looked_through_only_where_it_is_allowed(
    files: TestHub, puller: Puller, tmp_path: Path
) -> None:
    place = tmp_path / ".lmstudio" / "models" / "d.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(SMALL)
    found = decide(puller, wanted(), catalogue())
    assert found.pair.draft == HubFile(repo="", file=str(place))
    found = decide(puller, wanted(whole_disk=False), catalogue())
    assert found.pair.draft is None
    assert not any("d.gguf" in sentence for sentence in found.said)


def test_an_embedding_model_gets_no_draft_and_is_for_embeddings(
    hub: TestHub, puller: Puller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for pooling, role in ((3, "embed"), (4, "rerank")):
        file = model().put("llama.pooling_type", U32, pooling)
        file.tensors.append(("cls.output.weight", (8, 1), 0))
        hub.add(REPO, "Tiny-8B-Q8_0.gguf", file.data())
        found = decide(puller, wanted(), catalogue(same=paired("maker/Tiny-8B", "maker/small")))
        assert (found.pair.roles, found.pair.draft, found.said) == ((role,), None, ())
        record = puller.pull(f"it-{role}", found.pair)
        assert (record.roles, record.target.pooling) == ((role,), POOLINGS[pooling - 1])
        assert record.kind == "none"


def test_what_was_decided_is_not_decided_anew(files: TestHub, puller: Puller) -> None:
    pair = paired("a/b", "c/d")
    assert decide(puller, wanted(pair=pair, decided=True), catalogue()).pair is pair
    assert not files.requests


def blob(part: Part) -> Path:
    return Path("/blobs", part.sha256)


def test_a_pair_that_has_left_the_catalogue_is_pulled_from_where_it_came() -> None:
    """So that what is damaged of it can be mended."""
    part = Part(file="big.gguf", size=1, sha256="0" * 64)
    stored = StoredModel(parts=(part,), architecture="llama", repo="own/big")
    # A draft that was a file of the store already, for another pair.
    shared = StoredModel(
        parts=(Part(file="small.gguf", size=1, sha256="1" * 64),), architecture="llama"
    )
    record = Record(name="tiny", target=stored, draft=shared)
    found = read_wanted("Tiny", Catalogue({}, {}), {"tiny": record}.get, blob)
    assert found.name == "tiny"
    assert found.pair is not None
    assert found.pair.draft is not None
    assert (found.pair.target.repo, found.pair.target.file) == ("own/big", "big.gguf")
    assert (found.pair.draft.repo, found.pair.draft.file) == ("", f"/blobs/{'1' * 64}")
    own = msgspec.structs.replace(record, source="own")
    with pytest.raises(ModelNotFound):
        read_wanted("tiny", Catalogue({}, {}), {"tiny": own}.get, blob)
