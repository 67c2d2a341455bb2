"""The initial acceptance of a draft model, or of heads: how well they predict the target in two short texts.

Without this the first answer would try the draft model on trust. A bad one would cost that answer a few per
cent of its time, and a good one would not be used until it had proved itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

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
CHINESE = """\
清晨,湖面上还有一层薄雾,渔夫已经把船推进了水里。他的孙子坐在船头,手里拿着一盏旧灯笼,问他今天能不能捕到昨天逃走的那条大鱼。老人笑了,说
"""
RECORDS = """\
{"orders": [{"id": 1041, "customer": "Ada", "items": 3, "paid": true}, {"id": 1042, "customer": "Grace",
"items": 1, "paid": false}, {"id": 1043, "customer": "Edsger", "items": 2, "paid":
"""
DIALOGUE = """\
User: My train leaves at nine and the station is four kilometres away. When should I start to walk?
Assistant: At an ordinary pace you need about fifty minutes, so leave at eight.
User: And if I take the bicycle?
Assistant: Then
"""
# A draft that predicts TEXTS badly is tried with these, too: it may be made for other texts.
OTHER_TEXTS = (CHINESE, RECORDS, DIALOGUE)
MAX_TEXT_TOKENS = 48  # of each text
# At how many of the last tokens the predictions of both models are compared. A draft's pass has logits for
# this many.
COMPARED_TOKENS = 16
MIN_TEXT_TOKENS = 2 * COMPARED_TOKENS  # shorter texts give too little to predict from


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many of the `compared` tokens that the target chose a draft predicted."""

    hits: int = 0
    compared: int = 0

    @classmethod
    def of(cls, comparisons: Sequence[tuple[int, bool]]) -> Agreement:
        """Count what `DraftModel.compare_predictions` returned."""
        return cls(sum(hit for _, hit in comparisons), len(comparisons))

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.hits + other.hits, self.compared + other.compared)

    @property
    def share(self) -> float:
        """The share of hits; 1 if nothing was compared."""
        return self.hits / self.compared if self.compared else 1.0


def warm_start(
    target: Context,
    batch: Batch,
    model: DraftModel,
    calibration: Calibration,
    turn: Callable[[], AbstractContextManager[object]],
) -> Agreement:
    """Set an unused calibration to what two short texts show, and return that.

    target: an empty context, which is empty again afterwards. turn: each text is read inside one. A text
    that gives NaN or infinite values is skipped.

    What a model predicts in a text is not what it would have written itself. So these texts are half of the
    expectation, the hopeful prior is the other half, and the first rounds correct both.
    """
    return set_expectation(calibration, _compare_texts(target, batch, model, turn, TEXTS))


def set_expectation(
    calibration: Calibration, texts: Iterable[Sequence[tuple[int, bool]]]
) -> Agreement:
    """Set an unused calibration to what was compared in some texts, and return that.

    texts: for each, what `DraftModel.compare_predictions` returns.
    """
    expected, agreement = [], Agreement()
    for comparisons in texts:
        belief = Belief(calibration)
        for bucket_index, hit in comparisons:
            belief.observe(bucket_index, hit)
        expected.append(belief.weights)
        agreement += Agreement.of(comparisons)
    if expected:
        calibration.average_prior(np.mean(expected, axis=0))
    return agreement


def compare_other_texts(
    target: Context,
    batch: Batch,
    model: DraftModel,
    turn: Callable[[], AbstractContextManager[object]],
) -> Agreement:
    """Return how well a draft predicts the target in texts of other kinds.

    The parameters are those of `warm_start`.
    """
    compared = _compare_texts(target, batch, model, turn, OTHER_TEXTS)
    return sum(map(Agreement.of, compared), Agreement())


def _compare_texts(
    target: Context,
    batch: Batch,
    model: DraftModel,
    turn: Callable[[], AbstractContextManager[object]],
    texts: Sequence[str],
) -> Iterator[list[tuple[int, bool]]]:
    """Yield for each text what `DraftModel.compare_predictions` returns."""
    max_tokens = min(batch.capacity, target.n_ctx, model.context.n_ctx)
    for tokens in _tokenize_texts(target.model.vocab, max_tokens, texts):
        with turn(), suppress(NotFinite):
            chosen, states = _predict_target(target, batch, tokens)
            yield model.compare_predictions(tokens, chosen, states)


def _tokenize_texts(vocab: Vocab, max_tokens: int, texts: Sequence[str] = TEXTS) -> list[list[int]]:
    """Return the tokens of the texts, at most `max_tokens` of each; none that is too short."""
    if not vocab.covers_all_text:
        return []
    tokenized = []
    for text in texts:
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
        batch.add(token, position, 0, position >= first or target.states_need_logits)
    try:
        target.decode(batch)
        target.synchronize()
        chosen = [target.argmax_token(row) for row in range(first, len(tokens))]
        return chosen, target.states(0, len(tokens)).copy() if target.n_state else None
    finally:
        target.clear()
