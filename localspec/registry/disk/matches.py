"""What the models on this disk could be to each other: targets, drafts, and the pairs worth making."""

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

# Target to draft, in bytes of weights. A draft half as large costs half of the target's time for each
# token it guesses, and is worth that to nobody.
MIN_RATIO = 2.0
_NEARLY_ALL = 0.99  # of the tokens in use, as all of one family share; strangers propose less
PATIENCE_S = 120.0  # headers are read in some 50 ms each; a disk that sleeps takes longer
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class _Model:
    found: Found
    weights: int
    kind: int  # models of one kind have the same tokenizer
    can_pair: bool


def judge_all(
    models: Iterable[Found],
    told: Callable[[str], None] = lambda name: None,
    patience: float = PATIENCE_S,
) -> list[DiskModel]:
    """Every model with what can draft for it, by the one rule and by size. `told`: which is being read."""
    end = time.monotonic() + patience
    kinds: dict[tuple[object, ...], int] = {}
    tokenizers: list[Tokenizer] = []
    read: list[_Model | DiskModel] = []
    for found in models:
        told(found.name)
        if time.monotonic() > end:
            sentence = f"it was not read within {patience:.0f} s; name fewer folders."
            read.append(_disk_model(found, problem=sentence))
            continue
        try:
            read.append(_read(found, kinds, tokenizers))
        except LocalspecError as error:
            read.append(_disk_model(found, problem=error.message))
    good = sorted((each for each in read if isinstance(each, _Model)), key=lambda m: m.weights)
    known: dict[tuple[int, int], Compatibility] = {}

    def drafts(target: _Model) -> Iterator[tuple[bool, int, bool, str, Found]]:
        """In their order: what shares nearly all tokens, the smaller, of the same program."""
        for draft in good:
            if draft.weights * MIN_RATIO > target.weights or not draft.can_pair:
                continue
            pair = target.kind, draft.kind
            if pair not in known:
                known[pair] = compare(tokenizers[pair[0]], tokenizers[pair[1]])
            if known[pair].usable:
                other, apart = draft.found, known[pair].coverage < _NEARLY_ALL
                away = other.origin != target.found.origin
                yield apart, draft.weights, away, other.name, other

    judged: list[DiskModel] = []
    for each in read:
        if isinstance(each, _Model):
            best = sorted(drafts(each), key=lambda it: it[:4]) if each.can_pair else []
            each = _disk_model(each.found, each.weights, drafts=[draft for *_, draft in best])
        judged.append(each)
    return judged


def _disk_model(
    found: Found, weights: int = 0, problem: str = "", drafts: Sequence[Found] = ()
) -> DiskModel:
    paths = tuple(str(each.path) for each in drafts)
    return DiskModel(found.name, str(found.path), found.origin, weights, problem, paths)


def _read(
    found: Found, kinds: dict[tuple[object, ...], int], tokenizers: list[Tokenizer]
) -> _Model:
    """A model without its header: 15 MB of tokens are kept once for all that share them."""
    model = read_local_model(found.path)
    own = read_vocabulary(model.header)
    its = own.tokenizer
    digest = hashlib.sha256(own.tokens.raw).digest()
    key = (its.kind, its.bos, its.eos, its.add_bos, its.add_eos, digest)
    if key not in kinds:
        kinds[key] = len(tokenizers)
        tokenizers.append(its)
    sentence = rollback_sentence(model.name, model.architecture, model.rollback)
    pairs = not (sentence and model.rollback == "none") and not model.pooling
    return _Model(found, model.weights, kinds[key], pairs)


def propose(
    models: Sequence[DiskModel],
    paired: Container[str],
    taken: Iterable[str],
    call: Callable[[str, Path], str],
) -> list[AddRequest]:
    """The pairs worth making of models that are in none: each with its best draft, and those that
    have none and are nobody's draft alone. `paired`: paths of models that are in one. `taken`: names that
    mean something already. `call`: what to call the file of that name and path.
    """
    known = {each.path: each for each in models}
    helpers = {draft for each in models for draft in each.drafts}
    names = set(taken)
    made: list[AddRequest] = []
    for each in models:
        if each.problem or each.path in paired:
            continue
        if not each.drafts and each.path in helpers:
            continue
        draft = known[each.drafts[0]] if each.drafts else None
        name = free_name(each.name, names)
        names.add(name)
        made.append(
            AddRequest(
                name=name,
                target=call(each.name, Path(each.path)),
                draft=call(draft.name, Path(draft.path)) if draft else None,
                hash_now=False,  # a pair that is made here may never be used
            )
        )
    return made


def free_name(model: str, taken: Iterable[str]) -> str:
    """A pair's name made of a model's, that nothing has yet."""
    stem = model.rpartition("/")[2].lower().removesuffix(":latest")
    while stem.endswith(".gguf"):
        stem = _PART.sub("", stem.removesuffix(".gguf"))
    stem = re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")[: _LONGEST_NAME - 4] or "model"
    names, number = set(taken), 1
    name = stem
    while name in names or reserved(name):
        number += 1
        name = f"{stem}-{number}"
    return name
