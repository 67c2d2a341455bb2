"""`localspec import` in a home where every program has left models: all found, pairs made as printed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import Home, temporary_home
from tests.support.gguf_files import STRING, model
from tests.support.programs import furnish, in_hub, in_ollama, large
from tests.support.terminal import terminal


def everywhere(home: Home) -> dict[str, str]:
    home.use_fake()
    del home.environment["LOCALSPEC_PAIR"]
    for name in list(home.environment):
        if name.startswith(("HF_", "XDG_", "LLAMA_", "OLLAMA_", "HUGGINGFACE")):
            del home.environment[name]
    home.environment["HOME"] = str(home.root)
    return furnish(home.root)


@pytest.fixture(scope="module")
def found() -> Iterator[tuple[Home, dict[str, str]]]:
    with temporary_home() as home:
        yield home, everywhere(home)


def looked(home: Home, *arguments: str) -> Any:
    run = home.run("import", "--json", *arguments)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_model_is_found_and_what_can_draft_for_it(found: tuple[Home, dict[str, str]]) -> None:
    home, wanted = found
    seen = looked(home)
    assert {each["path"]: each["name"] for each in seen["models"]} == wanted
    assert not any(each["problem"] for each in seen["models"])
    targets = {each["name"] for each in seen["models"] if each["drafts"]}
    assert targets == {"qwen2.5:7b", "q-7b.gguf"}
    shown = home.run("import").stdout
    assert "Studio-7B.Q8_0.GGUF" in shown
    assert home.run("list", "--disk").stdout == shown


def test_what_is_printed_can_be_run(found: tuple[Home, dict[str, str]]) -> None:
    home, _ = found
    printed = home.run("import").stdout
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  localspec add ")]
    assert any("--target qwen2.5:7b --draft" in line for line in lines), printed
    for line in lines:
        run = home.run(*shlex.split(line)[1:])
        assert run.returncode == 0, (line, run.stderr)
        name = shlex.split(line)[2]
        assert home.run("ask", "-m", name, "say hello").stdout == "hello\n"
    again = looked(home)
    assert again["pairs"] == []


def test_what_is_broken_or_no_model_of_text_is_said(tmp_path: Path) -> None:
    with temporary_home() as home:
        everywhere(home)
        (tmp_path / "text.gguf").write_text("this is no model")
        cut = large(90).data()
        (tmp_path / "cut.gguf").write_bytes(cut[: len(cut) // 2])
        os.mkfifo(tmp_path / "pipe.gguf")
        (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")
        model().put("general.type", STRING, "adapter").write(tmp_path / "lora.gguf")
        shutil.copy(large(20).write(tmp_path / "one.gguf"), tmp_path / "copy.gguf")
        seen = looked(home, str(tmp_path))
        problems = {each["name"]: each["problem"] for each in seen["models"] if each["problem"]}
        assert set(problems) == {"text.gguf", "cut.gguf", "pipe.gguf", "gone.gguf", "lora.gguf"}
        names = [each["name"] for each in seen["models"]]
        assert not {"one.gguf", "copy.gguf"} & {*names}  # the hub's cache has the same
        run = home.run("import", str(tmp_path / "absent"))
        assert (run.returncode, "There is no folder" in run.stderr) == (1, True)


def test_pairs_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    with temporary_home() as home:
        everywhere(home)
        large(91).write(tmp_path / "builtin.gguf")
        large(93).write(tmp_path / "Ö my (7B)!.gguf")
        large(92).write(tmp_path / "Coder-7B.gguf")
        run = home.run("import", str(tmp_path), "--add")
        assert run.returncode == 0, run.stderr
        here = {each["name"] for each in json.loads(home.run("list", "--json").stdout)["pairs"]}
        assert {"qwen2.5-7b", "q-7b", "coder-7b-2", "builtin-2", "my-7b"} <= here
        records = home.root / "data/models/pairs"
        own = json.loads((records / "qwen2.5-7b.json").read_text())["target"]["parts"][0]
        assert own["sha256"] in own["path"]  # as Ollama names it, not read whole
        assert own["checked"] == 0
        assert home.run("ask", "-m", "qwen2.5-7b", "say hello").stdout == "hello\n"
        assert looked(home, str(tmp_path))["pairs"] == []


def test_drafts_prints_what_makes_a_pair(tmp_path: Path) -> None:
    with temporary_home() as home:
        everywhere(home)
        printed = home.run("drafts", "qwen2.5:7b").stdout
        lines = [
            each.strip() for each in printed.splitlines() if each.startswith("  localspec add")
        ]
        assert "localspec add qwen2.5-7b --target qwen2.5:7b --draft qwen2.5:0.5b" in lines
        assert len(lines) == printed.count("×")  # one for each draft
        path = next(line for line in lines if "Studio-7B.Q8_0.GGUF" in line)
        run = home.run(*shlex.split(path)[1:])
        assert run.returncode == 0, run.stderr
        assert " qwen2.5-7b-2 " in home.run("drafts", "qwen2.5-7b").stdout


def test_the_shell_says_where_its_programs_keep_models(tmp_path: Path) -> None:
    with temporary_home() as home:
        everywhere(home)
        assert home.run("start").returncode == 0
        kept = home.environment
        kept["HF_HOME"], kept["OLLAMA_MODELS"] = str(tmp_path / "hf"), str(tmp_path / "ollama")
        link = in_hub(tmp_path / "hf/hub", "some/where", "else.gguf", large(94).data())
        blob = in_ollama(tmp_path / "ollama", "registry.ollama.ai/library/far/7b", large(95).data())
        seen = looked(home)
        assert {str(link), str(blob)} <= {each["path"] for each in seen["models"]}
        # The daemon's own Ollama does not know it by its name.
        assert str(blob) in {each["target"] for each in seen["pairs"]}


def test_on_a_terminal_it_asks_first() -> None:
    with temporary_home() as home:
        everywhere(home)
        for answer, made in (("n", False), ("y", True)):
            with terminal(home.environment, "import", "--add") as shown:
                shown.expect("pairs? [y/N]")
                shown.send(answer + "\r")
                assert shown.wait() == 0
            listed = json.loads(home.run("list", "--json").stdout)["pairs"]
            assert (len(listed) > 1) == made
