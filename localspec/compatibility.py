"""Can one model draft for another? One rule, for the registry (headers) and the engine (loaded models).

Only the target tokenizes and only the target's choices count, so a draft can never make an answer
wrong: what decides is whether its ids mean the same tokens, so that its guesses can be right. The floor
is llama.cpp's own rule (common/speculative.cpp, common_speculative_are_compatible): tokenizers of one
kind, that add the same begin and end tokens. Where llama.cpp goes on to refuse vocabularies that differ
in size or in the text of a token, we speculate over what they share: ids that only one side has, or
whose texts differ, are never proposed and never shown to the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from itertools import islice
from math import log
from typing import Protocol

MAX_SIZE_DIFFERENCE = 128  # SPEC_VOCAB_MAX_SIZE_DIFFERENCE of llama.cpp
FIRST_COMPARED = 5  # SPEC_VOCAB_CHECK_START_TOKEN_ID of llama.cpp
# A draft that misses much of what is written proposes little that can be right. Pairs of one family
# share 99 % of what is used and more, strangers (GPT-2 and Qwen, Llama and Qwen) at most a quarter.
MIN_COVERAGE = 0.6
# Tokenizers number their tokens in the order in which training merged them, the frequent ones first;
# the use of rank r is taken as 1 / (r + 100) (Zipf and Mandelbrot's law; 100 for the bytes before).
_FLAT = 100


class Texts(Sized, Iterable[bytes], Protocol):
    """The texts of all tokens, by id. Two equal ones compare equal, at little cost."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What the rule reads of a tokenizer.

    kind: llama.cpp's kind of vocabulary ("bpe", "spm", …). texts: each token as the vocabulary has it.
    bos, eos: ids, None (or below 0) where there is none. add_bos, add_eos: are they put around a text?
    """

    kind: str
    texts: Texts
    bos: int | None
    eos: int | None
    add_bos: bool
    add_eos: bool


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The verdict.

    reason: why the draft cannot draft for the target, naming the first difference; empty where it can.
    common: ids from 0 that both sides have. differing: those of them whose texts differ.
    coverage: the estimated share of the target's tokens in use (0…1) that the two share.
    """

    reason: str
    common: int = 0
    differing: tuple[int, ...] = ()
    coverage: float = 1.0
    note: str = ""  # what is not shared, where anything is not

    @property
    def usable(self) -> bool:
        return not self.reason


def compare(target: Tokenizer, draft: Tokenizer) -> Compatibility:
    """Can `draft` draft for `target`? The cheapest questions come first."""
    for what, ours, theirs in (
        ("the kind of tokenizer", f"'{target.kind}'", f"'{draft.kind}'"),
        ("add_bos_token", _flag(target.add_bos), _flag(draft.add_bos)),
        ("add_eos_token", _flag(target.add_eos), _flag(draft.add_eos)),
        ("the begin token", *_added(target.add_bos, target.bos, draft.bos)),
        ("the end token", *_added(target.add_eos, target.eos, draft.eos)),
    ):
        if ours != theirs:
            return Compatibility(f"{what} is {ours} in the target and {theirs} in the draft")
    sizes = len(target.texts), len(draft.texts)
    common = min(sizes)
    differing: tuple[int, ...] = ()
    if target.texts != draft.texts:  # equal ones, the usual case, compare as one block of bytes
        pairs = enumerate(zip(target.texts, draft.texts, strict=False))
        differing = tuple(at for at, (one, other) in pairs if one != other)
    coverage = _coverage(sizes[0], common, differing)
    told = _difference(target, draft, differing)
    floor = abs(sizes[0] - sizes[1]) <= MAX_SIZE_DIFFERENCE and (
        not differing or differing[-1] < FIRST_COMPARED
    )
    if not floor and coverage < MIN_COVERAGE:
        return Compatibility(
            f"{told}; the draft knows {coverage:.0%} of the tokens that the target is likely to "
            f"write, and at least {MIN_COVERAGE:.0%} are needed",
            common,
            differing,
            coverage,
        )
    return Compatibility("", common, differing, coverage, _note(sizes, differing, coverage, told))


def _flag(value: bool) -> str:
    return str(value).lower()


def _added(added: bool, ours: int | None, theirs: int | None) -> tuple[str, str]:
    """Ids matter where they are added; else the prompt has what its template says, or nothing."""
    return (str(ours), str(theirs)) if added else ("", "")


def _coverage(size: int, common: int, differing: tuple[int, ...]) -> float:
    """The share of use that falls on shared ids, by rank; sums of 1 / (r + c) as logarithms."""
    if not size:
        return 0.0
    shared = _use(0, common) - sum(_use(at, at + 1) for at in differing)
    return max(0.0, shared) / _use(0, size)


def _use(first: int, end: int) -> float:
    return log((end + _FLAT) / (first + _FLAT))


def _difference(target: Tokenizer, draft: Tokenizer, differing: tuple[int, ...]) -> str:
    """The first difference, as a clause; empty where there is none."""
    if differing:
        first = differing[0]
        ours, theirs = (_text(each.texts, first) for each in (target, draft))
        return f"token {first} is {ours} in the target and {theirs} in the draft"
    if len(target.texts) != len(draft.texts):
        return f"the target has {len(target.texts)} tokens and the draft {len(draft.texts)}"
    return ""


def _note(sizes: tuple[int, int], differing: tuple[int, ...], coverage: float, told: str) -> str:
    if not told:
        return ""
    if sizes[0] < sizes[1] and not differing:
        return f"{told}; the draft never proposes the others"
    missing = max(0, sizes[0] - sizes[1]) + len(differing)
    return (
        f"{told}; {missing} of the target's tokens are never drafted, an estimated "
        f"{100 * (1 - coverage):.2g}% of those in use"
    )


def _text(texts: Texts, index: int) -> str:
    """A token for a message: short, printable, quoted."""
    text = next(islice(texts, index, None)).decode("utf-8", "replace")
    return repr(text if len(text) <= 40 else text[:40] + "…")
