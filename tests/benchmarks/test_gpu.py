"""`scripts/gpu_check` on a CPU with the smallest pair; times mean nothing here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import pytest

from benchmarks.gpu import main
from benchmarks.measuring.runner import Runner
from benchmarks.measuring.runs import PLAIN, Setting
from localspec.engine import llama
from localspec.protocol.frames import TokenLogprob

SMALL = "--size tiny --acceptance 0.7 --depths 1 --tokens 30 --prompt 8 --repetitions 1".split()
SMALL += ["--no-tests", "--exact-texts", "2", "--exact-tokens", "20"]


def test_a_missing_gpu_is_reported_with_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "gpus", list)
    assert main(SMALL) == 1
    output = capsys.readouterr()
    assert "no GPU that this build of llama.cpp can use" in output.err
    assert "localspec doctor" in output.err
    assert output.out == ""


def test_the_whole_check_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--cpu", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert main([*SMALL, *folders]) == 0
    stored = json.loads((tmp_path / "out/gpu_check.json").read_text())
    details = stored["details"]
    assert list(details["widths"]["target"]) == [str(width) for width in range(1, 33)]
    assert list(details["widths"]["draft"]) == [str(width) for width in range(1, 9)]
    assert (details["exact"]["texts"], details["exact"]["tokens"]) == (2, 40)
    assert details["exact"]["differing"] == 0
    assert {run["setting"] for run in stored["workloads"][0]["runs"]} == {"plain", "1", "auto"}
    text = (tmp_path / "out/gpu_check.md").read_text()
    assert capsys.readouterr().out == text
    assert "| 32 |" in text
    assert "the same bit for bit" in text


def test_another_build_is_measured_beside_this_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    libraries = tmp_path / "libraries"
    shutil.copytree(Path(llama_cpp.__file__).parent / "lib", libraries, symlinks=True)
    folders = ["--cpu", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    assert main([*SMALL, *folders, "--other-build", str(libraries)]) == 0
    other = json.loads((tmp_path / "out/other-build/gpu_check.json").read_text())
    assert other["details"]["exact"]["differing"] == 0
    text = (tmp_path / "out/builds.md").read_text()
    assert capsys.readouterr().out.endswith(text)
    for row in other["rows"]:
        for setting, speed in row["speeds"].items():
            first = f"| {row['workload']} | {setting} |"
            [line] = [line for line in text.splitlines() if line.startswith(first)]
            assert f"| {speed:.3g} |" in line


def test_one_different_bit_in_exact_mode_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Runner.exact

    def exact(
        self: Runner, setting: Setting, prompt: Sequence[int], tokens: int
    ) -> list[TokenLogprob]:
        scored = real(self, setting, list(prompt), tokens)
        if setting != PLAIN:
            scored[-1].logprob += 1e-12
        return scored

    monkeypatch.setattr(Runner, "exact", exact)
    folders = ["--cpu", "--work", str(tmp_path), "--out", str(tmp_path)]
    assert main([*SMALL, *folders]) == 1
    assert "2 DIFFER" in (tmp_path / "gpu_check.md").read_text()
