"""What an engine needs to know about a pair, read from the daemon's answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec.errors import UsageError

USUAL_DEPTH = 3  # the default of llama-server and SGLang, in tokens
_MAX_DEPTH = 10  # tokens
_MIN_DRAFTED_TOKENS = 500  # below which the acceptance rate is not used
# Costs of drafting one token, as fractions of a target pass: with a draft model of unknown size, with
# heads, and from the text. The last runs no model, but a wider pass is not quite free.
_DRAFT_MODEL_COST = 0.1
_HEADS_COST = 0.05
_NGRAM_COST = 0.02
_QUANT = re.compile(
    r"(?i)(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|MXFP4\w*))(?=[-.])"
)
_BILLIONS = re.compile(r"-(\d+(?:\.\d+)?)B\b")


@dataclass(frozen=True, slots=True)
class Model:
    """A target or a draft."""

    file: str
    # The repository of the file; empty for a file of this machine, at `path`.
    repo: str = ""
    path: str = ""
    # The same model in its makers' format: a repository or a folder.
    original: str = ""
    # Rows of token embeddings; 0 if not known.
    vocabulary: int = 0
    # Bytes; 0 if not known.
    size: int = 0

    @property
    def quantized(self) -> str:
        """The repository with the quantization, in the form that llama.cpp expects."""
        match = _QUANT.search(self.file)
        return f"{self.repo}:{match[1].upper()}" if match else self.repo

    @property
    def billions(self) -> float:
        """Parameters in billions, from the original's name; 0 if it does not say."""
        match = _BILLIONS.search(self.original)
        return float(match[1]) if match else 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair to be exported."""

    name: str
    # What drafts, as in the protocol.
    kind: str
    target: Model
    draft: Model | None = None
    roles: tuple[str, ...] = ("chat",)
    # The pair's files are on this machine.
    here: bool = False
    # Drafted tokens in the history, of which `accepted` were accepted.
    drafted: int = 0
    accepted: int = 0

    @property
    def served(self) -> str:
        """A name that every engine and `localspec add` accept."""
        name = re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("-._")
        return name[-40:].lstrip("-._") or "model"

    @property
    def called(self) -> str:
        """The model's name at the engine.

        A pair for fill-in-the-middle keeps its makers' name, by which the engine recognizes the
        markers.
        """
        return Path(self.target.original).name if "fim" in self.roles else self.served

    @property
    def depth(self) -> int:
        """Tokens to draft per round; 0: drafts do not pay.

        It maximizes the yield of a pass divided by its cost. The acceptance rate is measured here.
        The cost is that of an engine whose wide passes cost as much as narrow ones, as on a GPU
        with one answer at a time.
        """
        if self.drafted < _MIN_DRAFTED_TOKENS:
            return USUAL_DEPTH
        acceptance, cost = min(self.accepted / self.drafted, 0.99), self._cost

        def gain(depth: int) -> float:
            return (1 - acceptance ** (depth + 1)) / (1 - acceptance) / (1 + cost * depth)

        return max(range(_MAX_DEPTH + 1), key=gain)

    @property
    def _cost(self) -> float:
        if self.kind == "ngram":
            return _NGRAM_COST
        if self.kind != "model" or self.draft is None:
            return _HEADS_COST
        known = self.draft.size and self.target.size
        return self.draft.size / self.target.size if known else _DRAFT_MODEL_COST

    @property
    def measured(self) -> str:
        """A sentence about where the depth comes from."""
        if self.drafted < _MIN_DRAFTED_TOKENS:
            return f"No measurement for this pair; using draft depth {self.depth}."
        acceptance = f"{self.accepted / self.drafted:.0%} of {self.drafted} drafted tokens were accepted here"
        return (
            f"Depth {self.depth}: {acceptance}." if self.depth else f"No drafts: only {acceptance}."
        )


def read(
    name: str, entry: Mapping[str, Any], view: Mapping[str, Any] | None, total: Mapping[str, Any]
) -> Pair:
    """Return the pair of an entry of the list.

    entry: empty for files that are no pair. view: the pair's own view if it is on this machine.
    total: the history's counts for its answers.

    Raises:
        UsageError: the pair cannot be served by an engine of another machine.
    """
    kind = str((view or entry)["kind"])
    if kind == "upstream":
        raise UsageError(f"'{name}' is served by another server already.")
    if kind == "none":
        raise UsageError(f"'{name}' turns texts into numbers; only pairs that write are exported.")
    drafts = kind in ("model", "mtp-sidecar")
    if view:
        target, draft = _from_view(view["target"]), _from_view(view["draft"]) if drafts else None
    else:
        target, draft = (
            _from_catalogue(entry["target"]),
            _from_catalogue(entry["draft"]) if drafts else None,
        )
    originals = [*entry.get("originals", ())]
    if originals:
        target = _with_original(target, originals[0])
        draft = _with_original(draft, originals[1]) if draft else None
    pair_name = str((view or entry)["name"])
    counts = {key: int(total.get(key) or 0) for key in ("drafted", "accepted")}
    return Pair(
        pair_name, kind, target, draft, tuple((view or entry)["roles"]), bool(view), **counts
    )


def _with_original(model: Model, original: Mapping[str, Any]) -> Model:
    rows = int(original["vocabulary"]) or model.vocabulary
    return replace(model, original=str(original["repo"]), vocabulary=rows)


def _from_view(model: Mapping[str, Any]) -> Model:
    return Model(
        str(model["file"]),
        str(model["repo"]),
        str(model["path"]),
        vocabulary=int(model["vocabulary"]),
        size=int(model["size"]),
    )


def _from_catalogue(named: str) -> Model:
    owner, repo, file = named.split("/", 2)
    return Model(file, f"{owner}/{repo}")
