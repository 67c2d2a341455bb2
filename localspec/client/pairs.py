"""Pairs and pulls, one method per endpoint. Apart from api.py, which is on the way of `ask`."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any
from urllib.parse import quote

from localspec.client.api import Client


class PairsClient(Client):
    """The daemon's /localspec/pairs, /pulls, /gc, /drafts and /unload."""

    def pairs(self, *, everything: bool = False) -> dict[str, Any]:
        """What is here; with `everything` the catalogue too."""
        return self._json("GET", f"/localspec/pairs?all={int(everything)}")

    def pair(self, name: str, context: int = 0) -> dict[str, Any]:
        return self._json("GET", f"/localspec/pairs/{quote(name, safe='')}?context={context}")

    def add(
        self, name: str, target: str, draft: str | None, roles: list[str], *, replace: bool = False
    ) -> dict[str, Any]:
        """Files by absolute paths."""
        body = {"name": name, "target": target, "draft": draft, "roles": roles, "replace": replace}
        return self._json("POST", "/localspec/pairs", body)

    def remove(self, name: str) -> dict[str, Any]:
        return self._json("DELETE", f"/localspec/pairs/{quote(name, safe='')}")

    def verify(self, name: str) -> Generator[dict[str, Any], None, None]:
        return self._events("POST", f"/localspec/pairs/{quote(name, safe='')}/verify")

    def collect(self, *, dry_run: bool = False) -> dict[str, Any]:
        return self._json("POST", "/localspec/gc", {"dry_run": dry_run})

    def drafts(
        self, target: str, folders: list[str], *, measure: bool = False
    ) -> Generator[dict[str, Any], None, None]:
        body = {"target": target, "folders": folders, "measure": measure}
        return self._events("POST", "/localspec/drafts", body)

    def start_pull(self, name: str, **options: Any) -> dict[str, Any]:
        """Start a pull or join the running one; its state. `options`: more of PullRequest."""
        return self._json("POST", "/localspec/pulls", {"name": name, **options, **_environment()})

    def pulls(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self._json("GET", "/localspec/pulls")["pulls"]
        return states

    def watch_pull(self, name: str) -> Generator[dict[str, Any], None, None]:
        """Its states until the last one. Closing the iterator leaves the pull alone."""
        return self._events("GET", f"/localspec/pulls/{quote(name, safe='')}/events")

    def cancel_pull(self, name: str) -> dict[str, Any]:
        return self._json("DELETE", f"/localspec/pulls/{quote(name, safe='')}")

    def unload(self) -> bool:
        """Whether a pair was loaded."""
        return bool(self._json("POST", "/localspec/unload", {})["unloaded"])


def _environment() -> dict[str, Any]:
    """What this shell says about the hub; the daemon may have been started from another."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return {
        "endpoint": os.environ.get("HF_ENDPOINT") or None,
        "token": os.environ.get("HF_TOKEN") or None,
        "offline": any(os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE") for n in names),
    }
