"""Judge which models on this disk could be targets and drafts, and propose pairs worth adding."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.compatibility import Compatibility, Tokenizer, compare
from localspec.errors import LocalspecError
from localspec.protocol.disk import DiskModel
from localspec.protocol.pairs import AddRequest
from localspec.registry.catalogue import reserved
from localspec.registry.disk.discovery import Found
from localspec.registry.header.architectures import rollback_sentence
from localspec.registry.header.model import read_local_model
from localspec.registry.header.vocabulary import read_vocabulary

# Target weights / draft weights. A draft of half the size costs half of the target's time for each token that
# it proposes, which is too much to save time.
MIN_RATIO = 2.0
_FAMILY_COVERAGE = 0.99  # share of the used tokens that models of one family have in common
PATIENCE_S = 120.0  # a header takes about 50 ms, longer on a disk that has to spin up
_PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
_MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A model whose header was read. Models with the same `kind` have the same tokenizer."""

    found: Found
    weights: int
    kind: int
    can_pair: bool


def judge_all(
    models: Iterable[Found],
    told: Callable[[str], None] = lambda name: None,
    patience: float = PATIENCE_S,
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
    candidates.sort(key=lambda candidate: candidate.weights)
    verdicts: dict[tuple[int, int], Compatibility] = {}

    def drafts(target: _Candidate) -> Iterator[tuple[bool, int, bool, str, Found]]:
        """Yield the drafts and their sort key: same family first, then small ones, then the same program."""
        for draft in candidates:
            if draft.weights * MIN_RATIO > target.weights or not draft.can_pair:
                continue
            kind_pair = target.kind, draft.kind
            if kind_pair not in verdicts:
                verdicts[kind_pair] = compare(tokenizers[kind_pair[0]], tokenizers[kind_pair[1]])
            if verdicts[kind_pair].usable:
                file, is_unrelated = draft.found, verdicts[kind_pair].coverage < _FAMILY_COVERAGE
                is_elsewhere = file.origin != target.found.origin
                yield is_unrelated, draft.weights, is_elsewhere, file.name, file

    judged: list[DiskModel] = []
    for result in results:
        if isinstance(result, _Candidate):
            ranked = sorted(drafts(result), key=lambda item: item[:4]) if result.can_pair else []
            files = [draft for *_, draft in ranked]
            result = _to_disk_model(result.found, result.weights, drafts=files)
        judged.append(result)
    return judged


def _to_disk_model(
    file: Found, weights: int = 0, problem: str = "", drafts: Sequence[Found] = ()
) -> DiskModel:
    paths = tuple(str(draft.path) for draft in drafts)
    return DiskModel(file.name, str(file.path), file.origin, weights, problem, paths)


def _read_candidate(
    file: Found, kinds: dict[tuple[object, ...], int], tokenizers: list[Tokenizer]
) -> _Candidate:
    """Read a model's header and return only what is needed of it.

    The tokens take 15 MB, so models with the same tokenizer share one copy.
    """
    model = read_local_model(file.path)
    vocabulary = read_vocabulary(model.header)
    tokenizer = vocabulary.tokenizer
    digest = hashlib.sha256(vocabulary.tokens.raw).digest()
    key = (
        tokenizer.kind,
        tokenizer.bos,
        tokenizer.eos,
        tokenizer.add_bos,
        tokenizer.add_eos,
        digest,
    )
    if key not in kinds:
        kinds[key] = len(tokenizers)
        tokenizers.append(tokenizer)
    sentence = rollback_sentence(model.name, model.architecture, model.rollback)
    can_pair = not (sentence and model.rollback == "none") and not model.pooling
    return _Candidate(file, model.weights, kinds[key], can_pair)


def propose(
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
    while name in names or reserved(name):
        number += 1
        name = f"{stem}-{number}"
    return name
