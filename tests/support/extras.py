"""Marks for tests of the core that also use an extra, which an installation may lack."""

from __future__ import annotations

import pytest

from localspec import extras
from localspec.cli.app import COMMANDS


def needs(extra: str) -> pytest.MarkDecorator:
    """Leave a test out where this installation lacks the extra."""
    return pytest.mark.skipif(
        not extras.is_here(extra), reason=f"this installation has no extra {extra}"
    )


def has_command(name: str) -> bool:
    """Return whether this installation has a command, or the word is an option."""
    return name in COMMANDS or name.startswith("-")
