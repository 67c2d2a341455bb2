"""What an engine has to be told of a pair, read from the daemon's answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec.errors import UsageError

USUAL_DEPTH = 3  # what llama-server and SGLang draft where nothing is said
_DEEPEST = 10
_ENOUGH = 500  # drafted tokens that make a share
# One token of a draft model against a pass of its target, where their sizes are not known.
_DRAFT_COST = 0.1
_HEADS_COST = 0.05
_TEXT_COST = 0.02  # nothing is run for it, but a wider pass is not quite free
_QUANT = re.compile(
    r"(?i)(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|MXFP4\w*))(?=[-.])"
)
_BILLIONS = re.compile(r"-(\d+(?:\.\d+)?)B\b")


@dataclass(frozen=True, slots=True)
class Model:
    """A target, or what drafts for one: a file of a repository (`repo` empty: of this machine, at `path`).

    original: the same model in its makers' format, a repository or a folder. vocabulary: rows of token
    embeddings, 0 where nobody said. size: bytes, 0 unknown.
    """

    file: str
    repo: str = ""
    path: str = ""
    original: str = ""
    vocabulary: int = 0
    size: int = 0

    @property
    def quantized(self) -> str:
        """The repository with the quantization, as llama.cpp names a file of it."""
        found = _QUANT.search(self.file)
        return f"{self.repo}:{found[1].upper()}" if found else self.repo

    @property
    def billions(self) -> float:
        """Parameters, as the original's name says them; 0: it does not."""
        found = _BILLIONS.search(self.original)
        return float(found[1]) if found else 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """kind: what drafts, as in the protocol. accepted of `drafted` tokens, as the history has them."""

    name: str
    kind: str
    target: Model
    draft: Model | None = None
    roles: tuple[str, ...] = ("chat",)
    here: bool = False
    drafted: int = 0
    accepted: int = 0

    @property
    def served(self) -> str:
        """A name that every engine and `localspec add` take."""
        found = re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("-._")
        return found[-40:].lstrip("-._") or "model"

    @property
    def called(self) -> str:
        """What an engine is to call it: where it fills in as its makers do, which tells its markers."""
        return Path(self.target.original).name if "fim" in self.roles else self.served

    @property
    def depth(self) -> int:
        """Tokens to draft at once; 0: drafts do not pay.

        The accepted share is ours; the cost is that of an engine whose wide passes cost what narrow ones
        do, as on a GPU with one answer at a time: what a pass yields against what drafting for it costs.
        """
        if self.drafted < _ENOUGH:
            return USUAL_DEPTH
        share, cost = min(self.accepted / self.drafted, 0.99), self._cost

        def gain(depth: int) -> float:
            return (1 - share ** (depth + 1)) / (1 - share) / (1 + cost * depth)

        return max(range(_DEEPEST + 1), key=gain)

    @property
    def _cost(self) -> float:
        if self.kind == "ngram":
            return _TEXT_COST
        if self.kind != "model" or self.draft is None:
            return _HEADS_COST
        known = self.draft.size and self.target.size
        return self.draft.size / self.target.size if known else _DRAFT_COST

    @property
    def measured(self) -> str:
        """Where the depth is from, as a sentence."""
        if self.drafted < _ENOUGH:
            return f"No measurement for this pair; using draft depth {self.depth}."
        share = f"{self.accepted / self.drafted:.0%} of {self.drafted} drafted tokens were accepted here"
        return f"Depth {self.depth}: {share}." if self.depth else f"No drafts: only {share}."


def read(
    name: str, entry: Mapping[str, Any], view: Mapping[str, Any] | None, total: Mapping[str, Any]
) -> Pair:
    """From a line of the list (empty for files that are no pair), the pair's own view where it is here, and
    what the history has of its answers.

    Raises:
        UsageError: it is no pair for an engine of another machine.
    """
    kind = str((view or entry)["kind"])
    if kind == "upstream":
        raise UsageError(f"'{name}' is served by another server already.")
    if kind == "none":
        raise UsageError(f"'{name}' turns texts into numbers; only pairs that write are exported.")
    drafts = kind in ("model", "mtp-sidecar")
    if view:
        target, draft = _here(view["target"]), _here(view["draft"]) if drafts else None
    else:
        target, draft = _afar(entry["target"]), _afar(entry["draft"]) if drafts else None
    originals = [*entry.get("originals", ())]
    if originals:
        target = _with(target, originals[0])
        draft = _with(draft, originals[1]) if draft else None
    told = str((view or entry)["name"])
    counts = {key: int(total.get(key) or 0) for key in ("drafted", "accepted")}
    return Pair(told, kind, target, draft, tuple((view or entry)["roles"]), bool(view), **counts)


def _with(model: Model, original: Mapping[str, Any]) -> Model:
    rows = int(original["vocabulary"]) or model.vocabulary
    return replace(model, original=str(original["repo"]), vocabulary=rows)


def _here(model: Mapping[str, Any]) -> Model:
    return Model(
        str(model["file"]),
        str(model["repo"]),
        str(model["path"]),
        vocabulary=int(model["vocabulary"]),
        size=int(model["size"]),
    )


def _afar(named: str) -> Model:
    owner, repo, file = named.split("/", 2)
    return Model(file, f"{owner}/{repo}")
