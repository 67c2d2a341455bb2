"""A client for pairs and pulls, with one method per endpoint.

It is separate from api.py because `ask` would have to import it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from localspec.client.api import Client
from localspec.errors import ModelNotFound
from localspec.paths import MODEL_FOLDER_VARIABLES


class PairsClient(Client):
    """A client of the daemon's /localspec/pairs, /pulls, /gc, /drafts, /disk, /load and /unload."""

    def pairs(self, *, everything: bool = False) -> dict[str, Any]:
        """Return the installed pairs, and with `everything` those of the catalogue too."""
        return self._json("GET", f"/localspec/pairs?all={int(everything)}")

    def named_like(self, parts: list[str]) -> str:
        """Return the shortest name of an installed pair that contains all `parts`, ignoring case.

        Raises:
            ModelNotFound: There is none. The message names the installed pairs.
        """
        pairs, parts = self.pairs(everything=True)["pairs"], [part.lower() for part in parts]
        matches = [pair for pair in pairs if all(part in pair["name"].lower() for part in parts)]
        if installed := [str(pair["name"]) for pair in matches if pair["here"]]:
            return min(installed, key=lambda name: (len(name), name))
        hint = f"installed: {', '.join(pair['name'] for pair in pairs if pair['here'])}"
        if matches:
            hint = f"to download one that does: localspec pull {matches[0]['name']}"
        quoted = " and ".join(f"'{part}'" for part in parts)
        raise ModelNotFound(f"No installed pair has {quoted} in its name; {hint}")

    def pair(self, name: str, context: int = 0) -> dict[str, Any]:
        return self._json("GET", f"/localspec/pairs/{quote(name, safe='')}?context={context}")

    def add(
        self, name: str, target: str, draft: str | None, roles: list[str], **options: Any
    ) -> dict[str, Any]:
        """Add a pair from files: absolute paths, or Ollama's names.

        `options` are other fields of the request. Without `hash_now` the files are hashed when the pair is
        loaded.
        """
        body = {"name": name, "target": target, "draft": draft, "roles": roles, **options}
        return self._json("POST", "/localspec/pairs", body)

    def add_upstream(self, name: str, upstream: str, **settings: Any) -> dict[str, Any]:
        """Add a pair that another server answers for.

        `settings` are the keys of models.toml, and `replace`.
        """
        body = {"name": name, "upstream": upstream, **settings}
        return self._json("POST", "/localspec/upstreams", body)

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
        """Yield progress and finally the models on this disk. `folders` are absolute paths."""
        given = {name: os.environ.get(name) for name in MODEL_FOLDER_VARIABLES}
        environment = {name: value for name, value in given.items() if value}
        body = {"folders": folders, "environment": environment}
        return self._events("POST", "/localspec/disk", body)

    def start_pull(self, name: str, **options: Any) -> dict[str, Any]:
        """Start a pull or join the running one, and return its state. `options`: as in PullRequest."""
        body = {"name": name, **options, "network": _network_variables(os.environ)}
        return self._json("POST", "/localspec/pulls", body)

    def pulls(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self._json("GET", "/localspec/pulls")["pulls"]
        return states

    def watch_pull(self, name: str) -> Generator[dict[str, Any], None, None]:
        """Yield the states of a pull until the last one. Closing the iterator does not affect the pull."""
        return self._events("GET", f"/localspec/pulls/{quote(name, safe='')}/events")

    def cancel_pull(self, name: str) -> dict[str, Any]:
        return self._json("DELETE", f"/localspec/pulls/{quote(name, safe='')}")

    def load(self, name: str = "") -> Generator[dict[str, Any], None, None]:
        """Load a pair, or the configured one if `name` is empty, and yield its state whenever that changes.

        Raises LocalspecError if the pair cannot be loaded.
        """
        return self._events("POST", "/localspec/load", {"model": name})

    def unload(self, name: str = "") -> list[str]:
        """Unload the pair `name`, or all pairs, and return the names of those that were loaded."""
        names: list[str] = self._json("POST", "/localspec/unload", {"model": name})["pairs"]
        return names


# Environment variables that are sent to the daemon as they are.
_PLAIN_VARIABLES = (
    "HF_TOKEN",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)
# Variables whose value is a path, which is made absolute.
_PATH_VARIABLES = ("HF_TOKEN_PATH", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


def _network_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the shell's network settings. The daemon may have been started from another shell."""
    variables = {name: environment.get(name, "") for name in _PLAIN_VARIABLES}
    variables["HF_TOKEN"] = variables["HF_TOKEN"] or environment.get("HUGGING_FACE_HUB_TOKEN", "")
    for name in _PROXY_VARIABLES:
        variables[name] = environment.get(name.lower(), environment.get(name, ""))
    for name in _PATH_VARIABLES:
        variables[name] = _absolute(environment.get(name, ""))
    folders = environment.get("SSL_CERT_DIR", "").split(os.pathsep)
    variables["SSL_CERT_DIR"] = os.pathsep.join(_absolute(folder) for folder in folders)
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    variables["HF_HOME"] = _absolute(environment.get("HF_HOME") or f"{cache}/huggingface")
    return {name: value for name, value in variables.items() if value}


def _absolute(path: str) -> str:
    """Return an absolute path, because the daemon has another working directory and perhaps another home."""
    expanded = os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 - raises nothing
    return str(Path(expanded).absolute()) if path else ""
