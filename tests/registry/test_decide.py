"""Tests of which file of a repository is pulled, and which draft model goes with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.synthetic import Shape, target_cycle, write_model
from benchmarks.synthetic_heads import write_heads, write_heads_apart
from localspec.errors import InvalidRequest, ModelNotFound, NotOnHub
from localspec.model_traits import POOLINGS
from localspec.protocol.pairs import PullRequest
from localspec.registry.catalogue import Catalogue, CataloguePair, HubFile
from localspec.registry.header import fit
from localspec.registry.header.fit import LoadOptions
from localspec.registry.hub.repository import Reference
from localspec.registry.pulls.decide import decide
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.targets import PullTarget, resolve_target
from localspec.registry.store.store import Part, Record, StoredModel
from tests.support.gguf_files import U32, model
from tests.support.hub import TestHub

REPO = "maker/Tiny-8B-GGUF"
WHOLE = Reference(repo=REPO)
SMALL = model(layers=1, filler=30_000, seed=2).data()


@pytest.fixture
def files(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestHub:
    monkeypatch.setenv("HOME", str(tmp_path))
    for quant, filler in (("Q8_0", 800_000), ("Q4_K_M", 400_000), ("Q2_K", 200_000)):
        hub.add(REPO, f"Tiny-8B-{quant}.gguf", model(filler=filler, seed=1).data())
    return hub


def make_pair(target: str, draft: str) -> CataloguePair:
    return CataloguePair(
        summary="s",
        target=HubFile(repo=target, file="t.gguf"),
        draft=HubFile(repo=draft, file="d.gguf"),
    )


def make_target(reference: Reference = WHOLE, **options: object) -> PullTarget:
    return PullTarget(name="w", asked=REPO, target=reference, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K_M", "Q2_K", "none"])
def test_the_largest_file_that_fits_is_chosen(files: TestHub, puller: Puller, quant: str) -> None:
    """Memory has room for exactly one file with its caches at a usual context."""
    offered = {
        name: len(files.files[REPO, f"Tiny-8B-{name}.gguf"].data)
        for name in ("Q8_0", "Q4_K_M", "Q2_K")
    }
    reference = puller.look(HubFile(repo=REPO, file="Tiny-8B-Q8_0.gguf")).model
    overhead = (
        fit.total_need(reference, None, LoadOptions(context=reference.context)) - reference.weights
    )
    room = offered.get(quant, 0) + overhead
    puller.memory = fit.FreeMemory(room)
    decision = decide(puller, make_target(no_draft=True), {})
    chosen = quant if quant in offered else "Q2_K"
    assert decision.pair.target.file == f"Tiny-8B-{chosen}.gguf"
    assert [(name.quant, name.taken) for name in decision.offers] == [
        (name, name == chosen) for name in offered
    ]
    fits = {name.quant: name.fits for name in decision.offers}
    room = offered.get(quant, 0)
    assert fits == {name: "yes" if size <= room else "no" for name, size in offered.items()}


def test_a_draft_of_the_catalogue_is_similar_and_matches(
    files: TestHub, puller: Puller, tmp_path: Path
) -> None:
    write_model(tmp_path / "alien.gguf", Shape(1, 64, 128, 4, 300), target_cycle(300))
    files.add("maker/alien", "d.gguf", (tmp_path / "alien.gguf").read_bytes())
    files.add("maker/large", "d.gguf", model(filler=500_000, seed=3).data())
    files.add("maker/small", "d.gguf", SMALL)
    pairs = {
        "other": make_pair("maker/Big-8B", "maker/small"),
        "family": make_pair("maker/Tiny-14B-GGUF", "maker/small"),
        "gone": make_pair("maker/tiny-8b", "maker/gone"),
        "alien": make_pair("else/Tiny-8B", "maker/alien"),
    }
    decision = decide(puller, make_target(), pairs)
    assert decision.pair.draft == HubFile(repo="maker/small", file="d.gguf")
    assert decision.said == ("Draft: maker/small/d.gguf, which the catalogue lists for family.",)
    decision = decide(puller, make_target(), {"same": make_pair("maker/Tiny-8B", "maker/large")})
    assert decision.pair.draft is None, "as large as the target"


def test_other_programs_files_are_searched_only_when_allowed(
    files: TestHub, puller: Puller, tmp_path: Path
) -> None:
    place = tmp_path / ".lmstudio" / "models" / "d.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(SMALL)
    decision = decide(puller, make_target(), {})
    assert decision.pair.draft == HubFile(repo="", file=str(place))
    decision = decide(puller, make_target(whole_disk=False), {})
    assert decision.pair.draft is None
    assert not any("d.gguf" in sentence for sentence in decision.said)


def test_an_embedding_model_gets_no_draft_and_is_for_embeddings(
    hub: TestHub, puller: Puller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for pooling, role in ((3, "embed"), (4, "rerank")):
        file = model().put("llama.pooling_type", U32, pooling)
        file.tensors.append(("cls.output.weight", (8, 1), 0))
        hub.add(REPO, "Tiny-8B-Q8_0.gguf", file.data())
        decision = decide(
            puller, make_target(), {"same": make_pair("maker/Tiny-8B", "maker/small")}
        )
        assert (decision.pair.roles, decision.pair.draft, decision.said) == ((role,), None, ())
        record = puller.pull(f"it-{role}", decision.pair)
        assert (record.roles, record.target.pooling) == ((role,), POOLINGS[pooling - 1])
        assert record.kind == "none"


def test_a_repository_that_has_only_drafts_is_no_model(hub: TestHub, puller: Puller) -> None:
    hub.add(REPO, "Tiny-8B-MTP-ONLY-Q8_0.gguf", b"heads")
    hub.add(REPO, "dflash-kquant.gguf", b"a draft")
    with pytest.raises(NotOnHub, match=r"no model, .* \(DFlash and MTP heads\).* --draft"):
        decide(puller, make_target(), {})


def test_a_path_is_pulled_from_its_own_folder(hub: TestHub, puller: Puller) -> None:
    contents = {
        f"{folder}/Tiny (1)+x [y].Q8_0.gguf": model(filler=5000, seed=seed).data()
        for seed, folder in enumerate(("v 1", "v2", "v3"))
    }
    for file, content in contents.items():
        hub.add(REPO, file, content)
    names = set()
    for file, content in contents.items():
        wanted = resolve_target(
            PullRequest(f"{REPO}:{file}", no_draft=True),
            Catalogue({}, {}),
            lambda _: None,
            blob_path,
        )
        record = puller.pull(wanted.name, decide(puller, wanted, {}).pair)
        assert record.target.file == file
        assert puller.store.model_path(record.target).read_bytes() == content
        names.add(record.name)
    assert len(names) == 3


def test_a_model_and_the_same_with_heads_are_asked_about(
    hub: TestHub, puller: Puller, tmp_path: Path
) -> None:
    """Heads alone beside the model, under the same name, are its draft."""
    repo = "maker/Qwythos-9B-GGUF"
    write_heads_apart(tmp_path / "model", tmp_path / "heads", architecture="qwen35")
    write_heads(tmp_path / "with heads", architecture="qwen35")
    hub.add(repo, "Qwythos-9B-Q6_K.gguf", (tmp_path / "model").read_bytes())
    for content, is_asked in (("with heads", True), ("heads", False)):
        hub.add(repo, "Qwythos-9B-MTP-Q6_K.gguf", (tmp_path / content).read_bytes())
        for quant in ("", "Q6_K"):
            wanted = make_target(reference=Reference(repo=repo, quant=quant))
            if is_asked:
                with pytest.raises(InvalidRequest, match=r"Qwythos-9B-MTP-Q6_K.gguf.*example"):
                    decide(puller, wanted, {})
            else:
                pair = decide(puller, wanted, {}).pair
                assert pair.target.file == "Qwythos-9B-Q6_K.gguf"
                assert pair.sidecar
                assert pair.sidecar.file == "Qwythos-9B-MTP-Q6_K.gguf"


def test_a_decided_pair_is_not_decided_again(files: TestHub, puller: Puller) -> None:
    pair = make_pair("a/b", "c/d")
    assert decide(puller, make_target(pair=pair, decided=True), {}).pair is pair
    assert not files.requests


def blob_path(part: Part) -> Path:
    return Path("/blobs", part.sha256)


def test_a_pair_dropped_from_the_catalogue_keeps_its_source() -> None:
    """This allows damaged files of such a pair to be repaired."""
    part = Part(file="big.gguf", size=1, sha256="0" * 64)
    stored = StoredModel(parts=(part,), architecture="llama", repo="own/big")
    # The draft was already in the store, for another pair.
    shared = StoredModel(
        parts=(Part(file="small.gguf", size=1, sha256="1" * 64),), architecture="llama"
    )
    record = Record(name="tiny", target=stored, draft=shared)
    decision = resolve_target(
        PullRequest("Tiny"), Catalogue({}, {}), {"tiny": record}.get, blob_path
    )
    assert decision.name == "tiny"
    assert decision.pair is not None
    assert decision.pair.draft is not None
    assert (decision.pair.target.repo, decision.pair.target.file) == ("own/big", "big.gguf")
    assert (decision.pair.draft.repo, decision.pair.draft.file) == ("", f"/blobs/{'1' * 64}")
    own = msgspec.structs.replace(record, source="own")
    with pytest.raises(ModelNotFound):
        resolve_target(PullRequest("tiny"), Catalogue({}, {}), {"tiny": own}.get, blob_path)
