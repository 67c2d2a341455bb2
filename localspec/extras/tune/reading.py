"""Read texts with a model, or with a sidecar behind its target, and return its logits at each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import (
    Batch,
    Context,
    ContextSettings,
    Model,
    free_gpu_bytes,
    model_files,
)
from localspec.engine.pair.load import load_pair
from localspec.engine.speculation.drafters.block import BlockDraft
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, PairFiles

# What a model needs on a GPU besides its file: a share of it, and bytes for a context and the logits.
GPU_MARGIN, GPU_RESERVE = 0.1, 1 << 30

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

# Tokens in a pass. A GPU needs more of them to be busy.
BATCH_ROWS, GPU_BATCH_ROWS = 64, 256
# Tokens that a sidecar reads at once, and for how many there are logits.
WINDOW_TOKENS, WINDOW_ROWS = 24, 16
MAX_CONTEXT = 4096  # tokens of one text


def place_layers(gpu_layers: int, *models: str) -> int:
    """Return how many layers of models go to a GPU: `gpu_layers` if it can hold all of them, else none.

    What other programs have loaded there, such as the daemon's pair, is not moved.

    gpu_layers: as in the configuration.
    """
    if not gpu_layers:
        return 0
    n_bytes = sum(Path(file).stat().st_size for model in models for file in model_files(model))
    return gpu_layers if n_bytes * (1 + GPU_MARGIN) + GPU_RESERVE <= free_gpu_bytes() else 0


class Reader(Protocol):
    """A model that reads one text after the other."""

    def close(self) -> None: ...

    def read(self, tokens: Sequence[int], first: int) -> Iterator[Floats]:
        """Yield logits (rows, n_vocab) of the positions from `first` on.

        tokens: at most `n_ctx` tokens. They come in batches, which together have a row for each position.

        Raises:
            DecodeError: llama.cpp refuses a pass.
        """
        ...


class TextReader:
    """A `Reader` with a model of its own.

    bytes_written: what it has written to the disk.
    """

    bytes_written = 0

    def __init__(self, path: Path | str, threads: int, gpu_layers: int = 0) -> None:
        """Load the model. Raises LoadFailed or OutOfMemory if that fails.

        gpu_layers: how many of its layers are on a GPU.
        """
        self.is_on_gpu = gpu_layers != 0
        self._n_rows = GPU_BATCH_ROWS if self.is_on_gpu else BATCH_ROWS
        self.model = Model(str(path), n_gpu_layers=gpu_layers)
        self.n_ctx = min(self.model.n_ctx_train or MAX_CONTEXT, MAX_CONTEXT)
        settings = ContextSettings(self.n_ctx, self._n_rows, 1, self._n_rows, threads)
        try:
            self._context = Context(self.model, settings)
        except BaseException:
            self.model.close()
            raise
        self._batch = Batch(self._n_rows)

    def close(self) -> None:
        self._context.close()
        self.model.close()

    def read(self, tokens: Sequence[int], first: int) -> Iterator[Floats]:
        """Yield logits as `Reader` says."""
        self._context.clear()
        for start in range(0, len(tokens), self._n_rows):
            end = min(start + self._n_rows, len(tokens))
            self._batch.clear()
            rows = [
                self._batch.add(tokens[position], position, 0, position >= first)
                for position in range(start, end)
            ][max(first - start, 0) :]
            self._context.decode(self._batch)
            if rows:
                yield np.stack([self._context.logits(row) for row in rows])


class SidecarReader:
    """A `Reader` with a sidecar, which reads what its target's layers have read.

    It reads each position behind a few tokens, not behind the whole text.
    """

    def __init__(
        self, target: Path | str, sidecar: Path | str, threads: int, gpu_layers: int = 0
    ) -> None:
        """Load both. Raises LoadFailed if they cannot be loaded, or the sidecar cannot draft.

        gpu_layers: how many layers of the target are on a GPU.
        """
        settings = EngineSettings(
            n_ctx=MAX_CONTEXT,
            parallel=1,
            n_batch=512,
            n_threads=threads,
            n_gpu_layers=gpu_layers,
            draft_gpu_layers=gpu_layers,
        )
        self._pair = load_pair(
            PairFiles("tuning", str(target), str(sidecar)), settings, lambda _stage, _done: None
        )
        self._batch = Batch(BATCH_ROWS)
        drafter = self._pair.drafter
        if drafter is None or drafter.context.borrows:
            reason = self._pair.no_draft or "it reads the cache of its target"
            self.close()
            raise LoadFailed(f"This sidecar cannot be tuned: {reason}.")
        self._drafter, self._read_predictions = drafter, drafter.read_predictions
        if isinstance(drafter, BlockDraft):
            self._read_predictions = partial(drafter.read_predictions, length=drafter.max_drafts)

    def close(self) -> None:
        self._pair.close()

    def read(self, tokens: Sequence[int], first: int) -> Iterator[Floats]:
        """Yield logits as `Reader` says. Those of the first token, which nothing comes before, are zero."""
        states = self._read_target(tokens)
        if first == 0 and tokens:
            yield np.zeros((1, self._drafter.context.n_vocab), np.float32)
        for start in range(max(first, 1), len(tokens), WINDOW_ROWS):
            end = min(start + WINDOW_ROWS, len(tokens))
            begin = max(end - WINDOW_TOKENS, 0)
            predictions = self._read_predictions(tokens[begin:end], end - start, states[begin:end])
            yield np.stack([logits.copy() for logits in predictions])

    def _read_target(self, tokens: Sequence[int]) -> Floats:
        """Return what the target has emitted at each token, (n, width)."""
        context, parts = self._pair.shared.context, []
        try:
            for start in range(0, len(tokens), BATCH_ROWS):
                end = min(start + BATCH_ROWS, len(tokens))
                self._batch.clear()
                for position in range(start, end):
                    wants_logits = position == end - 1 or context.states_need_logits
                    self._batch.add(tokens[position], position, 0, wants_logits)
                context.decode(self._batch)
                context.synchronize()
                parts.append(context.states(0, end - start).copy())
        finally:
            context.clear()
        return np.concatenate(parts)
