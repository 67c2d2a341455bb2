"""The target's states at each token of the texts that a draft of its own learns from.

They lie in a file, because those of a million tokens of a large model are more than memory holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.extras.tune.lessons import Lesson
from localspec.extras.tune.reading import Floats, Integers, TextReader

WINDOW_TOKENS = 256  # that are learned at once
MIN_WINDOW_TOKENS = 8
COVERAGE, MAX_VOCABULARY, VOCABULARY_STEP = 0.995, 32768, 32

States = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Window:
    """A part of a text, with what the target reads and writes at each token.

    tokens: (n,). states: (n, width), in a file. top, shares: (n, k) as in `Lesson`.
    """

    tokens: Integers
    states: States
    top: Integers
    shares: Floats


class StateReader(TextReader):
    """A reader of a target that also writes its states to a file, in the order in which texts are read."""

    def __init__(self, path: str, threads: int, file: Path) -> None:
        """Load the model. Raises as `TextReader`, and OSError if the file cannot be made."""
        super().__init__(path, threads)
        self.layers = choose_layers(self.model.n_layer, emits_layers=self.model.emits_layers)
        self._context.emit_states(self.layers)
        self._width = self._context.n_state
        self._path, self._file = file, file.open("wb")
        self.bytes_written = 0

    def close(self) -> None:
        self._file.close()
        super().close()

    def read(self, tokens: Sequence[int], first: int) -> Iterator[Floats]:
        """Yield logits as `Reader` says, and write the states of the same tokens."""
        for logits in super().read(tokens, first):
            states = self._context.states(0, self._batch.rows)
            self.bytes_written += self._file.write(states.astype(np.float16).data)
            yield logits

    def windows(self, lessons: Sequence[Lesson]) -> list[Window]:
        """Return what was read so far in parts. lessons: those that were taught, in the same order."""
        states: States = np.memmap(self._path, np.float16, "r").reshape(-1, self._width)
        windows, end = [], 0
        for lesson in lessons:
            assert lesson.first == 0
            tokens = np.array(lesson.tokens, np.int64)
            for start in range(0, len(tokens) - MIN_WINDOW_TOKENS, WINDOW_TOKENS):
                part = slice(start, start + WINDOW_TOKENS)
                rows = states[end : end + len(tokens)]
                windows.append(
                    Window(tokens[part], rows[part], lesson.top[part], lesson.shares[part])
                )
            end += len(tokens)
        return windows


def choose_layers(n_layer: int, *, emits_layers: bool) -> tuple[int, int, int]:
    """Return the layers of a target that its draft reads: a low, a middle and a high one, as EAGLE-3 does.

    Where a target does not show them, it is what follows the last one.
    """
    if not emits_layers:
        return (n_layer,) * 3
    low, middle, high = sorted((min(2, n_layer - 1), n_layer // 2, max(n_layer - 3, 0)))
    return low, middle, high


def choose_vocabulary(lessons: Sequence[Lesson], n_vocab: int) -> Integers:
    """Return the tokens that a draft of its own can propose, ascending: most of what the target has written.

    Each of them costs time at every draft.
    """
    counts = np.zeros(n_vocab, np.int64)
    for lesson in lessons:
        np.add.at(counts, lesson.labels, 1)
    order = np.argsort(-counts, kind="stable")
    covered = np.cumsum(counts[order])
    n = int(np.searchsorted(covered, COVERAGE * covered[-1])) + 1
    n = min(-(-n // VOCABULARY_STEP) * VOCABULARY_STEP, MAX_VOCABULARY, n_vocab)
    return np.sort(order[:n])
