"""What there is room for in a lane: one more text, drafts in a pass that others wait for, and one that comes
while a pass runs.
"""

from __future__ import annotations

import math
from itertools import pairwise

from localspec.engine.cache.prefixes import common_prefix
from localspec.engine.pair.lane import Lane
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.engine.speculation.depth import MAX_DEPTH

# Tokens that each is left to write before one may have to give way to the others: giving way costs
# reading a text again, so it is to bring some progress first.
GROWTH = 64
YIELD = 4  # drafts may take the place of one in so many tokens of a prompt that is read beside them


def fits(lane: Lane, waiting: TokenizedRequest | Sequence) -> bool:
    """Is there room for it beside those that run, and for all to go on a while? Alone there always is.

    One that gave way waits until another has left, so that none is started and stopped in turns.
    """
    if not lane.active:
        return True
    if any(sequence.alone for sequence in lane.active):
        return False
    growth = sum(min(sequence.left, GROWTH) for sequence in lane.active)
    if isinstance(waiting, Sequence):
        if waiting.alone or waiting.gave_way == lane.ended:
            return False
        growth += min(waiting.left, GROWTH)
    else:
        asked = waiting.request.max_tokens
        growth += GROWTH if asked is None else min(asked, GROWTH)
    texts = [waiting.tokens, *(sequence.tokens for sequence in lane.active)]
    room = lane.context.n_ctx - growth
    return sum(map(len, texts)) <= room or cells(texts) <= room


def cells(texts: list[list[int]]) -> int:
    """Cells that texts take where each shares its beginning with the others as far as it can.

    Texts read at the same time share less: this is the least they take.
    """
    ordered = sorted(texts)
    shared = sum(common_prefix(a, b) for a, b in pairwise(ordered))
    return sum(map(len, texts)) - shared


def drafts_beside(lane: Lane, sequences: list[Sequence], decoding: int) -> int:
    """Rows of drafts that others wait for: no more than they may wait for what another copies, and, where a
    prompt is read in the same pass, none that makes that longer than it may be.
    """
    beside = lane.rows_beside(decoding)
    most = max(beside, MAX_DEPTH * decoding)
    prompts = [each for each in sequences if each.prefilling]
    if not prompts:
        return most
    left = beside - sum(len(each.step.read) for each in prompts)
    growing = sum(len(each.step.read) for each in prompts if each.reads_on)
    if any(each.request.priority == "editor" for each in prompts):
        growing = 0
    return min(most, max(left, 0) + growing // YIELD)


def ends_for(lane: Lane, sequences: list[Sequence], writing: bool) -> tuple[list[int], float]:
    """Whose leaving ends the pass on its way, and how many seconds long it ends for one that comes.

    The one's who has most of it: what is left for the others is sooner done. And it ends for one that
    comes where nobody is `writing`: at any time where others should not wait for it, but not just after one
    was ended so; and as it begins, so that all who come together are read together.
    """
    own = sequences[0].slot
    if not lane.slots.cuttable and any(slot.n_past for slot in lane.slots if slot is not own):
        return [], 0.0  # llama.cpp moves all their states in a pass
    rows = lane.batch.rows
    by = [each.id for each in sequences if each.prefilling and 2 * len(each.step.read) > rows]
    makes_room = lane.slots.cuttable and lane.slots.free
    if not makes_room or writing or lane.exact or any(each.yields for each in sequences):
        return by, 0.0
    if lane.is_long:
        return by, math.inf
    return by, lane.begins_s if all(each.patient for each in sequences) else 0.0
