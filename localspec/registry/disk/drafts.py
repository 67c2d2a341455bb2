"""Rank the models on this disk as drafts for a target, best first, and find its projector beside it."""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import TypeVar

from localspec.compatibility import Compatibility, Tokenizer, compare_tokenizers
from localspec.errors import LocalspecError
from localspec.model_traits import SidecarKind, file_draft_kind, may_hold_sidecar
from localspec.protocol.pairs import AddRequest, DiskModel, DraftGain, DraftKind, Drafts, DraftView
from localspec.registry.catalogue import explain_reserved_name
from localspec.registry.disk.discovery import FoundModel
from localspec.registry.file_names import (
    SidecarFile,
    guess_sidecar_kind,
    is_projector,
    rank_projectors,
    sidecar_order,
)
from localspec.registry.header import fit
from localspec.registry.header.architectures import describe_rollback
from localspec.registry.header.gguf import FileSource, read_architecture
from localspec.registry.header.model import ModelInfo, read_local_model, shard_paths
from localspec.registry.header.pairing import judge_pair
from localspec.registry.header.projector import check_projector, read_local_projector
from localspec.registry.header.vocabulary import read_vocabulary

# Target weights / draft weights. A draft of half the size costs half of the target's time for each token that
# it proposes, which is too much to save time.
MIN_WEIGHT_RATIO = 2.0
_FAMILY_COVERAGE = 0.99  # share of the used tokens that models of one family have in common
MAX_READING_S = 120.0  # a header takes about 50 ms, longer on a disk that has to spin up
_NO_TARGET = "it drafts for a model that was not found."
_PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A model whose header was read. Models with the same `kind` have the same tokenizer.

    sidecar: its header, if it is a sidecar, which fits the targets that the header says.
    """

    found: FoundModel
    weights: int
    kind: int
    can_pair: bool
    has_heads: bool
    sidecar: ModelInfo | None = None


def judge_all(
    models: Iterable[FoundModel],
    told: Callable[[str], None] = lambda name: None,
    patience: float = MAX_READING_S,
) -> list[DiskModel]:
    """Return every model with the models that can draft for it, by tokenizer and size.

    told: called with the name of each model before it is read. patience: after this many seconds the other
    models are not read any more.
    """
    end = time.monotonic() + patience
    kinds: dict[tuple[object, ...], int] = {}
    tokenizers: list[Tokenizer] = []
    results: list[_Candidate | DiskModel] = []
    for file in models:
        told(file.name)
        if time.monotonic() > end:
            sentence = f"it was not read within {patience:.0f} s; name fewer folders."
            results.append(_to_disk_model(file, problem=sentence))
            continue
        try:
            results.append(_read_candidate(file, kinds, tokenizers))
        except LocalspecError as error:
            results.append(_to_disk_model(file, problem=error.message))
    candidates = [result for result in results if isinstance(result, _Candidate)]
    files = _match_drafts(candidates, tokenizers)
    used = {file.path for drafting in files.values() for file in drafting}
    judged: list[DiskModel] = []
    for result in results:
        if isinstance(result, DiskModel):
            judged.append(result)
            continue
        problem = "" if not result.sidecar or result.found.path in used else _NO_TARGET
        judged.append(_to_disk_model(result.found, result.weights, problem, files.get(result, ())))
    return judged


def _match_drafts(
    found: Sequence[_Candidate], tokenizers: Sequence[Tokenizer]
) -> dict[_Candidate, list[FoundModel]]:
    candidates = sorted(
        (candidate for candidate in found if not candidate.sidecar), key=lambda item: item.weights
    )
    sidecars = [candidate for candidate in found if candidate.sidecar]
    verdicts: dict[tuple[int, int], Compatibility] = {}

    def drafts(target: _Candidate) -> Iterator[tuple[bool, int, bool, str, FoundModel]]:
        """Yield the drafts and their sort key: same family first, then small ones, then the same program."""
        for draft in candidates:
            if draft.weights * MIN_WEIGHT_RATIO > target.weights or not draft.can_pair:
                continue
            kind_pair = target.kind, draft.kind
            if kind_pair not in verdicts:
                verdicts[kind_pair] = compare_tokenizers(*(tokenizers[kind] for kind in kind_pair))
            if verdicts[kind_pair].usable:
                file, is_unrelated = draft.found, verdicts[kind_pair].coverage < _FAMILY_COVERAGE
                is_elsewhere = file.origin != target.found.origin
                yield is_unrelated, draft.weights, is_elsewhere, file.name, file

    return {
        target: _find_own_sidecars(target, sidecars)
        + [file for *_, file in sorted(drafts(target), key=lambda item: item[:4])]
        for target in candidates
        if target.can_pair
    }


def _find_own_sidecars(target: _Candidate, sidecars: Sequence[_Candidate]) -> list[FoundModel]:
    """Return the sidecars that draft for a target, the best first. Heads in its own file are better."""
    if not sidecars or target.has_heads:
        return []
    model = read_local_model(target.found.path)
    fitting = [
        (SidecarFile(sidecar.found.name, sidecar.sidecar.sidecar), sidecar)
        for sidecar in sidecars
        if sidecar.sidecar
        and sidecar.sidecar.sidecar
        and judge_pair(model, sidecar.sidecar).matched
    ]
    fitting.sort(
        key=lambda item: sidecar_order(item[0], item[1].weights, target.found.name, target.weights)
    )
    return [sidecar.found for _, sidecar in fitting]


def list_files_beside(target: Path) -> list[Path]:
    """Return the other GGUF files in the folder of a target, and in folders for sidecars, such as MTP/."""
    own = set(shard_paths(target))
    folders = [target.parent]
    with contextlib.suppress(OSError):
        folders += [
            folder
            for folder in target.parent.iterdir()
            if guess_sidecar_kind(folder.name) and folder.is_dir()
        ]
    return [
        path
        for folder in folders
        for path in sorted(folder.glob("*.[gG][gG][uU][fF]"))
        if path not in own and path.is_file()
    ]


def find_own_drafts(target: Path) -> list[Path]:
    """Return what drafts for a target without being named, the best first.

    It is the target itself if its file has MTP heads, and then the sidecars beside it that fit. Their headers
    show what they are.

    Raises:
        BadGguf, UnsafeModel: the target cannot be used.
    """
    model = read_local_model(target)
    if model.pooling:
        return []
    sidecars = []
    for path in list_files_beside(target):
        with contextlib.suppress(LocalspecError):
            if may_hold_sidecar(model.architecture, read_architecture(FileSource(path))):
                found = read_local_model(path, as_draft=None)
                if found.sidecar and judge_pair(model, found).matched:
                    sidecar = SidecarFile(str(path.relative_to(target.parent)), found.sidecar)
                    order = sidecar_order(sidecar, found.file_size, target.name, model.weights)
                    sidecars.append((order, path))
    return [target] * bool(model.drafting_heads) + [path for _, path in sorted(sidecars)]


def list_projectors(target: Path) -> list[Path]:
    """Return the files in the folder of a target whose names look like a projector's, the best first."""
    sizes = {
        path.name: path.stat().st_size
        for path in target.parent.glob("*.[gG][gG][uU][fF]")
        if is_projector(path.name) and path.is_file()
    }
    return [target.with_name(name) for name in rank_projectors(sizes, target.name)]


