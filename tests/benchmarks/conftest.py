"""A program that answers like llama-server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def fake_server(tmp_path: Path) -> Path:
    program = tmp_path / "llama-server"
    script = Path(__file__).with_name("fake_llama_server.py")
    root = Path(__file__).parents[2]
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{root}:{root}/scripts" exec "{sys.executable}" "{script}" "$@"\n'
    )
    program.chmod(0o755)
    return program
