"""Projectors, by which targets read pictures: recognised, chosen, pulled, added and counted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from localspec.errors import BadGguf, NotMatched, Unreachable
from localspec.protocol.pairs import PullRequest
from localspec.registry.catalogue import Catalogue, CataloguePair, HubFile
from localspec.registry.disk.drafts import find_projector, list_projectors
from localspec.registry.file_names import is_projector, rank_projectors
from localspec.registry.header import fit
from localspec.registry.header.fit import LoadOptions
from localspec.registry.header.model import read_local_model
from localspec.registry.header.projector import (
    check_projector,
    projector_bytes,
    read_local_projector,
)
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.repository import Reference
from localspec.registry.pulls.decide import decide
from localspec.registry.pulls.pull import Puller
from localspec.registry.pulls.targets import PullTarget, resolve_target
from localspec.registry.store import integrity, local
from localspec.registry.store.store import Record, Store
from tests.registry.pulling import flip_byte
from tests.support.gguf_files import BOOL, STRING, U32, Gguf, model
from tests.support.hub import TestHub

REPO = "maker/Tiny-VL-GGUF"
WIDTH = 8
TARGET = model(seed=1, width=WIDTH)


def projector(width: int = WIDTH, seed: int = 5) -> Gguf:
    """Return a projector's header with weights of noise, for targets of this width."""
    return Gguf(
        {
            "general.architecture": (STRING, "clip"),
            "general.type": (STRING, "mmproj"),
            "clip.has_vision_encoder": (BOOL, True),
            "clip.projector_type": (STRING, "mlp"),
            "clip.vision.projection_dim": (U32, width),
        },
        [("mm.2.weight", (width, width), 0), ("v.patch_embd.weight", (4, 4, 3, 16), 1)],
        seed,
    )


def read(path: Path, file: Gguf) -> object:
    return read_local_projector(file.write(path))


