"""The target's states at each token of the texts that a draft of its own learns from.

They lie in a file, because those of a million tokens of a large model are more than memory holds.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import why_no_layers
from localspec.errors import LoadFailed
from localspec.extras.tune.lessons import Lesson
from localspec.extras.tune.reading import Floats, Integers, TextReader

PART_TOKENS = 256  # The tokens of a text that are learned from at once.
MIN_PART_TOKENS = 8
# A vocabulary holds this share of what the target has written. Each of its tokens costs time at every draft.
VOCABULARY_SHARE, MAX_VOCABULARY, VOCABULARY_STEP = 0.995, 32768, 32

Floats16 = npt.NDArray[np.float16]
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Window:
    """A part of a text, with what the target reads and writes at each token.

    tokens: (n,). states: (n, width), in a file. top, shares: (n, k) as in `Lesson`.
    """

    tokens: Integers
    states: Floats16
    top: Integers
    shares: Floats


class StateReader(TextReader):
    """A reader of a target that also writes its states to a file, in the order in which texts are read."""

    def __init__(self, path: str, threads: int, folder: str, gpu_layers: int = 0) -> None:
        """Load the model.

        folder: where the file lies, which has no name there, so that nothing of it stays if the process ends.
        gpu_layers: as of `TextReader`.

        Raises:
            LoadFailed, OutOfMemory: the model cannot be loaded, or this build cannot show its states.
            OSError: the file cannot be made.
        """
        super().__init__(path, threads, gpu_layers)
        with contextlib.ExitStack() as on_error:
            on_error.callback(super().close)
            if reason := why_no_layers():
                raise LoadFailed(f"No new draft can be made: {reason}.")
            self.layers = choose_layers(self.model.n_layer, emits_layers=self.model.emits_layers)
            self._context.emit_states(self.layers)
            # A state that several inputs of the layer read is written once.
            is_one = len(set(self.layers)) == 1
            self._width = self.model.n_embd if is_one else self._context.n_state
            self._file: BinaryIO = on_error.enter_context(tempfile.TemporaryFile(dir=folder))
            on_error.pop_all()

    def read(self, tokens: Sequence[int], first: int) -> Iterator[Floats]:
        """Yield logits as `Reader` says, and write the states of the same tokens."""
        for logits in super().read(tokens, first):
            states = self._context.states(0, self._batch.rows)[:, : self._width]
            halves = states.clip(-_LARGEST, _LARGEST).astype(np.float16)
            self.bytes_written += self._file.write(halves.data)
            yield logits

    def windows(self, lessons: Sequence[Lesson]) -> list[Window]:
        """Return what was read in parts. Nothing can be read afterwards.

        lessons: those that were taught, in the same order.

        Raises:
            LoadFailed: there is no text that is long enough.
        """
        with self._file as file:
            file.flush()
            if not self.bytes_written:
                raise LoadFailed("The texts are too short to learn from.")
            states: Floats16 = np.memmap(file, np.float16, "r").reshape(-1, self._width)
        windows, end = [], 0
        for lesson in lessons:
            tokens = np.array(lesson.tokens, np.int64)
            rows = states[end : end + len(tokens)]
            end += len(tokens)
            for start in range(0, len(tokens) - MIN_PART_TOKENS, PART_TOKENS):
                part = slice(start, start + PART_TOKENS)
                windows.append(
                    Window(tokens[part], rows[part], lesson.top[part], lesson.shares[part])
                )
        if not windows:
            raise LoadFailed("The texts are too short to learn from.")
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
    """Return the tokens that a new draft can propose, ascending: most of what the target has written."""
    counts = np.zeros(n_vocab, np.int64)
    for lesson in lessons:
        np.add.at(counts, lesson.labels, 1)
    order = np.argsort(-counts, kind="stable")
    covered = np.cumsum(counts[order])
    n = int(np.searchsorted(covered, VOCABULARY_SHARE * covered[-1])) + 1
    n = min(-(-n // VOCABULARY_STEP) * VOCABULARY_STEP, MAX_VOCABULARY, n_vocab)
    return np.sort(order[:n])