def find_projector(candidates: Iterable[Path], model: ModelInfo) -> Path | None:
    """Return the first projector that fits a target, or None. model: the target's header."""
    if model.pooling:
        return None
    for path in candidates:
        try:
            check_projector(model, read_local_projector(path))
        except LocalspecError:
            continue
        return path
    return None


def _to_disk_model(
    file: FoundModel, weights: int = 0, problem: str = "", drafts: Sequence[FoundModel] = ()
) -> DiskModel:
    paths = tuple(str(draft.path) for draft in drafts)
    return DiskModel(file.name, str(file.path), file.origin, weights, problem, paths)


def _read_candidate(
    file: FoundModel, kinds: dict[tuple[object, ...], int], tokenizers: list[Tokenizer]
) -> _Candidate:
    """Read a model's header and return only what is needed of it.

    The tokens take 15 MB, so models with the same tokenizer share one copy.
    """
    model = read_local_model(file.path, as_draft=None)
    vocabulary = read_vocabulary(model.header)
    tokenizer = vocabulary.tokenizer
    digest = hashlib.sha256(vocabulary.tokens.raw).digest()
    key = (
        digest,
        tokenizer.kind,
        tokenizer.bos,
        tokenizer.eos,
        tokenizer.add_bos,
        tokenizer.add_eos,
    )
    if key not in kinds:
        kinds[key] = len(tokenizers)
        tokenizers.append(tokenizer)
    sentence = describe_rollback(model.name, model.architecture, model.rollback)
    can_pair = not (sentence and model.rollback == "none") and not model.pooling
    return _Candidate(
        file,
        model.weights,
        kinds[key],
        can_pair,
        has_heads=model.drafting_heads > 0,
        sidecar=model if model.sidecar else None,
    )


