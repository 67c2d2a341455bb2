"""Test `localspec import` in a home with the models of every supported program."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_heads import TINY_HEADS, write_heads_apart
from tests.support.daemons import Home, temporary_home
from tests.support.gguf_files import STRING, model
from tests.support.programs import furnish, in_hub, in_ollama, large
from tests.support.terminal import terminal


def furnish_home(home: Home) -> dict[str, str]:
    home.use_fake()
    del home.environment["LOCALSPEC_PAIR"]
    for name in list(home.environment):
        if name.startswith(("HF_", "XDG_", "LLAMA_", "OLLAMA_", "HUGGINGFACE")):
            del home.environment[name]
    home.environment["HOME"] = str(home.root)
    return furnish(home.root)


@pytest.fixture(scope="module")
def furnished() -> Iterator[tuple[Home, dict[str, str]]]:
    with temporary_home() as home:
        yield home, furnish_home(home)


def run_import(home: Home, *arguments: str) -> Any:
    output = home.must_run("import", "--json", *arguments)
    return json.loads(output)


def test_every_model_and_its_possible_drafts_are_found(
    furnished: tuple[Home, dict[str, str]],
) -> None:
    home, expected = furnished
    report = run_import(home)
    assert {item["path"]: item["name"] for item in report["models"]} == expected
    assert not any(item["problem"] for item in report["models"])
    targets = {item["name"] for item in report["models"] if item["drafts"]}
    assert targets == {"qwen2.5:7b", "q-7b.gguf"}
    table = home.run("import").stdout
    assert "Studio-7B.Q8_0.GGUF" in table
    assert home.run("list", "--disk").stdout == table


def test_printed_commands_can_be_run(furnished: tuple[Home, dict[str, str]]) -> None:
    home, _ = furnished
    printed = home.run("import").stdout
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  localspec add ")]
    assert any("--target qwen2.5:7b --draft" in line for line in lines), printed
    for line in lines:
        run = home.run(*shlex.split(line)[1:])
        assert run.returncode == 0, (line, run.stderr)
        name = shlex.split(line)[2]
        assert home.run("ask", "-m", name, "say hello").stdout == "hello\n"
    report = run_import(home)
    assert report["pairs"] == []


def test_sidecars_are_proposed_for_their_targets_alone(tmp_path: Path) -> None:
    """One of two quantizations is proposed; heads whose target is not there are no model of their own."""
    with temporary_home() as home:
        furnish_home(home)
        heads = tmp_path / "mtp-apart-8b-Q8_0.gguf"
        write_heads_apart(tmp_path / "apart-8b-Q4_0.gguf", heads)
        other = tmp_path / "mtp-apart-8b-BF16.gguf"
        write_heads_apart(tmp_path / "other.gguf", other, acceptance=0.5)
        (tmp_path / "other.gguf").unlink()
        lost = tmp_path / "mtp-lost-8b-Q8_0.gguf"
        write_heads_apart(tmp_path / "lost.gguf", lost, replace(TINY_HEADS, n_layer=3))
        (tmp_path / "lost.gguf").unlink()
        report = run_import(home, str(tmp_path))
        problems = {item["name"]: item["problem"] for item in report["models"] if item["problem"]}
        assert problems == {lost.name: "it drafts for a model that was not found."}
        drafts = {item["name"]: item["drafts"] for item in report["models"]}
        assert drafts["apart-8b-Q4_0.gguf"][0] == str(heads)
        proposed = [pair for pair in report["pairs"] if "apart" in pair["name"]]
        assert [(pair["name"], pair["draft"]) for pair in proposed] == [
            ("apart-8b-q4_0", str(heads))
        ]


def test_unusable_files_are_reported(tmp_path: Path) -> None:
    with temporary_home() as home:
        furnish_home(home)
        (tmp_path / "text.gguf").write_text("this is no model")
        data = large(90).data()
        (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
        os.mkfifo(tmp_path / "pipe.gguf")
        (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")
        model().put("general.type", STRING, "adapter").write(tmp_path / "lora.gguf")
        shutil.copy(large(20).write(tmp_path / "one.gguf"), tmp_path / "copy.gguf")
        report = run_import(home, str(tmp_path))
        problems = {item["name"]: item["problem"] for item in report["models"] if item["problem"]}
        assert set(problems) == {"text.gguf", "cut.gguf", "pipe.gguf", "gone.gguf", "lora.gguf"}
        names = [item["name"] for item in report["models"]]
        assert not {"one.gguf", "copy.gguf"} & {*names}  # The hub's cache contains the same file.
        assert "There is no folder" in home.refused("import", str(tmp_path / "absent"))


def test_pairs_are_added_with_the_add_option(tmp_path: Path) -> None:
    with temporary_home() as home:
        furnish_home(home)
        large(91).write(tmp_path / "builtin.gguf")
        large(93).write(tmp_path / "Ö my (7B)!.gguf")
        large(92).write(tmp_path / "Coder-7B.gguf")
        run = home.run("import", str(tmp_path), "--add")
        assert run.returncode == 0, run.stderr
        names = {pair["name"] for pair in json.loads(home.run("list", "--json").stdout)["pairs"]}
        assert {"qwen2.5-7b", "q-7b", "coder-7b-2", "builtin-2", "my-7b"} <= names
        records = home.root / "data/models/pairs"
        target = json.loads((records / "qwen2.5-7b.json").read_text())["target"]["parts"][0]
        # The hash is taken from Ollama's file name, so the file is not read.
        assert target["sha256"] in target["path"]
        assert target["checked"] == 0
        assert home.run("ask", "-m", "qwen2.5-7b", "say hello").stdout == "hello\n"
        assert run_import(home, str(tmp_path))["pairs"] == []


def test_drafts_prints_commands_that_add_pairs(tmp_path: Path) -> None:
    with temporary_home() as home:
        furnish_home(home)
        printed = home.run("drafts", "qwen2.5:7b").stdout
        lines = [
            output_line.strip()
            for output_line in printed.splitlines()
            if output_line.startswith("  localspec add")
        ]
        assert "localspec add qwen2.5-7b --target qwen2.5:7b --draft qwen2.5:0.5b" in lines
        assert len(lines) == printed.count("×")  # There is one line for each draft.
        path = next(line for line in lines if "Studio-7B.Q8_0.GGUF" in line)
        run = home.run(*shlex.split(path)[1:])
        assert run.returncode == 0, run.stderr
        assert " qwen2.5-7b-2 " in home.run("drafts", "qwen2.5-7b").stdout
        with terminal(home.environment, "drafts", "qwen2.5-7b", columns=200) as session:
            session.expect("comparing the models on this disk")
            session.expect("qwen2.5-7b-2")
            assert session.wait() == 0


def test_model_folders_are_taken_from_the_environment(tmp_path: Path) -> None:
    with temporary_home() as home:
        furnish_home(home)
        assert home.run("start").returncode == 0
        environment = home.environment
        environment["HF_HOME"], environment["OLLAMA_MODELS"] = (
            str(tmp_path / "hf"),
            str(tmp_path / "ollama"),
        )
        link = in_hub(tmp_path / "hf/hub", "some/where", "else.gguf", large(94).data())
        blob = in_ollama(tmp_path / "ollama", "registry.ollama.ai/library/far/7b", large(95).data())
        report = run_import(home)
        assert {str(link), str(blob)} <= {item["path"] for item in report["models"]}
        # The daemon's own Ollama does not know its name.
        assert str(blob) in {item["target"] for item in report["pairs"]}


def test_a_terminal_asks_for_a_confirmation() -> None:
    with temporary_home() as home:
        furnish_home(home)
        for answer, added in (("n", False), ("y", True)):
            with terminal(home.environment, "import", "--add") as session:
                session.expect("pairs? [y/N]")
                session.send(answer + "\r")
                assert session.wait() == 0
            listed = json.loads(home.run("list", "--json").stdout)["pairs"]
            assert (len(listed) > 1) == added
