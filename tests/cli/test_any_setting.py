"""Any value of any key, as people and accidents type it, with the real engine: nothing that `config set`
accepts costs more than it says, and setting it back costs nothing.
"""

from __future__ import annotations

import os
import random
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from localspec.config import KEYS
from tests.support.daemons import Home, temporary_home, wait_for

STEPS = int(os.environ.get("LOCALSPEC_TEST_SETTINGS", "5"))
NUMBERS = ["-1", "-2", "0", "1", "2", "3", "7", "8", "16", "63", "64", "65", "255", "256", "257"]
NUMBERS += ["1000", "4096", "99999", "16777216", "16777217", "9" * 30, "0.5", "1e3", "-0.0", "1_0"]
WORDS = ["", " ", "auto", "all", "none", "never", "true", "off", "nan", "inf", "x", "é", "\udcff"]
WORDS += ["f16", "q8_0", "layer", "row", "on", "builtin", "coder-7b", "default", "a\nb", '"', "#"]
WORDS += ["127.0.0.1:0", "localhost:0", "[::1]:0", "0.0.0.0:0", "127.0.0.1:1", "127.0.0.1:99999"]
WORDS += ["/etc/passwd", "x.gguf", "~/x.gguf", "a,b,c", "qwen2.5:7b", "../../x", "x" * 5000]
# What a pair may answer that cannot be had, or a question that finds no room: sentences, no deaths.
PLAIN = {"load_failed", "model_not_found", "context_length_exceeded", "queue_full", "bad_gguf"}


@pytest.fixture
def real() -> Iterator[Home]:
    """With the real engine and the pair inside the package."""
    with temporary_home() as home:
        yield home


def asked(home: Home) -> tuple[int, str]:
    answer = home.chat("hi", max_tokens=2)
    return answer.status, "" if answer.status == 200 else answer.error["code"]


def typed(home: Home, *words: str) -> subprocess.CompletedProcess[str]:
    run = home.run(*words)
    assert run.returncode in (0, 1, 2), (words, run.stderr)
    assert "Traceback" not in run.stderr
    assert " bug " not in run.stderr, (words, run.stderr)
    return run


@pytest.mark.slow
def test_whatever_is_set_works_or_says_plainly_why_not(real: Home) -> None:
    dice = random.Random(os.environ.get("LOCALSPEC_TEST_SEED", "settings"))
    file = real.root / "config" / "config.toml"
    done: list[Any] = []
    accepted = 0
    assert typed(real, "start").returncode == 0
    while accepted < STEPS:
        key, text = dice.choice(KEYS), dice.choice(NUMBERS if dice.random() < 0.6 else WORDS)
        before = file.read_bytes() if file.exists() else b""
        run = typed(real, "config", "set", key, "--", text)
        done.append((key, text, run.returncode))
        if run.returncode:
            assert run.stderr.count("localspec: ") == 1, run.stderr
            after = file.read_bytes() if file.exists() else b""
            assert tomllib.loads(after.decode()) == tomllib.loads(before.decode()), done
            continue
        accepted += 1
        status, code = asked(real)
        assert status == 200 or code in PLAIN, (done, code)
        if dice.random() < 0.3:
            for command in ("config", "list", "status", "doctor"):
                typed(real, command)
        if dice.random() < 0.2:  # and a daemon starts with it
            assert typed(real, "stop").returncode == 0
            wait_for(lambda: not real.socket.exists(), "its end")
            typed(real, "ask", "-n", "2", "hi")
            assert typed(real, "start").returncode == 0, done
        if dice.random() < 0.3:
            for each in tomllib.loads(file.read_text()):
                assert typed(real, "config", "unset", each).returncode == 0
            assert asked(real) == (200, ""), done
    assert real.status()["counts"]["worker_deaths"] == 0, done
