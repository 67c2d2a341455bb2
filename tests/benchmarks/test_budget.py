"""Benchmark of several pairs under a budget: the requests that it sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.budget import ask


class RecordingClient:
    """A client that records requests of editors and accepts no other connection."""

    def __init__(self) -> None:
        self.editors: list[str] = []

    def post(self, target: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if target == "/infill":
            self.editors.append(body["user"])
        return {}

    def stream(self, _target: str, _body: Mapping[str, Any], *, empty: bool) -> None:
        assert empty

    def dial(self) -> None:
        raise OSError


def test_every_editor_has_its_own_user_name() -> None:
    client: Any = RecordingClient()
    for number in range(40):
        ask(client, ["pair"], number)
    assert len({*client.editors}) == len(client.editors) > 1