def propose_pairs(
    models: Sequence[DiskModel],
    paired: Container[str],
    taken: Iterable[str],
    call: Callable[[str, Path], str],
) -> list[AddRequest]:
    """Return the pairs worth adding for models that are in none.

    Each model is paired with its best draft. A model without a draft is added alone, unless it is the draft
    of another one. paired: the paths of models that are in a pair. taken: names that already have a meaning.
    call: returns what `localspec add` accepts for a file.
    """
    by_path = {model.path: model for model in models}
    draft_paths = {draft for model in models for draft in model.drafts}
    names = set(taken)
    requests: list[AddRequest] = []
    for model in models:
        if model.problem or model.path in paired:
            continue
        if not model.drafts and model.path in draft_paths:
            continue
        draft = by_path[model.drafts[0]] if model.drafts else None
        name = free_name(model.name, names)
        names.add(name)
        requests.append(
            AddRequest(
                name=name,
                target=call(model.name, Path(model.path)),
                draft=call(draft.name, Path(draft.path)) if draft else None,
                hash_now=False,  # a proposed pair may never be used
            )
        )
    return requests


def free_name(model: str, taken: Iterable[str]) -> str:
    """Return a pair name derived from a model's name that is not taken."""
    stem = model.rpartition("/")[2].lower().removesuffix(":latest")
    while stem.endswith(".gguf"):
        stem = _PART_SUFFIX.sub("", stem.removesuffix(".gguf"))
    stem = re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")[: _MAX_NAME_CHARACTERS - 4] or "model"
    names, number = set(taken), 1
    name = stem
    while name in names or explain_reserved_name(name):
        number += 1
        name = f"{stem}-{number}"
    return name


