"""Read texts with a model, and return its logits and states at each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import Batch, Context, ContextSettings, Model

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

BATCH_ROWS = 64
MAX_CONTEXT = 4096  # tokens of one text


class TextReader:
    """A context of a model that reads one text after the other."""

    def __init__(self, model: Model, threads: int, *, states: bool = False) -> None:
        """Create the context.

        states: `read` also yields states, for which every row needs an output.

        Raises:
            OutOfMemory: memory does not hold it.
        """
        self.n_ctx = min(model.n_ctx_train or MAX_CONTEXT, MAX_CONTEXT)
        settings = ContextSettings(self.n_ctx, BATCH_ROWS, 1, BATCH_ROWS, threads)
        self._context = Context(model, settings)
        self._batch = Batch(BATCH_ROWS)
        self._with_states = states
        if states:
            self._context.emit_embeddings()

    def close(self) -> None:
        self._context.close()

    def read(self, tokens: Sequence[int], first: int) -> Iterator[tuple[Floats, Floats]]:
        """Yield logits (rows, n_vocab) and states (rows, width) of the positions from `first` on.

        tokens: at most `n_ctx` tokens. They come in batches, which together have a row for each position.
        The states have no rows unless they were asked for.

        Raises:
            DecodeError: llama.cpp refuses a pass.
        """
        context, none = self._context, np.zeros((0, self._context.model.n_embd), np.float32)
        context.clear()
        for start in range(0, len(tokens), BATCH_ROWS):
            end = min(start + BATCH_ROWS, len(tokens))
            self._batch.clear()
            rows = [
                self._batch.add(tokens[position], position, 0, position >= first)
                for position in range(start, end)
            ][max(first - start, 0) :]
            context.decode(self._batch)
            if rows:
                states = (
                    np.stack([context.embedding(row) for row in rows])
                    if self._with_states
                    else none
                )
                yield np.stack([context.logits(row) for row in rows]), states
