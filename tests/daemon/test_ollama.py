"""Ollama's API: the official client, and what it looks like on the wire."""

from __future__ import annotations

from tests.support.daemons import Home


def test_errors_have_ollamas_shape_whatever_is_wrong(api: Home) -> None:
    answer = api.request("GET", "/api/nothing")
    assert answer.status == 404
    assert answer.json == {"error": "GET /api/nothing: Not Found."}
