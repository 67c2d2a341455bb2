"""Correct rows of a draft's output matrix, so that it predicts the texts of one person better.

A draft's logits are `output matrix @ state`, where the state is what its last layer computes. So the states
can be computed from the logits, by least squares, whatever kind of draft it is. They stay as they are, and
only a softmax regression has to be fitted: a convex problem, which numpy solves in minutes and which has no
bad optimum. Only the rows of tokens that occur in the texts change. What all other tokens contribute to the
softmax is a constant of each position, and is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from localspec.errors import LoadFailed
from localspec.extras.tune.lessons import Lesson
from localspec.extras.tune.reading import Booleans, Floats, Integers, Reader

MAX_BATCH_POSITIONS, MIN_BATCH_POSITIONS, BATCHES_PER_EPOCH = 512, 32, 32
MAX_EPOCHS = 60
MAX_POSITIONS = 100_000  # 360 MB of states for a draft of 0.5 B
# Epochs without an improvement on the validation texts after which the fit ends.
PATIENCE_EPOCHS = 4
# Adam (Kingma and Ba 2015). The first step is a fraction of the root mean square of the matrix; steps shrink
# with the root of the epoch.
STEP, DECAY_FIRST, DECAY_SECOND, EPSILON = 0.02, 0.9, 0.99, 1e-8
# How far logits may be from any state times the matrix, as a fraction of their standard deviation.
MAX_LOGIT_ERROR = 0.1
# Added to the diagonal of the least squares, as a fraction of its mean: states in directions that hardly
# change any logit stay small.
RIDGE = 1e-6
LOWEST_LOGIT, TINY = -1e4, 1e-30  # stand for tokens that cannot come


class NotLinear(LoadFailed):
    """The draft's logits are not its states times its output matrix."""


@dataclass(frozen=True)
class Positions:
    """Positions of texts whose next token is known.

    states: (n, width) of the draft's last layer. labels: (n,) the next token as an index into the rows that
    may change. rest: (n,) logarithm of the sum of exp(logit) over all other tokens.
    """

    states: Floats
    labels: Integers
    rest: Floats

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Positions:
        return Positions(self.states[index], self.labels[index], self.rest[index])


def collect_positions(
    reader: Reader,
    lessons: Sequence[Lesson],
    matrix: Floats,
    tokens: Integers,
    changing: Booleans,
    go_on: Callable[[int], bool],
) -> Positions:
    """Return the positions of lessons whose next token is a row that may change, read with the draft.

    No further lesson is read after MAX_POSITIONS.

    matrix: (m, width) the output matrix. tokens: (m,) the sorted tokens of its rows. changing: (m,) which
    rows may change. go_on: called with the number of lessons after each; False ends this.

    Raises:
        NotLinear: the logits are no states times the matrix.
    """
    none = np.zeros(0, np.float32)
    parts = [Positions(np.zeros((0, matrix.shape[1]), np.float32), none.astype(np.int64), none)]
    # States are computed from their logits by least squares.
    square = (matrix.T @ matrix).astype(np.float64)
    square += RIDGE * np.trace(square) / len(square) * np.eye(len(square))
    inverse = np.linalg.pinv(square, hermitian=True).astype(np.float32)
    count = 0
    for number, lesson in enumerate(lessons, 1):
        start = 0
        for all_logits in reader.read(lesson.tokens, lesson.first):
            labels = lesson.labels[start : start + len(all_logits)]
            start += len(all_logits)
            logits = all_logits[:, tokens]
            states = np.asarray(logits @ matrix @ inverse, np.float32)
            errors = np.abs(logits - states @ matrix.T)
            if errors.mean() > MAX_LOGIT_ERROR * logits.std():
                raise NotLinear("Its logits are not its states times its output matrix.")
            parts.append(_positions(logits, states, labels, tokens, changing))
            count += len(parts[-1])
        if not go_on(number) or count >= MAX_POSITIONS:
            break
    names = ("states", "labels", "rest")
    return Positions(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _positions(
    logits: Floats, states: Floats, labels: Integers, tokens: Integers, changing: Booleans
) -> Positions:
    """Return the positions of one batch whose label is a row that may change."""
    rest_logits = np.where(changing, -np.inf, logits)
    highest = np.maximum(rest_logits.max(1), LOWEST_LOGIT)
    rest = highest + np.log(np.exp(rest_logits - highest[:, None]).sum(1) + TINY)
    row = np.minimum(np.searchsorted(tokens, labels), len(tokens) - 1)
    is_row = changing[row] & (tokens[row] == labels)
    index = np.cumsum(changing) - 1  # of each row among those that may change
    return Positions(states, index[row], rest.astype(np.float32))[is_row]


def fit_rows(
    rows: Floats, training: Positions, validation: Positions, go_on: Callable[[float], bool]
) -> Floats:
    """Return the rows (m, width) that give the validation texts the highest probability.

    The cross entropy of the training texts is minimized by Adam, and the rows of the best epoch are returned:
    those given if none was better. go_on: called before each batch with the epochs that are done; False ends
    this.
    """
    size = len(training) // BATCHES_PER_EPOCH
    size = min(max(size, MIN_BATCH_POSITIONS), MAX_BATCH_POSITIONS)
    generator = np.random.default_rng(0)
    best, best_loss, best_epoch = rows, _mean_loss(rows, validation), 0
    current = rows.copy()
    first, second = np.zeros_like(rows), np.zeros_like(rows)
    step_size = STEP * float(np.sqrt(np.mean(rows**2)))
    steps, is_over = 0, False
    for epoch in range(1, MAX_EPOCHS + 1):
        order = generator.permutation(len(training))
        for start in range(0, len(order), size):
            if is_over := not go_on(epoch - 1 + start / len(order)):
                break
            _, gradient = _loss(current, training[order[start : start + size]])
            steps += 1
            first += (1 - DECAY_FIRST) * (gradient - first)
            second += (1 - DECAY_SECOND) * (gradient**2 - second)
            scale = np.sqrt(1 - DECAY_SECOND**steps) / (1 - DECAY_FIRST**steps)
            current -= step_size / np.sqrt(epoch) * scale * first / (np.sqrt(second) + EPSILON)
        validation_loss = _mean_loss(current, validation)
        if validation_loss < best_loss:
            best, best_loss, best_epoch = current.copy(), validation_loss, epoch
        if is_over or epoch - best_epoch >= PATIENCE_EPOCHS:
            break
    return best


def _loss(rows: Floats, positions: Positions) -> tuple[float, Floats]:
    """Return the mean cross entropy in nats and its gradient (m, width)."""
    logits = positions.states @ rows.T
    highest = np.maximum(logits.max(1), positions.rest)
    exponentials = np.exp(logits - highest[:, None])
    total = exponentials.sum(1) + np.exp(positions.rest - highest)
    index = np.arange(len(positions))
    labelled = logits[index, positions.labels]
    loss = float(np.mean(np.log(total) + highest - labelled))
    exponentials /= total[:, None]
    exponentials[index, positions.labels] -= 1
    gradient: Floats = exponentials.T @ positions.states / np.float32(len(positions))
    return loss, gradient


def _mean_loss(rows: Floats, positions: Positions) -> float:
    """Return the mean cross entropy in nats, 0 without positions."""
    total = 0.0
    for start in range(0, len(positions), MAX_BATCH_POSITIONS):  # so that logits need little memory
        part = positions[start : start + MAX_BATCH_POSITIONS]
        total += len(part) * _loss(rows, part)[0]
    return total / max(len(positions), 1)
