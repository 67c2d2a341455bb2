"""What a model of Ollama's consists of comes along, or is refused, or is said not to."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.synthetic import TINY_TARGET, target_cycle, write_model
from benchmarks.synthetic_projector import write_projector
from localspec.errors import ModelNotFound
from localspec.paths import Paths
from localspec.protocol.pairs import AddRequest
from localspec.registry.disk.discovery import DiskSearch
from localspec.registry.header.fit import FreeMemory
from localspec.registry.registry import Registry, add_local_pair
from localspec.registry.store.store import Record
from tests.support.gguf_files import sha256
from tests.support.programs import in_ollama

LIBRARY = "registry.ollama.ai/library/see"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return Registry(Paths(*[tmp_path / "home"] * 5), lambda _: False, lambda: FreeMemory(0))


@pytest.fixture
def projectors(tmp_path: Path) -> dict[str, bytes]:
    """Return the contents of a projector that fits the model, and of one that does not."""
    widths = {"fits": TINY_TARGET.n_embd, "other": 2 * TINY_TARGET.n_embd}
    return {
        name: write_projector(tmp_path / name, width).read_bytes() for name, width in widths.items()
    }


def put(folder: Path, tag: str, *layers: tuple[str, bytes]) -> None:
    target = folder / "target.gguf"
    write_model(target, TINY_TARGET, target_cycle(TINY_TARGET.n_vocab))
    in_ollama(folder / "ollama", f"{LIBRARY}/{tag}", target.read_bytes(), *layers)


def add(registry: Registry, tag: str) -> Record:
    return add_local_pair(registry, AddRequest(tag, f"see:{tag}"))


@pytest.mark.parametrize("order", [["fits"], ["fits", "other"], ["other", "fits"]])
def test_a_projector_comes_along(
    registry: Registry, tmp_path: Path, projectors: dict[str, bytes], order: list[str]
) -> None:
    put(tmp_path, "latest", *[("projector", projectors[name]) for name in order])
    blob = tmp_path / "ollama/blobs" / f"sha256-{sha256(projectors['fits'])}"
    record = add(registry, "latest")
    assert record.projector
    assert record.projector.parts[0].path == str(blob)
    assert any("The projector of see:latest in Ollama" in note for note in record.notes)
    for name in ("latest", "see:latest"):
        assert registry.resolve(name).projector == str(blob)
    left_out = AddRequest("text", "see:latest", no_projector=True)
    assert add_local_pair(registry, left_out).projector is None


def test_a_projector_that_cannot_be_used_is_said(
    registry: Registry, tmp_path: Path, projectors: dict[str, bytes]
) -> None:
    put(tmp_path, "latest", ("projector", projectors["other"]))
    record = add(registry, "latest")
    sentence = "It reads no pictures: the projector of see:latest in Ollama cannot be used."
    assert record.projector is None
    assert sentence in record.notes
    files = registry.resolve("see:latest")
    assert (files.projector, files.projector_hint) == (None, sentence)


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_with_adapters_is_refused(registry: Registry, tmp_path: Path, count: int) -> None:
    put(tmp_path, "tuned", *[("adapter", bytes([number])) for number in range(count)])
    put(tmp_path, "base")
    for use in (
        lambda: add(registry, "tuned"),
        lambda: registry.resolve("see:tuned"),
        lambda: add_local_pair(registry, AddRequest("pair", "see:base", draft="see:tuned")),
    ):
        with pytest.raises(ModelNotFound, match=r"'see:tuned' of Ollama .* LoRA adapter.* merge"):
            use()
    search = DiskSearch(registry.store)
    assert [model.name for model in search.models] == ["see:base"]
    assert any("see:tuned" in problem and "LoRA" in problem for problem in search.problems)


def test_layers_that_change_answers_and_are_not_used_are_said(
    registry: Registry, tmp_path: Path
) -> None:
    put(tmp_path, "plain", ("license", b"MIT"))
    assert not [note for note in add(registry, "plain").notes if "Not used" in note]
    layers = ("template", "system", "params", "messages")
    put(tmp_path, "changed", *[(layer, layer.encode()) for layer in layers])
    (note,) = (note for note in add(registry, "changed").notes if "Not used" in note)
    assert "see:changed in Ollama: template, system prompt, parameters, messages." in note


def test_a_missing_or_further_file_is_a_problem(registry: Registry, tmp_path: Path) -> None:
    put(tmp_path, "lost", ("projector", b"x"))
    (tmp_path / "ollama/blobs" / f"sha256-{sha256(b'x')}").unlink()
    put(tmp_path, "split", ("model", b"y"))
    problems = " ".join(DiskSearch(registry.store).problems)
    assert "see:lost (Ollama) cannot be used: its file is missing" in problems
    assert "see:split (Ollama) cannot be used: it consists of 2 files" in problems