MAX_DEPTH = 16
_Z_95 = 1.96  # standard deviations of a normal distribution that contain 95 %
# Student's t for 95 %, by degrees of freedom from 1 to 9. There are only a few texts.
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurements of one draft.

    texts: for each text, the number of draft tokens checked (up to the first rejection of each round) and
    the number accepted. target_ms, draft_ms: milliseconds of a pass by its width in rows. overhead_ms:
    milliseconds of a round besides its passes. block: the most tokens that one pass of the draft proposes, 0
    if each of its passes proposes one token.
    """

    texts: Sequence[tuple[int, int]]
    target_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    overhead_ms: float
    block: int = 0

    def drafting_ms(self, depth: int) -> float:
        """Return the milliseconds in which the draft proposes `depth` tokens."""
        if self.block:  # a pass reads what was accepted, and another one has a mask for each token
            return _pass_ms(self.draft_ms, 1) + _pass_ms(self.draft_ms, depth + 1)
        return depth * (self.draft_ms.get(1) or min(self.draft_ms.values()))


def estimate_gains(trials: Mapping[_Key, Trial]) -> dict[_Key, DraftGain]:
    """Return the gain of each draft of one target, at its best depth.

    The depth is at least one token, so that drafts that never pay off can be compared too.
    """
    target_ms, overhead = _combine_costs(trials)
    return {key: _estimate_gain(trial, target_ms, overhead) for key, trial in trials.items()}


def plain_tokens_per_second(trials: Mapping[_Key, Trial]) -> float | None:
    """Return the tokens per second of the target alone, or None without measurements."""
    target_ms, overhead = _combine_costs(trials)
    return 1e3 / (_pass_ms(target_ms, 1) + overhead) if target_ms else None


def is_indistinguishable(first: DraftGain, second: DraftGain) -> bool:
    """Return whether the confidence intervals of two gains overlap."""
    return first.low <= second.high and second.low <= first.high


def _combine_costs(trials: Mapping[_Key, Trial]) -> tuple[dict[int, float], float]:
    """Return the milliseconds of a target pass by width, and of a round besides its passes."""
    # The smallest of several measurements is the least disturbed.
    target_ms: dict[int, float] = {}
    for trial in trials.values():
        for width, ms in trial.target_ms.items():
            target_ms[width] = min(ms, target_ms.get(width, ms))
    return target_ms, min((trial.overhead_ms for trial in trials.values()), default=0.0)


def _estimate_gain(trial: Trial, target_ms: Mapping[int, float], overhead: float) -> DraftGain:
    low, acceptance, high = acceptance_interval(trial.texts)
    plain_ms = _pass_ms(target_ms, 1) + overhead
    max_depth = min(MAX_DEPTH, max(target_ms) - 1, trial.block or MAX_DEPTH)

    def speed_up(rate: float, depth: int) -> float:
        round_ms = trial.drafting_ms(depth) + _pass_ms(target_ms, depth + 1) + overhead
        return expected_tokens(rate, depth) * plain_ms / round_ms

    depth = max(range(1, max(max_depth, 1) + 1), key=lambda depth: speed_up(acceptance, depth))
    return DraftGain(
        acceptance,
        low,
        high,
        speed_up(acceptance, depth),
        speed_up(low, depth),
        speed_up(high, depth),
        depth,
    )


def expected_tokens(acceptance: float, depth: int) -> float:
    """Return the expected tokens per round, including the target's own.

    It is (1 - α^(γ+1)) / (1 - α) for the acceptance rate α and the depth γ (Leviathan et al. 2022).
    """
    return sum(acceptance**position for position in range(depth + 1))


def _pass_ms(costs: Mapping[int, float], width: int) -> float:
    """Return the milliseconds of a pass with `width` rows.

    The pass is padded if a wider one is cheaper. Beyond the widest measured pass, the cost of that one is
    used.
    """
    candidates = [ms for measured_width, ms in costs.items() if measured_width >= width]
    return min(candidates) if candidates else costs[max(costs)]


def acceptance_interval(texts: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Return the lower bound, the rate and the upper bound of the acceptance.

    The interval is the wider of two: one from the spread between the texts (a ratio estimator with Student's
    t), and Wilson's interval for that number of trials.
    """
    checked, accepted = (sum(column) for column in zip(*texts, strict=True)) if texts else (0, 0)
    if not checked:
        return 0.0, 0.0, 1.0
    rate = accepted / checked
    # Wilson's score interval
    center = rate + _Z_95**2 / (2 * checked)
    width = _Z_95 * sqrt(rate * (1 - rate) / checked + _Z_95**2 / (4 * checked**2))
    scale = 1 + _Z_95**2 / checked
    low, high = max(0.0, (center - width) / scale), min(1.0, (center + width) / scale)
    if len(texts) > 1:
        degrees = len(texts) - 1
        spread = sum((hits - rate * count) ** 2 for count, hits in texts)
        error = sqrt(spread * len(texts) / degrees) / checked
        width = error * _T_95[min(degrees, len(_T_95)) - 1]
        low, high = min(low, max(0.0, rate - width)), max(high, min(1.0, rate + width))
    return min(low, rate), rate, max(high, rate)  # guard against rounding errors


FormatFile = Callable[[str, Path], str]  # (name, path) → what `localspec add` accepts for the file
OWN_HEADS = "its own MTP heads"
_SIDECAR_KINDS: dict[DraftKind, SidecarKind] = {
    "mtp-sidecar": "mtp", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark",
}  # fmt: skip


