"""The initial acceptance of a draft model, or of heads: how well they predict the target in two short texts.

Without this the first answer would try the draft model on trust. A bad one would cost that answer a few per
cent of its time, and a good one would not be used until it had proved itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

import numpy as np

from localspec.engine.llama import Batch, Context, NotFinite, States, Vocab
from localspec.engine.speculation.acceptance import Belief, Calibration
from localspec.engine.speculation.drafters.draft_model import DraftModel
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
MAX_TEXT_TOKENS = 48  # of each text
# At how many of the last tokens the predictions of both models are compared. A draft's pass has logits for
# this many.
COMPARED_TOKENS = 16
MIN_TEXT_TOKENS = 2 * COMPARED_TOKENS  # shorter texts give too little to predict from


def warm_start(
    target: Context,
    batch: Batch,
    model: DraftModel,
    calibration: Calibration,
    turn: Callable[[], AbstractContextManager[object]],
) -> None:
    """Set an unused calibration to what two short texts show.

    target: an empty context, which is empty again afterwards. turn: each text is read inside one. A text
    that gives NaN or infinite values is skipped.

    What a model predicts in a text is not what it would have written itself. So these texts are half of the
    expectation, the hopeful prior is the other half, and the first rounds correct both.
    """
    expected = []
    max_tokens = min(batch.capacity, target.n_ctx, model.context.n_ctx)
    for tokens in _tokenize_texts(target.model.vocab, max_tokens):
        belief = Belief(calibration)
        with turn(), suppress(NotFinite):
            chosen, states = _predict_target(target, batch, tokens)
            for bucket_index, hit in model.compare_predictions(tokens, chosen, states):
                belief.observe(bucket_index, hit)
            expected.append(belief.weights)
    if expected:
        calibration.average_prior(np.mean(expected, axis=0))


def _tokenize_texts(vocab: Vocab, max_tokens: int) -> list[list[int]]:
    """Return the tokens of the texts, at most `max_tokens` of each; none that is too short."""
    if not vocab.covers_all_text:
        return []
    tokenized = []
    for text in TEXTS:
        with suppress(InvalidRequest):
            tokenized.append(vocab.tokenize(text, add_special=True, parse_special=False))
    limit = min(MAX_TEXT_TOKENS, max_tokens)
    return [tokens[:limit] for tokens in tokenized if min(len(tokens), limit) >= MIN_TEXT_TOKENS]


def _predict_target(
    target: Context, batch: Batch, tokens: Sequence[int]
) -> tuple[list[int], States | None]:
    """Return what the target predicts after each of the last tokens, and its states after all of them."""
    batch.clear()
    first = len(tokens) - COMPARED_TOKENS
    for position, token in enumerate(tokens):
        batch.add(token, position, 0, position >= first)
    try:
        target.decode(batch)
        target.synchronize()
        chosen = [target.argmax_token(row) for row in range(first, len(tokens))]
        return chosen, target.states(0, len(tokens)).copy() if target.n_state else None
    finally:
        target.clear()
