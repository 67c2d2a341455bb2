"""Turn what a user asked for into a pair: choose the file of a repository and what drafts for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from localspec.errors import (
    InvalidRequest,
    LocalspecError,
    ModelNotFound,
    NotOnHub,
    Offline,
    RegistryError,
    Unreachable,
)
from localspec.model_traits import SIDECAR_LABELS, SidecarKind
from localspec.registry.catalogue import FILE_PATTERN, CataloguePair, HubFile
from localspec.registry.disk.discovery import find_models
from localspec.registry.file_names import (
    SidecarFile,
    guess_sidecar_kind,
    is_no_model,
    may_be_no_model,
    rank_projectors,
    sidecar_order,
)
from localspec.registry.header import fit
from localspec.registry.header.fit import LoadOptions
from localspec.registry.header.model import ModelInfo
from localspec.registry.header.pairing import check_pair
from localspec.registry.header.projector import check_projector
from localspec.registry.hub.offline import ListedFile, list_in_cache
from localspec.registry.hub.repository import (
    Choice,
    Offer,
    Reference,
    choose_quantization,
    derive_model_name,
    list_choices,
    match_choices,
)
from localspec.registry.hub.retry import call_with_retries
from localspec.registry.pulls.pull import PlannedModel, Puller
from localspec.registry.pulls.targets import PullTarget, as_weights, is_cached
from localspec.registry.store.store import Record, roles_for_pooling

# Target weights / draft weights. A larger draft takes about as much time as it saves.
_MIN_WEIGHT_RATIO = 3
# Most drafts of the catalogue, and most sidecars, that are checked: each costs the download of a header.
_MAX_CATALOGUE_DRAFTS = 3
_MAX_SIDECARS = 3
# Most models of a repository whose headers are read to see which of them are models.
_MAX_READ_MODELS = 6
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

    pair: CataloguePair
    known: Mapping[HubFile, PlannedModel] = field(default_factory=dict)
    offers: tuple[Offer, ...] = ()
    said: tuple[str, ...] = ()


def decide(puller: Puller, request: PullTarget, catalogue: Mapping[str, CataloguePair]) -> Decision:
    """Return the pair to pull. A pair that was pulled from the same reference before keeps its files.

    catalogue: its pairs, by name.

    Raises:
        NotOnHub, HubError and below: the repository cannot be read, or has no model.
        InvalidRequest: the repository has several models and the request does not say which.
        BadGguf, UnsafeModel: the target is unusable.
        NotMatched, CannotRollBack: the named draft is unusable.
    """
    if request.pair and request.decided:
        return Decision(request.pair)
    return _Decider(puller, request, catalogue).run()


# What a file is: a model, a sidecar of this kind, or something else.
_Purpose = SidecarKind | Literal["model", ""]


class _Decider:
    """One decision in progress, which reads each header only once."""

    def __init__(
        self, puller: Puller, request: PullTarget, catalogue: Mapping[str, CataloguePair]
    ) -> None:
        self._puller, self._request, self._catalogue = puller, request, catalogue
        self._known: dict[HubFile, PlannedModel] = {}
        self._purposes: dict[tuple[str, tuple[str, str]], _Purpose] = {}  # by repository and model
        self._offers: tuple[Offer, ...] = ()
        # The pair that was pulled from the same reference before.
        self._earlier: Record | None = None
        with suppress(ModelNotFound, RegistryError):
            record = puller.store.get(request.name)
            if (record.source, record.asked) == ("hub", request.asked):
                self._earlier = record

    def run(self) -> Decision:
        request, sentence = self._request, ""
        if request.pair:
            pair, listed = request.pair, self._list_beside(request.pair)
        else:
            assert request.target
            listed = self._list_files(request.target.repo, request.target.revision)
            pair = self._choose_target(request.target, listed)
        if request.no_draft:
            pair = _with_draft(pair)
        elif request.draft:
            pair = _with_draft(pair, draft=self._choose_draft(request.draft, pair))
        elif request.pair:
            pass  # the catalogue says what drafts
        elif self._earlier and self._earlier.draft:
            pair = _with_draft(
                pair, draft=as_weights(self._earlier.draft, self._puller.store.part_path)
            )
        else:
            pair, sentence = self._propose_draft(pair, listed)
        pair, picture_sentence = self._propose_projector(pair, listed)
        said = tuple(filter(None, (sentence, picture_sentence)))
        return Decision(pair, self._known, self._offers, said)

    def _list_beside(self, pair: CataloguePair) -> tuple[ListedFile, ...]:
        """Return the files that lie beside a catalogue's target; () if its projector is known."""
        if pair.projector:
            return ()
        try:
            return self._list_files(pair.target.repo, pair.target.revision)
        except (Offline, Unreachable):
            if is_cached(self._request):
                return ()
            raise
        except LocalspecError:  # the pull itself says what is wrong
            return ()

    def _list_files(self, repo: str, revision: str) -> tuple[ListedFile, ...]:
        """Return the files on the hub; without a network, those that its local cache has."""
        try:
            return call_with_retries(
                lambda: self._puller.hub.list_files(repo, revision),
                self._puller.first_contact,
                self._puller.on_wait,
            )
        except (Offline, Unreachable):
            cached = list_in_cache(repo, revision)
            if not cached:
                raise
            return cached

    def _choose_target(self, reference: Reference, listed: Sequence[ListedFile]) -> CataloguePair:
        """Return a pair that has only the target."""
        matched = self._match_models(reference, listed)
        earlier_file = self._earlier.target.file if self._earlier else ""
        earlier = next((choice for choice in matched if choice.file == earlier_file), None)
        choice = earlier or self._choose_quant(reference, matched)
        model = self._read_header(_to_weights(reference, choice)).model
        if not (reference.quant or reference.file):
            fits = self._fit_check(model)
            self._offers = tuple(
                Offer(
                    quant=option.label,
                    size=option.size,
                    fits=fits(option),
                    taken=option.file == choice.file,
                )
                for option in matched
            )
        metadata = model.header.metadata
        licence = metadata.get("general.license")
        fim = any(key.startswith("tokenizer.ggml.fim_pre") for key in metadata)
        return CataloguePair(
            summary=f"{choice.label} of {reference.repo}",
            target=_to_weights(reference, choice),
            licence=licence[:80] if isinstance(licence, str) else "unknown",
            roles=("chat", "fim") if fim else ("chat",),
        )

    def _match_models(
        self, reference: Reference, listed: Sequence[ListedFile]
    ) -> tuple[Choice, ...]:
        """Return what a reference may mean. Where names leave doubt, headers show which files are models."""
        if reference.file:
            return match_choices(reference, list_choices(listed, everything=True))
        # Files that are no models by their names are looked at if there are no others.
        offered = list_choices(listed) or tuple(
            choice for choice in list_choices(listed, everything=True) if not choice.missing
        )
        while offered:
            several: InvalidRequest | None = None
            try:
                matched = match_choices(reference, offered)
                doubtful = [choice for choice in matched if may_be_no_model(choice.file)]
            except InvalidRequest as error:
                several, doubtful = error, [*offered]
            unread: dict[tuple[str, str], list[Choice]] = {}
            for choice in doubtful:
                if (reference.repo, choice.model) not in self._purposes:
                    unread.setdefault(choice.model, []).append(choice)
            if several and (not unread or len(unread) > _MAX_READ_MODELS):
                raise several
            if not unread:
                return matched
            for choices in unread.values():
                self._read_purpose(reference, choose_quantization(choices, self._fit_check(None)))
            offered = tuple(
                choice
                for choice in offered
                if self._purposes.get((reference.repo, choice.model), "model") == "model"
            )
        kinds = {kind for file in listed if (kind := guess_sidecar_kind(file.file))}
        if not kinds:
            return match_choices(reference, ())
        labels = " and ".join(sorted(SIDECAR_LABELS[kind] for kind in kinds))
        raise NotOnHub(
            f"{reference.repo} contains no model, only what drafts for one ({labels}). Pull the "
            f"model with it: localspec pull OWNER/REPO --draft {reference}"
        )

    def _read_purpose(self, reference: Reference, choice: Choice) -> _Purpose:
        """Return what a file and its other quantizations are, according to its header.

        A header that cannot be used says nothing, so that the name decides.
        """
        weights = _to_weights(reference, choice)
        purpose: _Purpose
        try:
            planned = self._puller.look(weights, as_draft=None)
        except LocalspecError:
            purpose = guess_sidecar_kind(choice.file) or (
                "" if may_be_no_model(choice.file) else "model"
            )
        else:
            purpose = planned.model.sidecar or "model"
            if not planned.model.pooling:
                self._known[weights] = planned
        self._purposes[reference.repo, choice.model] = purpose
        return purpose

    def _choose_quant(self, reference: Reference, matched: Sequence[Choice]) -> Choice:
        """Return the best of several quantizations.

        A first guess uses the file sizes. The header of that file then shows the memory needs of all of them.
        """
        if len(matched) == 1:
            return matched[0]
        guess = choose_quantization(matched, self._fit_check(None))
        sibling = self._read_header(_to_weights(reference, guess)).model
        return choose_quantization(matched, self._fit_check(sibling))

    def _fit_check(self, sibling: ModelInfo | None) -> Callable[[Choice], fit.Fits]:
        """Return a function that checks whether memory can hold a model.

        It uses the file size, and if given, the header of another quantization of the same model.
        """
        free = self._puller.memory

        def check_fit(choice: Choice) -> fit.Fits:
            if free is None:
                return "yes"
            # Without a header, count a tenth of the weights for caches and buffers.
            needed = choice.size * 11 // 10
            if sibling:
                load = LoadOptions(context=min(_REQUIRED_CONTEXT_TOKENS, sibling.context))
                needed = fit.total_need(sibling, None, load) - sibling.weights + choice.size
            return fit.judge_fit(needed, free)

        return check_fit

    def _read_header(self, weights: HubFile, *, as_draft: bool = False) -> PlannedModel:
        if weights not in self._known:
            self._known[weights] = self._puller.look(weights, as_draft=as_draft)
        return self._known[weights]

    def _choose_draft(self, reference: Reference, pair: CataloguePair) -> HubFile:
        """Return the named draft; of several quantizations, the most common one with the most bits.

        A repository without a model, or of the target itself, means the best sidecar there.
        """
        listed = self._list_files(reference.repo, reference.revision)
        is_of_target = derive_model_name(pair.target.repo) == derive_model_name(reference.repo)
        has_no_sure_model = all(may_be_no_model(choice.file) for choice in list_choices(listed))
        if not reference.file and (is_of_target or has_no_sure_model):
            for file, _ in self._rank_sidecars(pair.target, reference, listed):
                if reference.quant.lower() in file.lower():
                    return HubFile(repo=reference.repo, file=file, revision=reference.revision)
        matched = self._match_models(reference, listed)
        return _to_weights(reference, choose_quantization(matched, lambda _: "yes"))

    def _propose_draft(
        self, pair: CataloguePair, listed: Sequence[ListedFile]
    ) -> tuple[CataloguePair, str]:
        """Return the pair with the best available draft, and sentences that explain the choice.

        The candidates, in order: what the catalogue pairs with this model; heads in the target's own file; a
        sidecar in the same repository; what the catalogue pairs with another size of its family; a model on
        this disk. If none is suitable, drafts come from the text itself.
        """
        target = self._read_header(pair.target).model
        if target.pooling:
            return msgspec.structs.replace(pair, roles=roles_for_pooling(target.pooling)), ""
        if chosen := self._choose_catalogue_draft(pair, target):
            return chosen
        repository = Reference(repo=pair.target.repo, revision=pair.target.revision)
        sidecars = self._rank_sidecars(pair.target, repository, listed)
        if target.header.metadata.get(f"{target.architecture}.nextn_predict_layers"):
            pair = msgspec.structs.replace(pair, embedded_heads=True)
            sentence = "Drafts: this model's own heads (MTP), which are in its file."
            return pair, f"{sentence}{self._list_others(sidecars)}"
        for sidecar in sidecars[:_MAX_SIDECARS]:
            weights = HubFile(repo=repository.repo, file=sidecar.file, revision=repository.revision)
            if self._is_suitable(target, weights, sidecar=True):
                unused = [other for other in sidecars if other != sidecar]
                heads = f"this model's own heads (MTP), {sidecar.file}"
                sentence = (
                    f"Drafts: {heads if sidecar.kind == 'mtp' else sidecar} in the same repository."
                )
                pair = msgspec.structs.replace(pair, sidecar=weights)
                return pair, f"{sentence}{self._list_others(unused)}"
        if chosen := self._choose_catalogue_draft(pair, target, any_size=True):
            return chosen
        for path, name in self._disk_models():
            weights = HubFile(repo="", file=str(path))
            if self._is_suitable(target, weights):
                sentence = f"Draft: {name}, which is on this disk and matches."
                return _with_draft(pair, draft=weights), sentence
        return pair, (
            "No draft model is known for it; drafts come from the text itself (n-gram). To "
            f"name one: localspec pull {pair.target.repo} --draft OWNER/REPO{self._list_others(sidecars)}"
        )

    def _propose_projector(
        self, pair: CataloguePair, listed: Sequence[ListedFile]
    ) -> tuple[CataloguePair, str]:
        """Return the pair with the projector of its repository, by which the target reads pictures, if any.

        The second part is a sentence about it.
        """
        sizes = {file.file: file.size for file in listed if FILE_PATTERN.fullmatch(file.file)}
        names = rank_projectors(sizes, pair.target.file)
        if self._request.no_projector:
            left_out = pair.projector.file if pair.projector else next(iter(names), "")
            return msgspec.structs.replace(pair, projector=None, other_projector=left_out), ""
        if pair.projector or not names:
            return pair, ""
        target = self._read_header(pair.target).model
        for name in names[:_MAX_SIDECARS]:
            weights = HubFile(repo=pair.target.repo, file=name, revision=pair.target.revision)
            try:
                planned = self._puller.look_projector(weights)
                check_projector(target, planned.projector)
            except LocalspecError:
                continue
            sentence = f"Pictures: {name} in the same repository; to leave it out: --no-projector."
            return msgspec.structs.replace(pair, projector=weights), sentence
        return pair, f"No pictures: {names[0]} in the same repository does not fit this model."

    def _choose_catalogue_draft(
        self, pair: CataloguePair, target: ModelInfo, *, any_size: bool = False
    ) -> tuple[CataloguePair, str] | None:
        """Return the pair with a draft from the catalogue, and a sentence; None if none is suitable.

        any_size: as in `_catalogue_drafts`.
        """
        for name, weights in self._catalogue_drafts(pair.target, target, any_size):
            if self._is_suitable(target, weights):
                location = f"{weights.repo}/{weights.file}"
                sentence = f"Draft: {location}, which the catalogue lists for {name}."
                return _with_draft(pair, draft=weights), sentence
        return None

    def _rank_sidecars(
        self, target: HubFile, reference: Reference, listed: Sequence[ListedFile]
    ) -> tuple[SidecarFile, ...]:
        """Return the sidecars of a repository, the best for the target first."""
        choices = list_choices(listed, everything=True)
        sizes = {choice.file: choice.size for choice in choices}
        own = [choice.model for choice in choices if choice.file == target.file]
        if reference.repo == target.repo:
            choices = tuple(choice for choice in choices if choice.model not in own)
        sidecars = []
        for choice in choices:
            kind = guess_sidecar_kind(choice.file)
            purpose = self._purposes.get((reference.repo, choice.model))
            if purpose is None and kind and not is_no_model(choice.file):
                purpose = self._read_purpose(reference, choice)
            purpose = purpose or kind
            if purpose and purpose != "model" and not choice.missing:
                sidecars.append(SidecarFile(choice.file, purpose))
        target_size = sizes.get(target.file) or self._read_header(target).model.weights

        def order(sidecar: SidecarFile) -> tuple[int, bool, int, int, str]:
            return sidecar_order(sidecar, sizes[sidecar.file], target.file, target_size)

        return tuple(sorted(sidecars, key=order))

    def _list_others(self, sidecars: Sequence[SidecarFile]) -> str:
        if not sidecars:
            return ""
        more = len(sidecars) - _MAX_SIDECARS
        listed = ", ".join(map(str, sidecars[:_MAX_SIDECARS]))
        return f" Not used: {listed}{f' and {more} more' if more > 0 else ''}."

    def _is_suitable(self, target: ModelInfo, weights: HubFile, *, sidecar: bool = False) -> bool:
        """Return whether a model can be the draft and is small enough to save time.

        sidecar: it must be one, of which a pass reads far less than its size: a row of its embedding, not
        all of it.
        """
        try:
            draft = self._read_header(weights, as_draft=True).model
            check_pair(target, draft)
        except LocalspecError:
            return False
        is_small = draft.weights * _MIN_WEIGHT_RATIO <= target.weights
        return bool(draft.sidecar) or (is_small and not sidecar)

    def _catalogue_drafts(
        self, target: HubFile, model: ModelInfo, any_size: bool
    ) -> Iterator[tuple[str, HubFile]]:
        """Yield the names and drafts of the catalogue's pairs whose target has the same name.

        Models are compared by the names of their repositories and the names in the header. any_size: without
        their sizes.
        """

        def simplify(name: str) -> str:
            return _PARAMETER_COUNT.sub("", name) if any_size else name

        yielded: list[HubFile] = []
        metadata = model.header.metadata
        keys = [f"general.base_model.{number}.name" for number in range(4)] + ["general.basename"]
        bases = [name for name in map(metadata.get, keys) if isinstance(name, str)]
        names = [re.sub(r"[\s_]+", "-", name.lower()) for name in bases]
        for name in [derive_model_name(target.repo), *names]:
            for catalogue_name, pair in self._catalogue.items():
                is_match = simplify(derive_model_name(pair.target.repo)) == simplify(name)
                # A sidecar fits only a target of that size.
                draft = pair.draft or (None if any_size else pair.sidecar)
                if is_match and draft and draft not in yielded:
                    if len(yielded) == _MAX_CATALOGUE_DRAFTS:
                        return
                    yielded.append(draft)
                    yield catalogue_name, draft

    def _disk_models(self) -> Iterator[tuple[Path, str]]:
        """Yield the models on this disk, the smallest file first.

        The speed of a draft matters more than its quality.
        """
        sized = []
        for model in find_models(self._puller.store):
            if not self._request.whole_disk and not model.pair:
                continue
            try:
                sized.append((model.path.stat().st_size, model))
            except OSError:
                continue
        for _, model in sorted(sized, key=lambda item: (item[0], item[1].name)):
            yield model.path, f"{model.name} ({model.origin})"


def _to_weights(reference: Reference, choice: Choice) -> HubFile:
    return HubFile(repo=reference.repo, file=choice.file, revision=reference.revision)


def _with_draft(pair: CataloguePair, draft: HubFile | None = None) -> CataloguePair:
    """Return the pair with this draft and nothing else that drafts."""
    return msgspec.structs.replace(pair, draft=draft, sidecar=None, embedded_heads=False)
