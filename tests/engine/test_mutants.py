"""Headers that pass the checks do not crash llama.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


SIDECARS = (
    "eagle3", "dflash", "dflash2", "dspark", "gemma4", "qwen35", "qwen35 apart", "glm4moe apart",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("target", 120), *((kind, 30) for kind in SIDECARS)])
def test_accepted_damaged_headers_do_not_end_the_engine(
    tmp_path: Path, kind: str, count: int
) -> None:
    seed = 14
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.mutants", str(tmp_path), str(seed), str(count), kind],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
    )
    assert run.returncode == 0, f"seed {seed}: {run.stderr[-800:]}"
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["deaths"] == [], f"seed {seed}"
    assert report["counts"]["answered"] > count / 12
    assert report["counts"]["refused by the checks"] > count / 12