@pytest.fixture
def repository(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestHub:
    """Put a model with several projectors on the hub, of which the first is another model's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    hub.add(REPO, "Tiny-VL-Q8_0.gguf", TARGET.data())
    hub.add(REPO, "mmproj-Tiny-VL-Q8_0.gguf", projector(width=24).data())
    for quant in ("F32", "F16", "BF16"):
        hub.add(REPO, f"mmproj-{quant}.gguf", projector().data())
    return hub


def make_target(*, no_projector: bool = False) -> PullTarget:
    target = Reference(repo=REPO)
    return PullTarget(name="w", asked=REPO, target=target, no_draft=True, no_projector=no_projector)


def pull(puller: Puller, target: PullTarget) -> tuple[Record, tuple[str, ...]]:
    decision = decide(puller, target, {})
    puller.asked = target.asked
    return puller.pull(target.name, decision.pair, known=decision.known), decision.said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mmproj-F16.gguf", True),
        ("mmproj-model-f16.gguf", True),
        ("Qwen2.5-VL-7B.mmproj-Q8_0.gguf", True),
        ("sub/MMPROJ-x.gguf", True),
        ("model-Q4_K_M.gguf", False),
        ("mmprojector.gguf", False),
    ],
)
def test_projectors_are_recognised_by_name(name: str, expected: bool) -> None:
    assert is_projector(name) is expected


def test_the_smallest_good_quantization_beside_the_target_is_best() -> None:
    sizes = {
        "mmproj-F32.gguf": 40,
        "mmproj-BF16.gguf": 20,
        "mmproj-F16.gguf": 20,
        "mmproj-Q8_0.gguf": 10,
        "mmproj-Q4_0.gguf": 5,
        "other/mmproj-Q8_0.gguf": 10,
        "Tiny-VL-mmproj-F32.gguf": 40,
        "Tiny-VL-Q4_K_M.gguf": 400,
    }
    assert rank_projectors(sizes, "Tiny-VL-Q4_K_M.gguf") == (
        "Tiny-VL-mmproj-F32.gguf",
        "mmproj-Q8_0.gguf",
        "mmproj-F16.gguf",
        "mmproj-BF16.gguf",
        "mmproj-F32.gguf",
        "mmproj-Q4_0.gguf",
        "other/mmproj-Q8_0.gguf",
    )


def test_a_header_says_what_a_projector_fits(tmp_path: Path) -> None:
    target = read_local_model(TARGET.write(tmp_path / "t.gguf"))
    fitting = read_local_projector(projector().write(tmp_path / "a.gguf"))
    assert fitting.kind == "mlp"
    check_projector(target, fitting)
    other = read_local_projector(projector(width=24).write(tmp_path / "b.gguf"))
    with pytest.raises(NotMatched, match="of another model: it computes no rows of 8 numbers"):
        check_projector(target, other)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (TARGET, "is no projector"),
        (projector().drop("clip.has_vision_encoder"), "reads no pictures"),
        (projector().drop("clip.projector_type"), "reads no pictures"),
    ],
    ids=["a model", "it hears", "no type"],
)
def test_what_is_no_projector_is_refused(tmp_path: Path, file: Gguf, message: str) -> None:
    with pytest.raises(BadGguf, match=message):
        read(tmp_path / "x.gguf", file)


def test_a_projector_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(BadGguf, match="projector of a model that sees or hears"):
        read_local_model(projector().write(tmp_path / "mmproj.gguf"))


def test_a_plan_has_room_for_a_projector(tmp_path: Path) -> None:
    target = read_local_model(TARGET.write(tmp_path / "t.gguf"))
    needed = projector_bytes(1 << 30)
    assert needed > 1 << 30
    plain, seeing = LoadOptions(context=512), LoadOptions(context=512, projector=needed)
    assert fit.total_need(target, None, seeing) == fit.total_need(target, None, plain) + needed


def test_a_pull_takes_the_projector_that_fits(
    repository: TestHub, puller: Puller, store: Store
) -> None:
    record, said = pull(puller, make_target())
    assert record.projector is not None
    assert record.projector.file == "mmproj-F16.gguf"
    assert store.model_path(record.projector).read_bytes() == projector().data()
    assert said == (
        "Pictures: mmproj-F16.gguf in the same repository; to leave it out: --no-projector.",
    )
    assert [report.role for report in integrity.verify(store, record.name)] == [
        "target",
        "projector",
    ]


def test_a_damaged_projector_is_found(repository: TestHub, puller: Puller, store: Store) -> None:
    record, _ = pull(puller, make_target())
    assert record.projector is not None
    path = store.model_path(record.projector)
    path.chmod(0o600)
    flip_byte(path)
    problems = {report.role: report.problem for report in integrity.verify(store, record.name)}
    assert not problems["target"]
    assert "is damaged" in problems["projector"]


def test_a_pull_can_leave_the_projector_out(repository: TestHub, puller: Puller) -> None:
    record, said = pull(puller, make_target(no_projector=True))
    assert record.projector is None
    assert record.other_projector == "mmproj-Tiny-VL-Q8_0.gguf"
    assert said == ()


def test_a_repository_of_another_models_projector_says_so(
    hub: TestHub, puller: Puller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    hub.add(REPO, "Tiny-VL-Q8_0.gguf", TARGET.data())
    hub.add(REPO, "mmproj-F16.gguf", projector(width=24).data())
    record, said = pull(puller, make_target())
    assert record.projector is None
    assert said == ("No pictures: mmproj-F16.gguf in the same repository does not fit this model.",)


def test_a_repeated_pull_keeps_the_projector(
    repository: TestHub, puller: Puller, store: Store
) -> None:
    record, _ = pull(puller, make_target())
    again = resolve_target(PullRequest("w"), Catalogue({}, {}), lambda _: record, store.part_path)
    assert isinstance(again.pair, CataloguePair)
    assert again.pair.projector is not None
    assert again.pair.projector.file == "mmproj-F16.gguf"


@pytest.mark.parametrize("role", ["draft", "sidecar", "none"])
def test_a_pair_of_the_catalogue_keeps_its_draft_beside_a_projector(
    repository: TestHub, puller: Puller, role: str
) -> None:
    target, other = (HubFile(repo=REPO, file=f"{name}.gguf") for name in ("Tiny-VL-Q8_0", "other"))
    entry = CataloguePair(summary="", target=target)
    if role != "none":
        entry = msgspec.structs.replace(entry, **{role: other})
    request = PullTarget(name="w", asked="", pair=entry)
    pair = decide(puller, request, {"w": entry}).pair
    projector = HubFile(repo=REPO, file="mmproj-F16.gguf")
    assert pair == msgspec.structs.replace(entry, projector=projector)
    without = msgspec.structs.replace(request, no_projector=True)
    pair = decide(puller, without, {"w": entry}).pair
    left_out = "mmproj-Tiny-VL-Q8_0.gguf"
    assert pair == msgspec.structs.replace(entry, other_projector=left_out)


def test_a_pair_of_the_catalogue_whose_files_cannot_be_listed_is_pulled(
    repository: TestHub, puller: Puller
) -> None:
    entry = CataloguePair(summary="", target=HubFile(repo="maker/none", file="none.gguf"))
    request = PullTarget(name="w", asked="", pair=entry)
    assert decide(puller, request, {"w": entry}).pair == entry


def test_a_hub_that_cannot_be_reached_is_tried_once_for_a_pair_of_the_catalogue(
    puller: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tries are not made again for the files."""
    entry = CataloguePair(summary="", target=HubFile(repo="maker/none", file="none.gguf"))
    request = PullTarget(name="w", asked="", pair=entry)

    def fail(*_: object) -> None:
        raise Unreachable("no network")

    monkeypatch.setattr(Hub, "list_files", fail)
    with pytest.raises(Unreachable):
        decide(puller, request, {"w": entry})


def test_a_projector_beside_a_target_is_found(tmp_path: Path) -> None:
    target = TARGET.write(tmp_path / "Tiny-VL-Q8_0.gguf")
    header = read_local_model(target)
    assert find_projector(list_projectors(target), header) is None
    projector(width=24).write(tmp_path / "mmproj-Tiny-VL-Q8_0.gguf")
    (tmp_path / "mmproj-broken-Q8_0.gguf").write_bytes(b"GGUF")
    assert find_projector(list_projectors(target), header) is None
    fitting = projector().write(tmp_path / "mmproj-F32.gguf")
    assert find_projector(list_projectors(target), header) == fitting


def test_own_files_have_their_projector_in_the_record(tmp_path: Path, store: Store) -> None:
    store.prepare()
    target = TARGET.write(tmp_path / "t.gguf")
    file = projector().write(tmp_path / "mmproj.gguf")
    record = local.add_own_pair(store, "mine", target, projector=file)
    assert record.projector is not None
    assert store.model_path(record.projector) == file
    view = local.describe_pair(store, record, fit.FreeMemory(1 << 34), LoadOptions())
    assert view.projector is not None
    assert (view.projector.kind, view.projector.size) == ("mlp", file.stat().st_size)
    assert "vision" in view.capabilities
    assert f"--projector {file} --replace" in integrity.describe_remedy(record)


def test_the_projector_of_another_model_is_refused(tmp_path: Path, store: Store) -> None:
    store.prepare()
    target = TARGET.write(tmp_path / "t.gguf")
    file = projector(width=24).write(tmp_path / "mmproj.gguf")
    with pytest.raises(NotMatched, match="of another model"):
        local.add_own_pair(store, "mine", target, projector=file)