def rank_drafts(
    target: Path,
    models: Iterable[FoundModel],
    measure: Callable[[DraftView], Trial] | None = None,
    call: FormatFile = lambda name, path: str(path),
) -> Drafts:
    """Return the target's own heads and all `models` judged as drafts for `target`, those that match first.

    If `measure` is given, the matching ones are ordered by their measured gain, else as they would be taken:
    own heads, sidecars, and models by size, the smallest first, because a draft's speed matters more than
    its quality. call: returns what `localspec add` accepts for a file.

    Raises:
        BadGguf: the target itself cannot be read.
    """
    target_model = read_local_model(target)
    target_path = target.resolve()
    views = [
        _judge_draft(target_model, model, call)
        for model in models
        if model.path.resolve() != target_path
    ]
    views = _judge_own_heads(target, target_model) + _order_drafts(target_model, views)
    if measure is None:
        return Drafts(str(target), drafts=views)
    trials: dict[str, Trial] = {}
    for view in views:
        if view.matched:
            try:
                trials[view.path] = measure(view)
            except LocalspecError as error:  # a draft that cannot be measured cannot be used
                view.matched, view.reason = False, error.message
    gains = estimate_gains(trials)
    for view in views:
        view.gain = gains.get(view.path)
    views.sort(key=lambda view: (not view.matched, -view.gain.speed_up if view.gain else 0.0))
    for previous, view in pairwise(views):
        view.tied = bool(
            previous.gain and view.gain and is_indistinguishable(previous.gain, view.gain)
        )
    return Drafts(str(target), plain=plain_tokens_per_second(trials), drafts=views)


def add_forecasts(ranked: Drafts, free: fit.FreeMemory, load: fit.LoadOptions) -> None:
    """Add how fast the target should be with each of the drafts that match."""
    target = read_local_model(Path(ranked.target))
    for view in ranked.drafts or ():
        if not view.matched:
            continue
        is_own = view.kind == "mtp-embedded"
        with contextlib.suppress(LocalspecError):  # it does not fit
            draft = None if is_own else read_local_model(Path(view.path), as_draft=True)
            fitted = fit.fit_pair(target, draft, free, load)
            view.forecast = fit.forecast_fit(target, draft, fitted, load)


def _order_drafts(target: ModelInfo, views: Sequence[DraftView]) -> list[DraftView]:
    """Sort drafts in the order in which they would be taken; those that do not match come last."""

    def place(view: DraftView) -> tuple[bool, bool, tuple[object, ...], int, str]:
        order: tuple[object, ...] = ()
        if view.matched and view.kind != "model":
            sidecar = SidecarFile(view.name, _SIDECAR_KINDS[view.kind])
            order = sidecar_order(sidecar, view.size, target.name, target.weights)
        return not view.matched, view.kind == "model", order, view.size, view.name

    return sorted(views, key=place)


def _judge_own_heads(path: Path, target: ModelInfo) -> list[DraftView]:
    """Return the MTP heads in the target's own file as a draft, or nothing if it has none."""
    reason = target.unusable_heads_reason
    if not target.drafting_heads and not reason:
        return []
    size = target.head_weights
    return [
        DraftView(
            OWN_HEADS,
            str(path),
            "the target's file",
            size,
            target.weights / max(1, size),
            matched=not reason,
            reason=f"{reason}." if reason else "",
            kind="mtp-embedded",
        )
    ]


def _judge_draft(target: ModelInfo, candidate: FoundModel, call: FormatFile) -> DraftView:
    path = str(candidate.path)
    view = DraftView(candidate.name, path, candidate.origin, 0, 0.0, matched=False, reason="")
    view.file = call(candidate.name, candidate.path)
    try:
        draft = read_local_model(candidate.path, as_draft=True)
    except LocalspecError as error:
        view.reason = error.message
        return view
    view.kind = file_draft_kind(draft.sidecar)
    view.size, view.ratio = draft.weights, target.weights / max(1, draft.weights)
    if not draft.sidecar and draft.weights >= target.weights:
        view.reason = f"it is not smaller than the target ({draft.weights} bytes of weights)."
    elif draft.rollback == "none":
        view.reason = describe_rollback(candidate.name, draft.architecture, draft.rollback) + "."
    else:
        judgement = judge_pair(target, draft)
        view.matched, view.notes = judgement.matched, judgement.notes
        view.reason = "" if judgement.matched else f"{judgement.reason}."
    return view
