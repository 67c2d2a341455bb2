"""Turn what a user asked for into a pair: choose the file of a repository and what drafts for it."""

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

# Target weights / draft weights. A larger draft takes about as much time as it saves.
_MIN_WEIGHT_RATIO = 3
_MAX_CATALOGUE_DRAFTS = 3  # checked for one target; each costs the download of a header
# A quantization that leaves no memory for this context is too large.
_REQUIRED_CONTEXT_TOKENS = 32_768
# The number of parameters in a model name.
_PARAMETER_COUNT = re.compile(r"[-_]?(?<![a-z0-9.])[ea]?\d+(\.\d+)?[bm](?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a decision.

    pair: the pair to pull. known: the models whose headers were read on the way. offers: the available
    quantizations, if none was named. said: sentences for the user.
    """

    pair: Pair
    known: Mapping[Weights, PlannedModel] = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    said: tuple[str, ...] = ()


def decide(
    planner: Planner, request: Wanted, catalogue: Catalogue, cancel: threading.Event | None = None
) -> Decision:
    """Return the pair to pull. A pair that was pulled from the same reference before keeps its files.

    Raises:
        NotOnHub, HubError and below: the repository cannot be read.
        InvalidRequest: the repository has several models and the request does not say which.
        BadGguf, UnsafeModel: the target is unusable.
        NotMatched, CannotRollBack: the named draft is unusable.
    """
    if request.pair and (request.decided or not (request.draft or request.no_draft)):
        return Decision(request.pair)
    return _Decider(planner, request, catalogue, cancel).run()


class _Decider:
    """One decision in progress, which reads each header only once."""

    def __init__(
        self,
        planner: Planner,
        request: Wanted,
        catalogue: Catalogue,
        cancel: threading.Event | None,
    ) -> None:
        self._planner, self._request = planner, request
        self._catalogue, self._cancel = catalogue, cancel
        self._known: dict[Weights, PlannedModel] = {}
        self._offers: tuple[Offer, ...] = ()
        self._earlier = _find_earlier_pull(planner, request)

    def run(self) -> Decision:
        """Make the decision."""
        request, sentence = self._request, ""
        if request.pair:
            pair, listed = request.pair, tuple[Listed, ...]()
        else:
            assert request.target
            listed = self._list_files(request.target)
            pair = self._choose_target(request.target, listed)
        if request.no_draft:
            pair = _with_draft(pair)
        elif request.draft:
            pair = _with_draft(pair, draft=self._choose_draft(request.draft))
        elif self._earlier and self._earlier.draft:
            pair = _with_draft(
                pair, draft=as_weights(self._earlier.draft, self._planner.store.part_path)
            )
        else:
            pair, sentence = self._propose_draft(pair, listed)
        return Decision(pair, self._known, self._offers, (sentence,) if sentence else ())

    # ------------------------------------------------------------------ which file

    def _list_files(self, reference: Reference) -> tuple[Listed, ...]:
        """Return the files on the hub; without a network, those that its local cache has."""
        try:
            return patiently(
                lambda: self._planner.hub.files(reference.repo, reference.revision),
                self._planner.first_contact,
                self._cancel,
            )
        except (Offline, Unreachable):
            cached = list_in_cache(reference.repo, reference.revision)
            if not cached:
                raise
            return cached

    def _choose_target(self, reference: Reference, listed: Sequence[Listed]) -> Pair:
        """Return a pair that has only the target."""
        matched = matching(reference, choices(listed, everything=bool(reference.file)))
        earlier = [
            choice
            for choice in matched
            if self._earlier and choice.file == self._earlier.target.file
        ]
        choice = earlier[0] if earlier else self._choose_quant(reference, matched)
        if not (reference.quant or reference.file):
            fits = self._fit_check(self._read_choice(reference, choice).model)
            self._offers = tuple(
                Offer(
                    quant=option.label,
                    size=option.size,
                    fits=fits(option),
                    taken=option.file == choice.file,
                )
                for option in matched
            )
        header = self._read_choice(reference, choice).model.header.metadata
        licence = header.get("general.license")
        fim = any(key.startswith("tokenizer.ggml.fim_pre") for key in header)
        return Pair(
            summary=f"{choice.label} of {reference.repo}",
            target=_to_weights(reference, choice),
            licence=licence[:80] if isinstance(licence, str) else "unknown",
            roles=("chat", "fim") if fim else ("chat",),
        )

    def _choose_quant(self, reference: Reference, matched: Sequence[Choice]) -> Choice:
        """Return the best of several quantizations.

        A first guess uses the file sizes. The header of that file then shows the memory needs of all of them.
        """
        if len(matched) == 1:
            return matched[0]
        guess = best(matched, self._fit_check(None))
        return best(matched, self._fit_check(self._read_choice(reference, guess).model))

    def _fit_check(self, sibling: Model | None) -> Callable[[Choice], fit.Fits]:
        """Return a function that checks whether memory can hold a model.

        It uses the file size, and if given, the header of another quantization of the same model.
        """
        free = self._planner.memory() if self._planner.memory else None

        def check_fit(choice: Choice) -> fit.Fits:
            if free is None:
                return "yes"
            # Without a header, count a tenth of the weights for caches and buffers.
            needed = choice.size * 11 // 10
            if sibling:
                load = Load(context=min(_REQUIRED_CONTEXT_TOKENS, sibling.context))
                needed = fit.needed(sibling, None, load) - sibling.weights + choice.size
            return fit.fits(needed, free)

        return check_fit

    def _read_choice(self, reference: Reference, chosen: Choice) -> PlannedModel:
        return self._read_header(_to_weights(reference, chosen))

    def _read_header(self, weights: Weights, *, as_draft: bool = False) -> PlannedModel:
        if weights not in self._known:
            self._known[weights] = self._planner.look(weights, self._cancel, as_draft=as_draft)
        return self._known[weights]

    def _read_draft(self, weights: Weights) -> Model:
        return self._read_header(weights, as_draft=True).model

    # ------------------------------------------------------------------ what drafts

    def _choose_draft(self, reference: Reference) -> Weights:
        """Return the named draft; of several quantizations, the most common one with the most bits."""
        listed = self._list_files(reference)
        matched = matching(reference, choices(listed, everything=bool(reference.file)))
        return _to_weights(reference, best(matched, lambda _: "yes"))

    def _propose_draft(self, pair: Pair, listed: Sequence[Listed]) -> tuple[Pair, str]:
        """Return the pair with the best available draft, and a sentence that explains the choice.

        The candidates, in order: what the catalogue pairs with this model or another size of its family;
        heads in the target's own file; heads in a file beside it; a model on this disk. If none is suitable,
        drafts come from the text itself.
        """
        target = self._read_header(pair.target).model
        if target.pooling:
            return msgspec.structs.replace(pair, roles=roles_of(target.pooling)), ""
        for name, weights in self._catalogue_drafts(pair.target, target):
            if self._is_suitable(target, partial(self._read_draft, weights)):
                location = f"{weights.repo}/{weights.file}"
                return _with_draft(
                    pair, draft=weights
                ), f"Draft: {location}, which the catalogue lists for {name}."
        if target.header.metadata.get(f"{target.architecture}.nextn_predict_layers"):
            pair = msgspec.structs.replace(pair, embedded_heads=True)
            return pair, "Drafts: this model's own heads (MTP), which are in its file."
        heads_file = heads(listed, pair.target.file)
        heads_weights = Weights(
            repo=pair.target.repo, file=heads_file, revision=pair.target.revision
        )
        if heads_file and self._is_suitable(target, partial(self._read_draft, heads_weights)):
            return (
                msgspec.structs.replace(pair, heads=heads_weights),
                f"Drafts: this model's own heads (MTP), {heads_file} in the same repository.",
            )
        for path, name in self._disk_models():
            if self._is_suitable(target, partial(read_local_model, path, as_draft=True)):
                weights = Weights(repo="", file=str(path))
                return _with_draft(
                    pair, draft=weights
                ), f"Draft: {name}, which is on this disk and matches."
        return pair, (
            "No draft model is known for it; drafts come from the text itself (n-gram). To "
            f"name one: localspec pull {pair.target.repo} --draft OWNER/REPO"
        )

    def _is_suitable(self, target: Model, read_draft: Callable[[], Model]) -> bool:
        """Return whether a model can be the draft and is small enough to save time."""
        try:
            draft = read_draft()
            check_pair(target, draft)
        except PullCancelled:
            raise
        except LocalspecError:
            return False
        return draft.weights * _MIN_WEIGHT_RATIO <= target.weights

    def _catalogue_drafts(self, target: Weights, model: Model) -> Iterator[tuple[str, Weights]]:
        """Yield the names and drafts of the catalogue's pairs of the same model, then of its family.

        Models are compared by the names of their repositories and the names in the header.
        """
        names = [model_name(target.repo), *_base_names(model)]
        yielded: list[Weights] = []
        for simplify in (_keep_name, _strip_size):
            for name in names:
                for pair_name, pair in self._catalogue.pairs.items():
                    is_match = simplify(model_name(pair.target.repo)) == simplify(name)
                    # Heads in a separate file fit only a target of that size.
                    draft = pair.draft or (pair.heads if simplify is _keep_name else None)
                    if is_match and draft and draft not in yielded:
                        if len(yielded) == _MAX_CATALOGUE_DRAFTS:
                            return
                        yielded.append(draft)
                        yield pair_name, draft

    def _disk_models(self) -> Iterator[tuple[Path, str]]:
        """Yield the models on this disk, the smallest file first.

        The speed of a draft matters more than its quality.
        """
        sized = []
        for model in find_models(self._planner.store):
            if not self._request.whole_disk and not model.pair:
                continue
            try:
                sized.append((model.path.stat().st_size, model))
            except OSError:
                continue
        for _, model in sorted(sized, key=lambda item: (item[0], item[1].name)):
            yield model.path, f"{model.name} ({model.origin})"


def _keep_name(name: str) -> str:
    return name


def _find_earlier_pull(planner: Planner, request: Wanted) -> Record | None:
    """Return the pair that was pulled from the same reference before, or None."""
    try:
        record = planner.store.get(request.name)
    except (ModelNotFound, RegistryError):
        return None
    return record if record.source == "hub" and record.asked == request.asked else None


def _to_weights(reference: Reference, choice: Choice) -> Weights:
    return Weights(repo=reference.repo, file=choice.file, revision=reference.revision)


def _with_draft(pair: Pair, draft: Weights | None = None) -> Pair:
    """Return the pair with this draft and nothing else that drafts."""
    return msgspec.structs.replace(pair, draft=draft, heads=None, embedded_heads=False)


def _base_names(model: Model) -> list[str]:
    """Return the names of the models that this one was derived from, according to its header."""
    metadata = model.header.metadata
    names = [metadata.get(f"general.base_model.{number}.name") for number in range(4)]
    names.append(metadata.get("general.basename"))
    return [re.sub(r"[\s_]+", "-", name.lower()) for name in names if isinstance(name, str)]


def _strip_size(name: str) -> str:
    """Return a model's name without its size."""
    return _PARAMETER_COUNT.sub("", name)
