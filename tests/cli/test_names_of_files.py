"""Test files in place of pair names: by path, in the hub's cache, or by their name in Ollama."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import localspec
from tests.support.daemons import Home, temporary_home
from tests.support.programs import in_hub, in_ollama

SHIPPED = Path(localspec.__file__).parent / "builtin"
LIBRARY = "registry.ollama.ai/library"


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """Yield a home with the shipped pair in Ollama's folder, the hub's cache and a plain folder."""
    with temporary_home() as home:
        home.use_fake()
        del home.environment["LOCALSPEC_PAIR"]
        home.environment["HOME"] = str(home.root)
        for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
            home.environment.pop(name, None)
        yield home


@pytest.fixture(scope="module")
def names(home: Home) -> dict[str, str]:
    """Return the ways to name the shipped target, by kind."""
    target, draft = ((SHIPPED / f"{name}.gguf").read_bytes() for name in ("target", "draft"))
    ollama = home.root / ".ollama/models"
    blob = in_ollama(ollama, f"{LIBRARY}/shipped/7b", target)
    in_ollama(ollama, f"{LIBRARY}/shipped/0.5b", draft)
    in_ollama(ollama, "hf.co/somebody/Shipped-GGUF/Q8_0", target)
    link = in_hub(home.root / ".cache/huggingface/hub", "some/body", "shipped.gguf", target)
    (home.root / "My.GGUF").symlink_to(blob)
    return {
        "Ollama": "shipped:7b",
        "Ollama, of the hub": "hf.co/somebody/Shipped-GGUF:Q8_0",
        "two of Ollama": "shipped:7b,shipped:0.5b",
        "a blob": str(blob),
        "the hub's cache": str(link),
        "the hub's blob": str(link.resolve()),
        "a file": str(home.root / "My.GGUF"),
        "a file and one of Ollama": f"{home.root}/My.GGUF,shipped:0.5b",
    }


def test_a_model_named_by_a_file_answers(home: Home, names: dict[str, str]) -> None:
    for kind, name in names.items():
        run = home.run("ask", "-m", name, "say hello")
        assert (run.returncode, run.stdout) == (0, "hello\n"), (kind, run.stderr)


def test_a_model_named_by_a_file_is_shown_and_verified(home: Home, names: dict[str, str]) -> None:
    for kind, name in names.items():
        run = home.run("show", name)
        assert run.returncode == 0, (kind, run.stderr)
        assert ("tokenizers  match" in run.stdout) == ("," in name), kind
        run = home.run("verify", name)
        assert run.returncode == 0, (kind, run.stderr)
        assert "OK" in run.stdout
    plain = home.root / "plain.gguf"
    shutil.copy(SHIPPED / "target.gguf", plain)
    assert "no checksum" in home.run("verify", str(plain)).stdout


def test_a_blob_with_another_hash_is_damaged(home: Home) -> None:
    blob = in_ollama(
        home.root / "other", f"{LIBRARY}/bad/1b", (SHIPPED / "draft.gguf").read_bytes()
    )
    renamed_blob = blob.with_name("sha256-" + "a" * 64)
    shutil.copy(blob, renamed_blob)
    run = home.run("verify", str(renamed_blob))
    assert run.returncode == 1
    assert "is damaged" in run.stdout
    assert "is damaged" in home.refused("add", "bad", "--target", str(renamed_blob))


def test_a_file_is_configured_and_drafts_are_found_for_it(
    home: Home, names: dict[str, str]
) -> None:
    config = home.root / "config" / "config.toml"
    for kind, name in names.items():
        assert home.run("config", "set", "pair", name).returncode == 0, kind
        assert name in config.read_text()
        if "," not in name:
            report = json.loads(home.run("drafts", name, "--json").stdout)
            assert [draft["name"] for draft in report["drafts"] if draft["matched"]] == [
                "shipped:0.5b"
            ]
    assert home.run("config", "set", "pair").returncode == 0
    assert "Ollama has no model 'nothing:7b'" in home.refused("config", "set", "pair", "nothing:7b")


def test_pairs_are_made_of_files(home: Home, names: dict[str, str]) -> None:
    run = home.run("add", "mine", "--target", "shipped:7b", "--draft", "shipped:0.5b")
    assert run.returncode == 0, run.stderr
    assert "shipped:7b with shipped:0.5b" in home.run("list").stdout
    assert home.run("ask", "-m", "mine", "say hello").stdout == "hello\n"
    assert home.run("verify", "mine").returncode == 0
    assert home.run("add", "blob", "--target", names["a blob"]).returncode == 0
    assert "Ollama has no model 'nothing:latest'" in home.refused(
        "add", "none", "--target", "nothing"
    )


def test_a_file_is_named_from_where_the_shell_is(home: Home, names: dict[str, str]) -> None:
    assert names
    for name in ("./My.GGUF", ".cache/huggingface/hub/models--some--body/snapshots"):
        path = Path(name)
        if path.suffix == "":
            path = next((home.root / name).rglob("shipped.gguf")).relative_to(home.root)
        home.must_run("show", str(path), cwd=home.root)


def test_missing_files_are_reported(home: Home) -> None:
    for name, message in {
        "nothing:7b": "Ollama has no model 'nothing:7b'",
        "/nowhere/x": "There is no file /nowhere/x",
        "a:1,b:2,c:3": "more than two files",
    }.items():
        for command in (["ask", "-m", name, "hi"], ["show", name], ["verify", name]):
            run = home.run(*command)
            assert (run.returncode, message in run.stderr) == (1, True), (command, run.stderr)
