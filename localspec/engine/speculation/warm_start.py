"""What is expected of a draft model that nobody has seen at work: how well it foresees the target in two
short texts.

Without that its first answer tries it on trust: a bad one costs that answer some hundredths of its time,
and a good one is not used until it has shown that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

import numpy as np

from localspec.engine.llama import Batch, Context, NotFinite, Vocab
from localspec.engine.speculation.acceptance import Belief, Calibration
from localspec.engine.speculation.drafters.model import DraftModel
from localspec.errors import InvalidRequest

CODE = """\
def moving_average(values: list[float], width: int) -> list[float]:
    if width < 1:
        raise ValueError("the width must be at least 1")
    sums, total = [], 0.0
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
"""
PROSE = """\
The lighthouse stood at the end of a long and narrow road, where the wind came straight from the sea. In
winter nobody went there but the keeper and his two daughters, who walked to school along the shore and came
home in the dark. They knew every stone of the way, and they were never afraid of
"""
TEXTS = (CODE, PROSE)
TOKENS = 48  # of each text
# Of its last ones it is compared what both models choose next: of as many as a draft's pass has logits for.
LOOKED_AT = 16
LEAST = 2 * LOOKED_AT  # tokens that a text has at least, so that there is something to foresee from


def warm_start(
    target: Context,
    batch: Batch,
    model: DraftModel,
    calibration: Calibration,
    turn: Callable[[], AbstractContextManager[object]],
) -> None:
    """Let a calibration that knows nothing begin with what two short texts show. target: with nothing in it,
    as afterwards; a text is read in a `turn`. A text without numbers is passed over.

    What a model chooses in a text that it has not written is not what it would have written: so this
    is half of what is expected, the other half is hope, and the first rounds correct both.
    """
    expected = []
    most = min(batch.capacity, target.n_ctx, model.context.n_ctx)
    for tokens in _texts(target.model.vocab, most):
        belief = Belief(calibration)
        with turn(), suppress(NotFinite):
            for at, hit in model.foresees(tokens, _chosen(target, batch, tokens)):
                belief.observe(at, hit)
            expected.append(belief.weights)
    if expected:
        calibration.expect(np.mean(expected, axis=0))


def _texts(vocab: Vocab, most: int) -> list[list[int]]:
    """The beginnings that are read, in tokens, `most` of each; none that is too short, or may not be read."""
    if not vocab.reads_all:
        return []
    found = []
    for text in TEXTS:
        with suppress(InvalidRequest):
            found.append(vocab.tokenize(text, add_special=True, parse_special=False))
    cut = min(TOKENS, most)
    return [tokens[:cut] for tokens in found if min(len(tokens), cut) >= LEAST]


def _chosen(target: Context, batch: Batch, tokens: Sequence[int]) -> list[int]:
    """What it would write after each of the last tokens."""
    batch.clear()
    first = len(tokens) - LOOKED_AT
    for at, token in enumerate(tokens):
        batch.add(token, at, 0, at >= first)
    try:
        target.decode(batch)
        target.synchronize()
        return [target.likeliest(row) for row in range(first, len(tokens))]
    finally:
        target.clear()
