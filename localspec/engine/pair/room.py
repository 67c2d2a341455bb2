"""What fits into a lane: one more text, drafts beside a prompt, and a new request while a pass runs."""

from __future__ import annotations

import math
from itertools import pairwise

from localspec.engine.cache.prefixes import common_prefix
from localspec.engine.pair.lane import Lane
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.engine.speculation.depth import MAX_DEPTH

# Tokens that each sequence can still generate before one may be preempted for the others. Preemption costs
# reading a text again, so some progress must come first.
GROWTH_TOKENS = 64
# Drafts may replace one in so many tokens of a prompt that is read in the same pass.
PROMPT_TOKENS_PER_DRAFT = 4


def fits(lane: Lane, waiting: TokenizedRequest | Sequence) -> bool:
    """Whether a request fits beside those that run, with room for all to go on for a while.

    A request that runs alone always fits. A preempted one waits until another has ended, so that requests
    are not started and stopped in turns.
    """
    if not lane.active:
        return True
    if any(sequence.alone for sequence in lane.active):
        return False
    growth = sum(min(sequence.left, GROWTH_TOKENS) for sequence in lane.active)
    if isinstance(waiting, Sequence):
        if waiting.alone or waiting.gave_way == lane.ended:
            return False
        growth += min(waiting.left, GROWTH_TOKENS)
    else:
        max_tokens = waiting.request.max_tokens
        growth += GROWTH_TOKENS if max_tokens is None else min(max_tokens, GROWTH_TOKENS)
    texts = [waiting.tokens, *(sequence.tokens for sequence in lane.active)]
    n_free = lane.context.n_ctx - growth
    return sum(map(len, texts)) <= n_free or cells(texts) <= n_free


def cells(texts: list[list[int]]) -> int:
    """Return the cells that texts take if each shares its beginning with the others as far as it can.

    This is a minimum: texts that are read at the same time share less.
    """
    ordered = sorted(texts)
    shared = sum(common_prefix(a, b) for a, b in pairwise(ordered))
    return sum(map(len, texts)) - shared


def drafts_beside(lane: Lane, sequences: list[Sequence], decoding: int) -> int:
    """Return how many rows of drafts a pass may have that other sequences wait for.

    Copied text must not delay them too much, and where a prompt is read in the same pass, drafts must not
    make it longer than it may be.
    """
    max_prompt_rows = lane.rows_beside(decoding)
    max_rows = max(max_prompt_rows, MAX_DEPTH * decoding)
    prompts = [sequence for sequence in sequences if sequence.prefilling]
    if not prompts:
        return max_rows
    remaining = max_prompt_rows - sum(len(sequence.step.read) for sequence in prompts)
    n_unfinished = sum(len(sequence.step.read) for sequence in prompts if sequence.reads_on)
    if any(sequence.request.priority == "editor" for sequence in prompts):
        n_unfinished = 0
    return min(max_rows, max(remaining, 0) + n_unfinished // PROMPT_TOKENS_PER_DRAFT)


def ends_for(lane: Lane, sequences: list[Sequence], writing: bool) -> tuple[list[int], float]:
    """Return whose withdrawal interrupts the pass, and for how many seconds a new request interrupts it.

    The withdrawal of a request with more than half of the rows does, because the rest is soon done again. A
    new request does unless somebody is `writing`: at any time if the pass is long, but not again just after
    such an interruption; otherwise only as the pass begins, so that requests sent together are read together.
    """
    own_slot = sequences[0].slot
    if not lane.slots.cuttable and any(slot.n_past for slot in lane.slots if slot is not own_slot):
        return [], 0.0  # a pass of llama.cpp moves the states of all of them
    rows = lane.batch.rows
    withdrawals = [
        sequence.id
        for sequence in sequences
        if sequence.prefilling and 2 * len(sequence.step.read) > rows
    ]
    makes_room = lane.slots.cuttable and lane.slots.free
    if not makes_room or writing or lane.exact or any(sequence.yields for sequence in sequences):
        return withdrawals, 0.0
    if lane.is_long:
        return withdrawals, math.inf
    return withdrawals, lane.begins_s if all(sequence.patient for sequence in sequences) else 0.0
