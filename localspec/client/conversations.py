"""Kept conversations, one method per endpoint. Apart from api.py, which is on the way of `ask`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from localspec.client.api import Client

_BASE = "/localspec/conversations"


class ConversationsClient(Client):
    """The daemon's /localspec/conversations and /localspec/statistics.

    `name`: an id, the beginning of one, or "last".
    """

    def conversations(self, limit: int = 50, search: str = "") -> list[dict[str, Any]]:
        """The newest first."""
        target = f"{_BASE}?limit={limit}&search={quote(search, safe='')}"
        found: list[dict[str, Any]] = self._json("GET", target)["conversations"]
        return found

    def conversation(self, name: str, *, wait: bool = False) -> dict[str, Any]:
        """`wait`: until the answers under way in it have ended."""
        return self._json("GET", f"{_BASE}/{quote(name, safe='')}{'?wait=true' * wait}")

    def forget(self, name: str) -> str:
        """The id of what was removed."""
        return str(self._json("DELETE", f"{_BASE}/{quote(name, safe='')}")["id"])

    def forget_all(self) -> int:
        """How many there were."""
        return int(self._json("DELETE", _BASE)["removed"])

    def statistics(self, days: int, pair: str = "") -> dict[str, Any]:
        """Kept answers of the `days` that end today added up; with `pair` of that pair alone."""
        target = f"/localspec/statistics?days={days}&pair={quote(pair, safe='')}"
        return self._json("GET", target)

    def undo(self, name: str) -> str:
        """Take back the last question and what followed; the question."""
        return str(self._json("POST", f"{_BASE}/{quote(name, safe='')}/undo", {})["question"])
