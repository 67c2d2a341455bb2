"""References within a JSON Schema document."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from urllib.parse import unquote


class Document:
    """A schema and the places in it that references lead to."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root

    def target(self, reference: str) -> Any:
        """Return what a reference leads to; None if that is not in the document, or is no schema."""
        base, _, fragment = reference.partition("#")
        start: Any = self.root
        if base and base != self.root.get("$id", self.root.get("id")):
            start = self._identified.get(base)
        if start is None:
            return None
        if not fragment.startswith("/"):
            return start if not fragment else self._anchored.get(unquote(fragment))
        found = start
        for name in fragment.split("/")[1:]:
            found = _step(found, unquote(name).replace("~1", "/").replace("~0", "~"))
        return found if isinstance(found, dict | bool) else None

    @cached_property
    def _objects(self) -> list[dict[str, Any]]:
        """Every object of the document."""
        found, pending = [], [self.root]
        while pending:
            value: Any = pending.pop()
            if isinstance(value, dict):
                found.append(value)
                pending.extend(value.values())
            elif isinstance(value, list):
                pending.extend(value)
        return found

    @cached_property
    def _anchored(self) -> dict[str, Any]:
        anchors: dict[str, Any] = {}
        for each in self._objects:
            for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
                name = each.get(keyword)
                if isinstance(name, str) and (not keyword.endswith("id") or name.startswith("#")):
                    anchors.setdefault(name.removeprefix("#"), each)
        return anchors

    @cached_property
    def _identified(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        base = str(self.root.get("$id", "")).rpartition("/")[0]
        for each in self._objects:
            name = each.get("$id")
            if isinstance(name, str):
                found.setdefault(name, each)
                if base and name.startswith(f"{base}/"):
                    found.setdefault(name.removeprefix(f"{base}/"), each)
        return found


def _step(found: Any, name: str) -> Any:
    if isinstance(found, dict):
        return found.get(name)
    if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
        return found[int(name)]
    return None
