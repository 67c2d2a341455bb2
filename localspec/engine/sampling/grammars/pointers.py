"""Resolve the references within a JSON Schema document."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from urllib.parse import unquote


class Document:
    """A JSON Schema document whose references can be resolved."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root

    def target(self, reference: str) -> Any:
        """Return the schema that a reference leads to, or None if the document does not have it."""
        base, _, fragment = reference.partition("#")
        start: Any = self.root
        if base and base != self.root.get("$id", self.root.get("id")):
            start = self._identified.get(base)
        if start is None:
            return None
        if not fragment.startswith("/"):
            return start if not fragment else self._anchored.get(unquote(fragment))
        node = start
        for name in fragment.split("/")[1:]:
            node = _child(node, unquote(name).replace("~1", "/").replace("~0", "~"))
        return node if isinstance(node, dict | bool) else None

    @cached_property
    def _objects(self) -> list[dict[str, Any]]:
        """Every JSON object of the document."""
        objects, pending = [], [self.root]
        while pending:
            value: Any = pending.pop()
            if isinstance(value, dict):
                objects.append(value)
                pending.extend(value.values())
            elif isinstance(value, list):
                pending.extend(value)
        return objects

    @cached_property
    def _anchored(self) -> dict[str, Any]:
        anchors: dict[str, Any] = {}
        for schema in self._objects:
            for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
                name = schema.get(keyword)
                if isinstance(name, str) and (not keyword.endswith("id") or name.startswith("#")):
                    anchors.setdefault(name.removeprefix("#"), schema)
        return anchors

    @cached_property
    def _identified(self) -> dict[str, Any]:
        schemas: dict[str, Any] = {}
        base = str(self.root.get("$id", "")).rpartition("/")[0]
        for schema in self._objects:
            name = schema.get("$id")
            if isinstance(name, str):
                schemas.setdefault(name, schema)
                if base and name.startswith(f"{base}/"):
                    schemas.setdefault(name.removeprefix(f"{base}/"), schema)
        return schemas


def _child(node: Any, name: str) -> Any:
    """Return the child of a JSON value under a key or index, or None."""
    if isinstance(node, dict):
        return node.get(name)
    if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
        return node[int(name)]
    return None
