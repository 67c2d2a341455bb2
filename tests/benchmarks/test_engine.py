"""`scripts/bench engine` from end to end, on the smallest pair; times mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine import main
from benchmarks.measuring.runs import PLAIN
from benchmarks.measuring.workloads import HEADS, TINY, build, workload
from benchmarks.servers.llama_server import Running, Server
from localspec.children import engine_environment

SMALL = ["--size", "tiny", "--tokens", "40", "--prompt", "8", "--skip", "8", "--repetitions", "1"]


def test_every_setting_runs_with_llama_server(
    tmp_path: Path, fake_server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments = [*SMALL, "--work", str(tmp_path), "--acceptance", "0.7", "--depths", "1,3"]
    assert main([*arguments, "--llama-server", str(fake_server), "--json", str(out)]) == 0
    stored = json.loads(out.read_text())
    runs = {run["setting"]: run for run in stored["workloads"][0]["runs"]}
    assert runs.keys() == {"plain", "1", "3", "auto", "server plain", "server 1", "server 3"}
    assert all(run["correct"] for run in runs.values())
    assert runs["plain"]["drafted"] == 0
    assert runs["3"]["drafted"] > runs["1"]["drafted"] > 0
    assert runs["server 3"]["drafted"] == 10
    assert runs["server 3"]["speed"] == 42.0
    printed = capsys.readouterr()
    assert "outputs that left the right text: 0" in printed.out
    assert "[7/7" in printed.err
    assert not list(tmp_path.glob("state-*")), "learned state must not remain for the next run"


@pytest.mark.parametrize("heads", HEADS)
def test_targets_with_heads_are_measured_too(
    tmp_path: Path, fake_server: Path, capsys: pytest.CaptureFixture[str], heads: str
) -> None:
    arguments = [*SMALL, "--work", str(tmp_path), "--heads", heads, "--acceptance", "0.7"]
    arguments += ["--depths", "3", "--llama-server", str(fake_server)]
    out = tmp_path / "out.json"
    assert main([*arguments, "--json", str(out)]) == 0
    runs = {run["setting"]: run for run in json.loads(out.read_text())["workloads"][0]["runs"]}
    assert runs["3"]["accepted"] > 0 < runs["server 3"]["drafted"]
    assert runs["plain"]["drafted"] == 0
    assert f"MTP heads: {heads}" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("tunables", ["", "glibc.malloc.arena_max=4"])
def test_llama_server_does_not_get_our_engines_tunables(
    tmp_path: Path, fake_server: Path, monkeypatch: pytest.MonkeyPatch, tunables: str
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    monkeypatch.setenv("GLIBC_TUNABLES", engine_environment()["GLIBC_TUNABLES"])
    server = Server(fake_server, tmp_path / "none", tmp_path / "none", 64, 1)
    with Running(server, PLAIN) as running:
        environment = Path(f"/proc/{running.pid}/environ").read_bytes().replace(b"\0", b":")
    assert b"hugetlb" not in environment
    assert (b":GLIBC_TUNABLES=" + tunables.encode() in b":" + environment) == bool(tunables)


def test_the_benchmarks_engine_has_the_tunables_of_a_daemons() -> None:
    root = Path(__file__).parents[2]
    code = (
        "import os, runpy, sys, benchmarks.engine\n"
        "benchmarks.engine.main = lambda _: print(os.environ['GLIBC_TUNABLES']) or 0\n"
        "sys.argv = ['scripts/bench', 'engine']\n"
        f"runpy.run_path({str(root / 'scripts/benchmarks/__main__.py')!r}, run_name='__main__')\n"
    )
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd=root / "scripts", capture_output=True, text=True, check=False)
    assert "hugetlb" in result.stdout, result.stderr


def test_a_server_that_does_not_start_is_reported(
    tmp_path: Path, fake_server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--work", str(tmp_path), "--acceptance", "0.7", "--depths", "1"]
    arguments += ["--llama-server", str(fake_server), "--server-argument=--broken"]
    assert main(arguments) == 1
    assert "ended while loading: error: it does not load" in capsys.readouterr().err


def test_a_recorded_trace_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    arguments = [*SMALL, "--work", str(tmp_path), "--acceptance", "0.9", "--record", str(trace)]
    assert main(arguments) == 0
    stored = json.loads(trace.read_text())
    assert len(stored["target"]) == len(stored["draft"]) == 40
    files = build(tmp_path, TINY, workload("0.9"), lambda _said: None)
    tokens_before, tokens_after = stored["target"][:-1], stored["target"][1:]
    assert tokens_after == [files.cycle[token] for token in tokens_before]
    assert stored["draft"][1:] == [files.drafted[token] for token in tokens_before]
    assert main(["replay", str(trace), "--costs", "repacked"]) == 0
    assert "| clairvoyant |" in capsys.readouterr().out


def test_memory_is_reported_over_many_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--work", str(tmp_path), "--rounds", "200"]
    main(arguments)  # only a long run can show whether memory is flat
    assert "after the first tenth" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--acceptance", "2"],
        ["--depths", "0,1"],
        ["--target-shape", "layers=x"],
        ["--llama-server", "/nowhere/llama-server"],
        ["--tokens", "0"],
        ["--heads", "glm4moe", "--rounds", "9"],
    ],
)
def test_wrong_usage_is_reported_before_any_work(wrong: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--work", str(tmp_path / "work"), *wrong])
    assert stopped.value.code == 2
    assert not (tmp_path / "work").exists()


def test_the_server_gets_the_same_files_and_sizes() -> None:
    server = Server(Path("s"), Path("t.gguf"), Path("d.gguf"), 512, 2, type_kv="q8_0")
    plain, drafting = " ".join(server.command(0, 1)), " ".join(server.command(5, 1))
    assert "-m t.gguf -c 512 -np 1" in plain
    assert "-md" not in plain
    assert "--spec-type draft-simple -md d.gguf --spec-draft-n-max 5" in drafting
    assert "-ctk q8_0" in plain
    assert "-ngl" not in plain
