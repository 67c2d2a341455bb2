"""Pairs and pulls, one method per endpoint. Apart from api.py, which is on the way of `ask`."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from localspec.client.api import Client
from localspec.errors import ModelNotFound
from localspec.paths import MODEL_PLACES


class PairsClient(Client):
    """The daemon's /localspec/pairs, /pulls, /gc, /drafts and /unload."""

    def pairs(self, *, everything: bool = False) -> dict[str, Any]:
        """What is here; with `everything` the catalogue too."""
        return self._json("GET", f"/localspec/pairs?all={int(everything)}")

    def named_like(self, parts: list[str]) -> str:
        """The installed pair in whose name all `parts` occur, in any case; of several the shortest.

        Raises:
            ModelNotFound: there is none; the message names the pairs there are.
        """
        listed = self.pairs(everything=True)["pairs"]
        parts = [each.lower() for each in parts]
        found = [each for each in listed if all(part in each["name"].lower() for part in parts)]
        here = sorted((each["name"] for each in found if each["here"]), key=lambda n: (len(n), n))
        if here:
            return str(here[0])
        if found:
            pull = f"to download one that does: localspec pull {found[0]['name']}"
        else:
            pull = f"installed: {', '.join(each['name'] for each in listed if each['here'])}"
        said = " and ".join(f"'{each}'" for each in parts)
        raise ModelNotFound(f"No installed pair has {said} in its name; {pull}")

    def pair(self, name: str, context: int = 0) -> dict[str, Any]:
        return self._json("GET", f"/localspec/pairs/{quote(name, safe='')}?context={context}")

    def add(
        self,
        name: str,
        target: str,
        draft: str | None,
        roles: list[str],
        *,
        replace: bool = False,
        hash_now: bool = True,
        pooling: str | None = None,
    ) -> dict[str, Any]:
        """Files by absolute paths or Ollama's names; without `hash_now` they are hashed when loaded."""
        body = {"name": name, "target": target, "draft": draft, "roles": roles, "replace": replace}
        more = {"hash_now": hash_now, "pooling": pooling}
        return self._json("POST", "/localspec/pairs", {**body, **more})

    def add_upstream(self, name: str, upstream: str, **said: Any) -> dict[str, Any]:
        """A pair that another server answers for; `said`: the keys of models.toml, and `replace`."""
        return self._json(
            "POST", "/localspec/upstreams", {"name": name, "upstream": upstream, **said}
        )

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

    def disk(self, folders: list[str]) -> Generator[dict[str, Any], None, None]:
        """What is being read, and at last the models on this disk; folders by absolute paths."""
        told = {name: os.environ[name] for name in MODEL_PLACES if os.environ.get(name)}
        body = {"folders": folders, "environment": told}
        return self._events("POST", "/localspec/disk", body)

    def start_pull(self, name: str, **options: Any) -> dict[str, Any]:
        """Start a pull or join the running one; its state. `options`: more of PullRequest."""
        body = {"name": name, **options, "network": _network(os.environ)}
        return self._json("POST", "/localspec/pulls", body)

    def pulls(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self._json("GET", "/localspec/pulls")["pulls"]
        return states

    def watch_pull(self, name: str) -> Generator[dict[str, Any], None, None]:
        """Its states until the last one. Closing the iterator leaves the pull alone."""
        return self._events("GET", f"/localspec/pulls/{quote(name, safe='')}/events")

    def cancel_pull(self, name: str) -> dict[str, Any]:
        return self._json("DELETE", f"/localspec/pulls/{quote(name, safe='')}")

    def load(self, name: str = "") -> Generator[dict[str, Any], None, None]:
        """Load a pair, the configured one without a name; yield its state whenever that changes.

        Raises:
            LocalspecError: it cannot be loaded.
        """
        return self._events("POST", "/localspec/load", {"model": name})

    def unload(self, name: str = "") -> list[str]:
        """The pairs that were loaded: the one of that name, or all."""
        names: list[str] = self._json("POST", "/localspec/unload", {"model": name})["pairs"]
        return names


_VARIABLES = (
    "HF_TOKEN",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)
_PATHS = ("HF_TOKEN_PATH", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


def _network(environment: Mapping[str, str]) -> dict[str, str]:
    """What a shell says about the network; the daemon may have been started from another."""
    said = {name: environment.get(name, "") for name in _VARIABLES}
    said["HF_TOKEN"] = said["HF_TOKEN"] or environment.get("HUGGING_FACE_HUB_TOKEN", "")
    for name in _PROXIES:
        said[name] = environment.get(name.lower(), environment.get(name, ""))
    for name in _PATHS:
        said[name] = _absolute(environment.get(name, ""))
    folders = environment.get("SSL_CERT_DIR", "").split(os.pathsep)
    said["SSL_CERT_DIR"] = os.pathsep.join(_absolute(each) for each in folders)
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    said["HF_HOME"] = _absolute(environment.get("HF_HOME") or f"{cache}/huggingface")
    return {name: value for name, value in said.items() if value}


def _absolute(path: str) -> str:
    """The daemon has another folder, and perhaps another home."""
    named = os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 - raises nothing
    return str(Path(named).absolute()) if path else ""
