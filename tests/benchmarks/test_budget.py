"""Several pairs under a budget: what is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.budget import ask


class Told:
    """A daemon that keeps what editors ask, and has no connection for anybody else."""

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


def test_every_editor_is_one_of_its_own_whose_request_no_other_takes_over() -> None:
    told: Any = Told()
    for number in range(40):
        ask(told, ["pair"], number)
    assert len({*told.editors}) == len(told.editors) > 1
