"""Models that other programs left on this disk are found once each, by the names they have there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.paths import hf_cache_folder
from localspec.registry.disk import discovery
from localspec.registry.disk.discovery import DiskSearch, FoundModel, find_models
from localspec.registry.store.store import Store
from tests.support.programs import furnish, in_hub, in_ollama, small


def environment(home: Path, **variables: str) -> dict[str, str]:
    return {"HOME": str(home), **variables}


def test_models_of_every_program_are_found_by_their_names(tmp_path: Path, store: Store) -> None:
    expected = furnish(tmp_path)
    search = DiskSearch(store, environ=environment(tmp_path))
    assert {str(model.path): model.name for model in search.models} == expected
    assert search.problems == []
    origins = {model.origin for model in search.models}
    assert origins == {
        "Hugging Face cache", "llama.cpp", "LM Studio", "Jan", "GPT4All", "Ollama",
    }  # fmt: skip


def test_a_named_folder_is_searched_whatever_program_owns_it(tmp_path: Path, store: Store) -> None:
    disk = tmp_path / "disk"
    in_ollama(disk / "ollama", "registry.ollama.ai/library/tiny/1b", small(1).data())
    (disk / "deep/er").mkdir(parents=True)
    small(2).write(disk / "deep/er/A.GGUF")
    (disk / "deep/again.gguf").symlink_to("er/A.GGUF")
    (disk / "deep/loop").symlink_to(disk, target_is_directory=True)
    small(3).write(tmp_path / "alone.gguf")
    (disk / "notes.txt").touch()
    env = environment(tmp_path / "nobody")
    models = find_models(store, [disk, tmp_path / "alone.gguf"], env)
    assert sorted(model.name for model in models) == ["again.gguf", "alone.gguf", "tiny:1b"]


def test_unusable_entries_are_reported_and_stop_nothing(tmp_path: Path, store: Store) -> None:
    home = tmp_path
    root = home / ".ollama/models"
    blob = in_ollama(root, "registry.ollama.ai/library/gone/1b", small(1).data())
    blob.unlink()
    in_ollama(root, "registry.ollama.ai/library/good/1b", small(2).data())
    for name, text in {"cut": "{", "list": "[]", "none": '{"layers": []}'}.items():
        (root / f"manifests/registry.ollama.ai/library/{name}").mkdir()
        (root / f"manifests/registry.ollama.ai/library/{name}/1b").write_text(text)
    os.mkfifo(root / "manifests/registry.ollama.ai/library/good/pipe")
    deep = root / "manifests/registry.ollama.ai/library/deep/1b"
    deep.parent.mkdir()
    deep.write_text("[" * 200_000)
    link = in_hub(home / ".cache/huggingface/hub", "a/b", "dangling.gguf", small(3).data())
    link.resolve().unlink()
    (home / ".lmstudio").mkdir()
    (home / ".lmstudio/settings.json").write_text("[1")
    search = DiskSearch(store, [home / "absent"], environment(home))
    assert {model.name for model in search.models} == {"good:1b", "dangling.gguf"}
    problems = "\n".join(search.problems)
    for name in ("gone:1b", "cut:1b", "list:1b", "none:1b", "deep:1b", "good:pipe", "absent"):
        assert name in problems


def test_a_search_that_takes_too_long_ends_with_a_problem(tmp_path: Path, store: Store) -> None:
    furnish(tmp_path)
    search = DiskSearch(store, [tmp_path], environment(tmp_path), patience=0.0)
    assert search.models == []
    (problem,) = search.problems
    assert "stopped after 0 s" in problem


def test_program_folders_follow_their_own_settings(tmp_path: Path) -> None:
    (tmp_path / ".config/nomic.ai").mkdir(parents=True)
    (tmp_path / ".config/nomic.ai/GPT4All.ini").write_text("[General]\nmodelPath=/big/gpt\n")
    (tmp_path / ".local/share/Jan").mkdir(parents=True)
    settings = tmp_path / ".local/share/Jan/settings.json"
    settings.write_text(json.dumps({"data_folder": "/big/jan"}))
    (tmp_path / ".lmstudio-home-pointer").write_text("/big/studio")
    env = environment(tmp_path, LLAMA_CACHE="/big/llama", HF_HOME="/big/hf", OLLAMA_MODELS="/big/o")
    folders = {(origin, str(path)) for origin, path in discovery.program_folders(env, "linux")}
    assert {
        ("GPT4All", "/big/gpt"),
        ("Jan", "/big/jan/llamacpp/models"),
        ("LM Studio", "/big/studio/models"),
        ("llama.cpp", "/big/llama"),
        ("Hugging Face cache", "/big/hf/hub"),
    } <= folders
    assert str(discovery.model_folders(env)[0]) == "/big/o"
    mac = {str(path) for _, path in discovery.program_folders(environment(tmp_path), "darwin")}
    assert f"{tmp_path}/Library/Caches/llama.cpp" in mac
    assert f"{tmp_path}/Library/Application Support/nomic.ai/GPT4All" in mac
    assert f"{tmp_path}/Library/Application Support/Jan/data/llamacpp/models" in mac


@pytest.mark.parametrize(
    "requested",
    ["qwen2.5:7b", "Qwen2.5:7B", "library/qwen2.5:7b", "registry.ollama.ai/library/qwen2.5:7b"],
)
def test_a_name_of_ollamas_leads_to_its_file(tmp_path: Path, requested: str) -> None:
    paths = {model_name: path for path, model_name in furnish(tmp_path).items()}
    env = environment(tmp_path)

    def find(name: str) -> str:
        model = discovery.find_model(name, env)
        return str(model.file) if model else ""

    assert find(requested) == paths["qwen2.5:7b"]
    assert find("someone/mine") == paths["someone/mine:latest"]
    hub = "hf.co/bartowski/X-GGUF:Q4_K_M"
    assert find(hub) == paths[hub]
    assert find(hub.replace("hf.co", "huggingface.co")) == paths[hub]
    for unknown in ("qwen2.5", "qwen2.5:3b", "../../qwen2.5:7b", "", ":", "/", "a/b/c/d:e"):
        assert discovery.find_model(unknown, env) is None


def test_the_hub_cache_folder_agrees_with_huggingface_hub() -> None:
    program = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"
    for case in (
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "~/hf"},
        {"HF_HOME": "$PLACE/hf", "PLACE": "/p", "XDG_CACHE_HOME": "/x"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"},
        {"HF_HUB_CACHE": "~/$PLACE/cache", "PLACE": "p", "HUGGINGFACE_HUB_CACHE": "/old"},
    ):
        env = {"HOME": "/somebody", "PATH": os.environ["PATH"], **case}
        run = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert str(hf_cache_folder(env)) == run.stdout.strip(), case


def test_a_found_model_has_its_origin(tmp_path: Path, store: Store) -> None:
    small(1).write(tmp_path / "x.gguf")
    models = find_models(store, [tmp_path], environment(tmp_path / "nobody"))
    assert models == [FoundModel(tmp_path / "x.gguf", "x.gguf", str(tmp_path))]
