"""Decide whether one model can draft for another.

The registry applies this rule to headers and the engine to loaded models.

Only the target tokenizes, and only its choices count, so a draft can never make an answer wrong. What
matters is whether the draft's ids mean the same tokens, so that its guesses can be right. The minimum is
llama.cpp's own rule (common/speculative.cpp, common_speculative_are_compatible): tokenizers of the same
kind that add the same begin and end tokens. llama.cpp also refuses vocabularies that differ in size or in
the text of a token. localspec speculates over the shared part instead: ids that only one side has, or
whose texts differ, are never proposed and never shown to the draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from itertools import islice
from math import log
from typing import Protocol

MAX_SIZE_DIFFERENCE = 128  # tokens; SPEC_VOCAB_MAX_SIZE_DIFFERENCE of llama.cpp
FIRST_COMPARED_ID = 5  # SPEC_VOCAB_CHECK_START_TOKEN_ID of llama.cpp
# Smallest share of the used tokens that a draft must know. A draft that lacks many of them rarely guesses
# right. Models of one family share at least 99 %; unrelated ones (GPT-2 and Qwen, Llama and Qwen) share at
# most 25 %.
MIN_COVERAGE = 0.6
# Offset of the Zipf-Mandelbrot law, by which the token of rank r is used in proportion to 1 / (r + 100).
# Training numbers tokens in merge order, the frequent ones first, so an id serves as a rank. The offset
# stands for the byte tokens that come before.
_RANK_OFFSET = 100


class TokenTexts(Sized, Iterable[bytes], Protocol):
    """The texts of all tokens, indexed by id.

    Two vocabularies with the same texts must compare equal, cheaply.
    """


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The properties of a tokenizer that the rule compares."""

    kind: str  # llama.cpp's kind of vocabulary ("bpe", "spm", …)
    texts: TokenTexts  # each token as the vocabulary has it
    bos: int | None  # the id; None or a negative number if there is none
    eos: int | None
    add_bos: bool  # whether it is added to a text
    add_eos: bool


@dataclass(frozen=True, slots=True)
class Compatibility:
    """The verdict on a target and a draft."""

    # Why the draft cannot draft for the target, as a clause that names the first difference, or "".
    reason: str
    common: int = 0  # how many ids, from 0, both sides have
    differing: tuple[int, ...] = ()  # the common ids whose texts differ
    coverage: float = 1.0  # estimated share of the target's used tokens that both models know
    note: str = ""  # what is not shared, as a clause, or ""

    @property
    def usable(self) -> bool:
        return not self.reason


def compare_tokenizers(target: Tokenizer, draft: Tokenizer) -> Compatibility:
    """Compare two tokenizers, cheapest checks first, and return whether `draft` can draft for `target`."""
    for property_name, target_value, draft_value in (
        ("the kind of tokenizer", f"'{target.kind}'", f"'{draft.kind}'"),
        ("add_bos_token", str(target.add_bos).lower(), str(draft.add_bos).lower()),
        ("add_eos_token", str(target.add_eos).lower(), str(draft.add_eos).lower()),
        ("the begin token", target.add_bos and target.bos, target.add_bos and draft.bos),
        ("the end token", target.add_eos and target.eos, target.add_eos and draft.eos),
    ):
        if target_value != draft_value:
            return Compatibility(
                f"{property_name} is {target_value} in the target and {draft_value} in the draft"
            )
    sizes = len(target.texts), len(draft.texts)
    common = min(sizes)
    differing: tuple[int, ...] = ()
    if target.texts != draft.texts:  # usually they are equal, which one bytes comparison shows
        pairs = enumerate(zip(target.texts, draft.texts, strict=False))
        differing = tuple(index for index, (text, draft_text) in pairs if text != draft_text)
    coverage = _estimate_coverage(sizes[0], common, differing)
    difference = _first_difference(target, draft, differing)
    is_llama_compatible = abs(sizes[0] - sizes[1]) <= MAX_SIZE_DIFFERENCE and (
        not differing or differing[-1] < FIRST_COMPARED_ID
    )
    if not is_llama_compatible and coverage < MIN_COVERAGE:
        return Compatibility(
            f"{difference}; the draft knows {coverage:.0%} of the tokens that the target is likely to "
            f"write, and at least {MIN_COVERAGE:.0%} are needed",
            common,
            differing,
            coverage,
        )
    return Compatibility(
        "", common, differing, coverage, _sharing_note(sizes, differing, coverage, difference)
    )


def _estimate_coverage(size: int, common: int, differing: tuple[int, ...]) -> float:
    """Return the share of token use that falls on shared ids.

    The use of a range of ids is a sum of 1 / (rank + offset), which is approximated by a logarithm.
    """

    def usage_between(first: int, end: int) -> float:
        return log((end + _RANK_OFFSET) / (first + _RANK_OFFSET))

    if not size:
        return 0.0
    lost = sum(usage_between(index, index + 1) for index in differing)
    return max(0.0, usage_between(0, common) - lost) / usage_between(0, size)


def _first_difference(target: Tokenizer, draft: Tokenizer, differing: tuple[int, ...]) -> str:
    """Return the first difference as a clause, or an empty text if there is none."""
    if differing:
        token_id = differing[0]
        target_text, draft_text = (_quote_token(model.texts, token_id) for model in (target, draft))
        return f"token {token_id} is {target_text} in the target and {draft_text} in the draft"
    if len(target.texts) != len(draft.texts):
        return f"the target has {len(target.texts)} tokens and the draft {len(draft.texts)}"
    return ""


def _sharing_note(
    sizes: tuple[int, int], differing: tuple[int, ...], coverage: float, difference: str
) -> str:
    """Return what the two models do not share, as a clause, or an empty text."""
    if not difference:
        return ""
    if sizes[0] < sizes[1] and not differing:
        return f"{difference}; the draft never proposes the others"
    missing = max(0, sizes[0] - sizes[1]) + len(differing)
    return (
        f"{difference}; {missing} of the target's tokens are never drafted, an estimated "
        f"{100 * (1 - coverage):.2g}% of those in use"
    )


def _quote_token(texts: TokenTexts, index: int) -> str:
    """Return the text of a token for a message: short, printable and quoted."""
    text = next(islice(texts, index, None)).decode("utf-8", "replace")
    return repr(text if len(text) <= 40 else text[:40] + "…")
