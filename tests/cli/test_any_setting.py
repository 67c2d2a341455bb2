"""Test random values of `localspec config set` with the real engine.

Every accepted value works or fails with an explained error, and unsetting it restores the pair.
"""

from __future__ import annotations

import random
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from localspec.config import KEYS
from tests.support.daemons import Home, temporary_home, wait_for
from tests.support.exploration import SEED, count_examples

STEPS = count_examples(5, "LOCALSPEC_TEST_SETTINGS")
NUMBERS = ["-1", "-2", "0", "1", "2", "3", "7", "8", "16", "63", "64", "65", "255", "256", "257"]
NUMBERS += ["1000", "4096", "99999", "16777216", "16777217", "9" * 30, "0.5", "1e3", "-0.0", "1_0"]
WORDS = ["", " ", "auto", "all", "none", "never", "true", "off", "nan", "inf", "x", "é", "\udcff"]
WORDS += ["f16", "q8_0", "layer", "row", "on", "builtin", "coder-7b", "default", "a\nb", '"', "#"]
WORDS += ["127.0.0.1:0", "localhost:0", "[::1]:0", "0.0.0.0:0", "127.0.0.1:1", "127.0.0.1:99999"]
WORDS += ["/etc/passwd", "x.gguf", "~/x.gguf", "a,b,c", "qwen2.5:7b", "../../x", "x" * 5000]
# Errors that an accepted setting may cause: explained to the user, without a crash of the worker.
EXPECTED_ERRORS = {
    "load_failed",
    "model_not_found",
    "context_length_exceeded",
    "queue_full",
    "bad_gguf",
}


@pytest.fixture
def real() -> Iterator[Home]:
    """Yield a home with the real engine and the shipped pair."""
    with temporary_home() as home:
        yield home


def ask_question(home: Home) -> tuple[int, str]:
    answer = home.chat("hi", max_tokens=2)
    return answer.status, "" if answer.status == 200 else answer.error["code"]


def run_command(home: Home, *words: str) -> subprocess.CompletedProcess[str]:
    run = home.run(*words)
    assert run.returncode in (0, 1, 2), (words, run.stderr)
    assert "Traceback" not in run.stderr
    assert " bug " not in run.stderr, (words, run.stderr)
    return run


@pytest.mark.slow
@pytest.mark.explore
def test_any_accepted_setting_works_or_is_explained(real: Home) -> None:
    rng = random.Random(f"settings {SEED}")
    file = real.root / "config" / "config.toml"
    history: list[Any] = []
    accepted = 0
    assert run_command(real, "start").returncode == 0
    while accepted < STEPS:
        key, text = rng.choice(KEYS), rng.choice(NUMBERS if rng.random() < 0.6 else WORDS)
        content_before = file.read_bytes() if file.exists() else b""
        run = run_command(real, "config", "set", key, "--", text)
        history.append((key, text, run.returncode))
        if run.returncode:
            assert run.stderr.count("localspec: ") == 1, run.stderr
            content_after = file.read_bytes() if file.exists() else b""
            assert tomllib.loads(content_after.decode()) == tomllib.loads(
                content_before.decode()
            ), history
            continue
        accepted += 1
        status, code = ask_question(real)
        assert status == 200 or code in EXPECTED_ERRORS, (history, code)
        if rng.random() < 0.3:
            for command in ("config", "list", "status", "doctor"):
                run_command(real, command)
        if rng.random() < 0.2:  # The daemon must also start with this setting.
            assert run_command(real, "stop").returncode == 0
            wait_for(lambda: not real.socket.exists(), "its end")
            run_command(real, "ask", "-n", "2", "hi")
            assert run_command(real, "start").returncode == 0, history
        if rng.random() < 0.3:
            for key_ in tomllib.loads(file.read_text()):
                assert run_command(real, "config", "unset", key_).returncode == 0
            assert ask_question(real) == (200, ""), history
    assert real.status()["counts"]["worker_deaths"] == 0, history
