"""Headers that pass the checks do not crash llama.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_accepted_damaged_headers_do_not_end_the_engine(tmp_path: Path) -> None:
    seed = 14
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.mutants", str(tmp_path), str(seed), "250"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
    )
    assert run.returncode == 0, f"seed {seed}: {run.stderr[-800:]}"
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["deaths"] == [], f"seed {seed}"
    assert report["counts"]["answered"] > 20
    assert report["counts"]["refused by the checks"] > 20
