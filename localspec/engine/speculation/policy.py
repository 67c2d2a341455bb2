"""What a request may use of a loaded pair: which kinds of drafts, how deep, by which rule."""

from __future__ import annotations

from localspec.engine.pair.pair import Pair
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.engine.speculation.depth import (
    MAX_LIMIT,
    DepthPolicy,
    FixedDepth,
    MeasuredDepth,
)
from localspec.protocol.frames import Generate


def wants_exact(pair: Pair, request: Generate) -> bool:
    return pair.settings.exact if request.exact is None else request.exact


def depth(pair: Pair, prepared: TokenizedRequest) -> DepthPolicy:
    asked = prepared.request.speculative.depth
    depth = asked if asked is not None else pair.settings.depth
    return MeasuredDepth() if depth is None else FixedDepth(min(depth, MAX_LIMIT))


def kinds(pair: Pair, prepared: TokenizedRequest) -> list[str]:
    """The kinds of drafts this request may use, none where speculation is off or impossible."""
    asked = prepared.request.speculative
    depth = asked.depth if asked.depth is not None else pair.settings.depth
    if not asked.enabled or depth == 0 or pair.no_rollback is not None:
        return []
    kinds = []
    if prepared.matcher is not None:
        kinds.append("grammar")
    if asked.kind in ("auto", "ngram") and not rejects(pair, prepared):
        kinds.append("ngram")
    if asked.kind in ("auto", "draft") and pair.drafter is not None:
        kinds.append("draft")
    return kinds


def why_no_drafts(pair: Pair, prepared: TokenizedRequest) -> str:
    """Why `kinds` has none."""
    asked = prepared.request.speculative
    if not asked.enabled:
        return "switched off by the request"
    if asked.depth == 0 or pair.settings.depth == 0:
        return "depth 0 was asked for"
    return pair.no_rollback or pair.no_draft


def needs_no_logits(prepared: TokenizedRequest | Sequence) -> bool:
    """Does the highest logit of each row decide, and nobody look at the row itself?"""
    settings = prepared.sampler.settings
    touched = settings.penalised or settings.infill or bool(settings.logit_bias)
    touched = touched or prepared.matcher is not None
    asked = prepared.request.top_logprobs is not None
    return settings.greedy and not touched and not asked


def rejects(pair: Pair, prepared: TokenizedRequest) -> bool:
    """Verify by the rejection rule? `auto`: where nothing asks for the tokens of plain decoding."""
    request = prepared.request
    settings = prepared.sampler.settings
    rule = request.speculative.verification
    if settings.greedy or pair.drafter is None or request.speculative.kind == "ngram":
        return False
    if rule != "auto":
        return rule == "rejection"
    fixed = settings.seed is not None or prepared.matcher is not None or settings.penalised
    return not fixed and request.top_logprobs is None and not request.speculative.prediction
