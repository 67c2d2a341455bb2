"""A client for kept conversations, with one method per endpoint.

It is separate from api.py because `ask` would have to import it.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from localspec.client.api import Client

_BASE = "/localspec/conversations"


class ConversationsClient(Client):
    """A client of the daemon's /localspec/conversations and /localspec/statistics.

    `name` is an id, the beginning of an id, or "last".
    """

    def conversations(self, limit: int = 50, search: str = "") -> list[dict[str, Any]]:
        """Return the kept conversations that match `search`, the newest first."""
        target = f"{_BASE}?limit={limit}&search={quote(search, safe='')}"
        conversations: list[dict[str, Any]] = self._json("GET", target)["conversations"]
        return conversations

    def conversation(self, name: str, *, wait: bool = False) -> dict[str, Any]:
        """Return a conversation. With `wait`, first wait until its running answers have ended."""
        return self._json("GET", f"{_BASE}/{quote(name, safe='')}{'?wait=true' * wait}")

    def forget(self, name: str) -> str:
        """Remove a conversation and return its id."""
        return str(self._json("DELETE", f"{_BASE}/{quote(name, safe='')}")["id"])

    def forget_all(self) -> int:
        """Remove all conversations and return how many there were."""
        return int(self._json("DELETE", _BASE)["removed"])

    def statistics(self, days: int, pair: str = "") -> dict[str, Any]:
        """Return totals of the kept answers of the last `days` days, today included, or of one `pair`."""
        target = f"/localspec/statistics?days={days}&pair={quote(pair, safe='')}"
        return self._json("GET", target)

    def undo(self, name: str) -> str:
        """Remove the last question and everything after it, and return that question."""
        return str(self._json("POST", f"{_BASE}/{quote(name, safe='')}/undo", {})["question"])
