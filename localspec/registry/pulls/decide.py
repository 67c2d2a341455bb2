"""From what a person asked for to a pair: which file of a repository, and what drafts for it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from localspec.errors import (
    LocalspecError,
    ModelNotFound,
    Offline,
    PullCancelled,
    RegistryError,
    Unreachable,
)
from localspec.registry.catalogue import Catalogue, Pair, Weights
from localspec.registry.disk.discovery import find_models
from localspec.registry.header import fit
from localspec.registry.header.model import Model, read_local_model
from localspec.registry.header.need import Load
from localspec.registry.header.pairing import check_pair
from localspec.registry.hub.cache import list_in_cache
from localspec.registry.hub.hub import Listed
from localspec.registry.hub.repository import (
    Choice,
    Offer,
    Reference,
    best,
    choices,
    heads,
    matching,
    model_name,
)
from localspec.registry.hub.retry import patiently
from localspec.registry.pulls.plan import PlannedModel, Planner
from localspec.registry.pulls.wanted import Wanted, as_weights
from localspec.registry.store.records import Record, roles_of

# A draft of more than a third of the target's weights takes about as long as it saves.
_LEAST_RATIO = 3
_MOST_LOOKED_AT = 3  # drafts of the catalogue; each costs the reading of a header
_MANY_TOKENS = 32_768  # of context: a quantization that leaves no room for as many is too large
_SIZE = re.compile(r"[-_]?(?<![a-z0-9.])[ea]?\d+(\.\d+)?[bm](?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class Decision:
    """The pair; the models whose headers were read on the way; and what to tell the person.

    `offers`: the quantizations there are, where none was named.
    """

    pair: Pair
    known: Mapping[Weights, PlannedModel] = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    said: tuple[str, ...] = ()


def decide(
    planner: Planner, wanted: Wanted, catalogue: Catalogue, cancel: threading.Event | None = None
) -> Decision:
    """The pair that is meant. A pair that was pulled as this before stays what it was.

    Raises:
        NotOnHub, HubError and below; InvalidRequest: which of several models is not said.
        BadGguf, UnsafeModel: the target. NotMatched, CannotRollBack: a draft that was named.
    """
    if wanted.pair and (wanted.decided or not (wanted.draft or wanted.no_draft)):
        return Decision(wanted.pair)
    return _Deciding(planner, wanted, catalogue, cancel).run()


class _Deciding:
    """One decision on its way; headers are read once."""

    def __init__(
        self,
        planner: Planner,
        wanted: Wanted,
        catalogue: Catalogue,
        cancel: threading.Event | None,
    ) -> None:
        self._planner, self._wanted = planner, wanted
        self._catalogue, self._cancel = catalogue, cancel
        self._known: dict[Weights, PlannedModel] = {}
        self._offers: tuple[Offer, ...] = ()
        self._here = _here(planner, wanted)

    def run(self) -> Decision:
        wanted, said = self._wanted, ""
        if wanted.pair:
            pair, listed = wanted.pair, tuple[Listed, ...]()
        else:
            assert wanted.target
            listed = self._list(wanted.target)
            pair = self._target(wanted.target, listed)
        if wanted.no_draft:
            pair = _with(pair)
        elif wanted.draft:
            pair = _with(pair, draft=self._draft(wanted.draft))
        elif self._here and self._here.draft:
            pair = _with(pair, draft=as_weights(self._here.draft, self._planner.store.part_path))
        else:
            pair, said = self._proposed(pair, listed)
        return Decision(pair, self._known, self._offers, (said,) if said else ())

    # ------------------------------------------------------------------ which file

    def _list(self, wanted: Reference) -> tuple[Listed, ...]:
        """What the hub has; without a network what its cache here has of it."""
        try:
            return patiently(
                lambda: self._planner.hub.files(wanted.repo, wanted.revision),
                self._planner.first_contact,
                self._cancel,
            )
        except (Offline, Unreachable):
            cached = list_in_cache(wanted.repo, wanted.revision)
            if not cached:
                raise
            return cached

    def _target(self, wanted: Reference, listed: Sequence[Listed]) -> Pair:
        """A pair of this target alone."""
        found = matching(wanted, choices(listed, everything=bool(wanted.file)))
        kept = [each for each in found if self._here and each.file == self._here.target.file]
        chosen = kept[0] if kept else self._best(wanted, found)
        if not (wanted.quant or wanted.file):
            fits = self._fits(self._look(wanted, chosen).model)
            self._offers = tuple(
                Offer(
                    quant=each.label,
                    size=each.size,
                    fits=fits(each),
                    taken=each.file == chosen.file,
                )
                for each in found
            )
        header = self._look(wanted, chosen).model.header.metadata
        licence = header.get("general.license")
        fim = any(key.startswith("tokenizer.ggml.fim_pre") for key in header)
        return Pair(
            summary=f"{chosen.label} of {wanted.repo}",
            target=_weights(wanted, chosen),
            licence=licence[:80] if isinstance(licence, str) else "unknown",
            roles=("chat", "fim") if fim else ("chat",),
        )

    def _best(self, wanted: Reference, found: Sequence[Choice]) -> Choice:
        """First by the sizes alone, then by what the header of that one says of all."""
        if len(found) == 1:
            return found[0]
        guess = best(found, self._fits(None))
        return best(found, self._fits(self._look(wanted, guess).model))

    def _fits(self, like: Model | None) -> Callable[[Choice], fit.Fits]:
        """Whether memory holds a model, by its size and the header of one of another quantization."""
        free = self._planner.memory() if self._planner.memory else None

        def fits(choice: Choice) -> fit.Fits:
            if free is None:
                return "yes"
            needed = choice.size * 11 // 10  # caches and buffers, before a header says how large
            if like:
                load = Load(context=min(_MANY_TOKENS, like.context))
                needed = fit.needed(like, None, load) - like.weights + choice.size
            return fit.fits(needed, free)

        return fits

    def _look(self, wanted: Reference, chosen: Choice) -> PlannedModel:
        return self._read(_weights(wanted, chosen))

    def _read(self, weights: Weights, *, as_draft: bool = False) -> PlannedModel:
        if weights not in self._known:
            self._known[weights] = self._planner.look(weights, self._cancel, as_draft=as_draft)
        return self._known[weights]

    def _drafting(self, weights: Weights) -> Model:
        return self._read(weights, as_draft=True).model

    # ------------------------------------------------------------------ what drafts

    def _draft(self, wanted: Reference) -> Weights:
        """The draft that was named; of several quantizations the usual one of the most bits."""
        listed = self._list(wanted)
        found = matching(wanted, choices(listed, everything=bool(wanted.file)))
        return _weights(wanted, best(found, lambda _: "yes"))

    def _proposed(self, pair: Pair, listed: Sequence[Listed]) -> tuple[Pair, str]:
        """The best draft that can be had, and a sentence that says which and why.

        In this order: what the catalogue pairs this model, or another size of its family, with; heads
        in the target's own file; heads in a file beside it; a model on this disk; nothing, which
        leaves drafts from the text itself.
        """
        target = self._read(pair.target).model
        if target.pooling:
            return msgspec.structs.replace(pair, roles=roles_of(target.pooling)), ""
        for name, weights in self._of_the_catalogue(pair.target, target):
            if self._suits(target, partial(self._drafting, weights)):
                where = f"{weights.repo}/{weights.file}"
                return _with(
                    pair, draft=weights
                ), f"Draft: {where}, which the catalogue lists for {name}."
        if target.header.metadata.get(f"{target.architecture}.nextn_predict_layers"):
            pair = msgspec.structs.replace(pair, embedded_heads=True)
            return pair, "Drafts: this model's own heads (MTP), which are in its file."
        beside = heads(listed, pair.target.file)
        file = Weights(repo=pair.target.repo, file=beside, revision=pair.target.revision)
        if beside and self._suits(target, partial(self._drafting, file)):
            return (
                msgspec.structs.replace(pair, heads=file),
                f"Drafts: this model's own heads (MTP), {beside} in the same repository.",
            )
        for path, name in self._on_this_disk():
            if self._suits(target, partial(read_local_model, path, as_draft=True)):
                weights = Weights(repo="", file=str(path))
                return _with(
                    pair, draft=weights
                ), f"Draft: {name}, which is on this disk and matches."
        return pair, (
            "No draft model is known for it; drafts come from the text itself (n-gram). To "
            f"name one: localspec pull {pair.target.repo} --draft OWNER/REPO"
        )

    def _suits(self, target: Model, read: Callable[[], Model]) -> bool:
        """Whether a model can be the draft and is small enough to be worth it."""
        try:
            draft = read()
            check_pair(target, draft)
        except PullCancelled:
            raise
        except LocalspecError:
            return False
        return draft.weights * _LEAST_RATIO <= target.weights

    def _of_the_catalogue(self, target: Weights, model: Model) -> Iterator[tuple[str, Weights]]:
        """Pairs of the same model, then of its family; by repository, then by what its header says."""
        names = [model_name(target.repo), *_base_names(model)]
        seen: list[Weights] = []
        for same in (_itself, _family):
            for name in names:
                for own, pair in self._catalogue.pairs.items():
                    alike = same(model_name(pair.target.repo)) == same(name)
                    # Heads beside a target are of that size alone.
                    draft = pair.draft or (pair.heads if same is _itself else None)
                    if alike and draft and draft not in seen:
                        if len(seen) == _MOST_LOOKED_AT:
                            return
                        seen.append(draft)
                        yield own, draft

    def _on_this_disk(self) -> Iterator[tuple[Path, str]]:
        """Models here, the smallest file first: a draft's speed matters more than its quality."""
        sized = []
        for found in find_models(self._planner.store):
            if not self._wanted.whole_disk and not found.pair:
                continue
            try:
                sized.append((found.path.stat().st_size, found))
            except OSError:
                continue
        for _, found in sorted(sized, key=lambda each: (each[0], each[1].name)):
            yield found.path, f"{found.name} ({found.origin})"


def _itself(name: str) -> str:
    return name


def _here(planner: Planner, wanted: Wanted) -> Record | None:
    """The pair that was pulled as this before."""
    try:
        record = planner.store.get(wanted.name)
    except (ModelNotFound, RegistryError):
        return None
    return record if record.source == "hub" and record.asked == wanted.asked else None


def _weights(wanted: Reference, chosen: Choice) -> Weights:
    return Weights(repo=wanted.repo, file=chosen.file, revision=wanted.revision)


def _with(pair: Pair, draft: Weights | None = None) -> Pair:
    """The target with this draft and nothing else that drafts."""
    return msgspec.structs.replace(pair, draft=draft, heads=None, embedded_heads=False)


def _base_names(model: Model) -> list[str]:
    """The models that this one was made of, by its header."""
    metadata = model.header.metadata
    names = [metadata.get(f"general.base_model.{number}.name") for number in range(4)]
    names.append(metadata.get("general.basename"))
    return [re.sub(r"[\s_]+", "-", name.lower()) for name in names if isinstance(name, str)]


def _family(name: str) -> str:
    """A model's name without its size."""
    return _SIZE.sub("", name)
