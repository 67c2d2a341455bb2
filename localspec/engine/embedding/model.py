"""A model that turns texts into numbers: loaded, and its passes.

A pass has as many texts as its rows hold, each a sequence of its own, and nothing is kept of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from localspec.engine.llama import (
    Batch,
    Context,
    ContextSettings,
    Model,
    NotFinite,
    OutOfMemory,
    backend,
)
from localspec.engine.llama.heads import States
from localspec.engine.pair.models import physical_cores, threads_for, usable_cores
from localspec.errors import LoadFailed
from localspec.protocol.frames import EngineSettings, Loaded, PairFiles
from localspec.purpose import has_no_cache, reads_whole

# Rows, unless one text has more and must be read at once: wider ones are no faster. Half as many where
# the model could write: llama.cpp makes logits of each.
PASS = 512
LEAST = 256  # tokens of the longest text; with less memory nothing is tried
USUAL = 2048  # where the settings leave it to us
TEXTS = 64  # in one pass


class EmbeddingModel:
    """One loaded model. longest: tokens of a text. pooling: "rank" of a reranker."""

    def __init__(
        self,
        files: PairFiles,
        settings: EngineSettings,
        progress: Callable[[str, float], None],
        longest: int,
        notes: Sequence[str] = (),
    ) -> None:
        """Load it. longest: tokens, 0 where that is to be chosen.

        Raises:
            OutOfMemory, LoadFailed
        """
        assert files.pooling is not None
        self.files, self.pooling, self.notes = files, files.pooling, list(notes)
        self._settings = settings
        self._opened = ExitStack()
        try:
            self._open(progress, longest)
        except BaseException:
            self.close()
            raise

    def _open(self, progress: Callable[[str, float], None], longest: int) -> None:
        s = self._settings
        self.model = model = self._opened.enter_context(
            Model(
                self.files.target,
                n_gpu_layers=s.n_gpu_layers,
                split_mode=s.split_mode,
                main_gpu=s.main_gpu,
                extra_buffers=s.extra_buffers,
                progress=lambda fraction: progress("target", fraction),
            )
        )
        causal = model.metadata(f"{model.architecture}.attention.causal") != "false"
        if model.vocab.size == 0 or model.has_encoder:  # T5's has a graph of its own
            raise LoadFailed(f"{model.path} cannot be used for embeddings.")
        trained = model.n_ctx_train or USUAL
        self.longest = min(longest or USUAL, trained)
        self.whole = reads_whole(model.architecture, causal=causal, pooling=self.pooling)
        self.texts = TEXTS if model.takes_company else 1
        least = PASS if has_no_cache(model.architecture) else PASS // 2
        self.rows = max(least, self.longest) if self.whole else least
        threads = min(s.n_threads or physical_cores(), usable_cores())
        self.context = self._opened.enter_context(
            Context(
                model,
                ContextSettings(
                    n_ctx=max(self.rows, self.longest),
                    n_batch=self.rows,
                    n_seq=self.texts,
                    n_outputs=self.rows,
                    n_threads=threads_for(model, threads),
                    flash_attention=s.flash_attention,
                    pooling=self.pooling,
                ),
            )
        )
        self._batch = Batch(self.rows)
        try:  # kernels that end the process do so here, and weights that are no numbers show
            self.encode([[0, min(1, model.vocab.size - 1)]])
        except NotFinite as error:
            raise LoadFailed(error.message) from None
        progress("target", 1.0)

    def encode(self, texts: Sequence[Sequence[int]]) -> list[States]:
        """The numbers of each text, whose tokens fit into `rows`, or are of one text alone.

        Raises:
            NotFinite; Aborted, BadBatch, DecodeFatal: as Context.decode.
        """
        try:
            self._read(texts)
            return [np.array(self.context.pooled(at)) for at in range(len(texts))]
        finally:
            for at in range(len(texts)):
                self.context.remove(at, 0)

    def _read(self, texts: Sequence[Sequence[int]]) -> None:
        batch = self._batch
        batch.clear()
        for sequence, tokens in enumerate(texts):
            for at, token in enumerate(tokens):
                if batch.rows == self.rows:  # of a text that need not be read at once
                    self.context.decode(batch)
                    batch.clear()
                batch.add(token, at, sequence, True)
        self.context.decode(batch)
        self.context.synchronize()

    def info(self) -> Loaded:
        """What the daemon is told of it."""
        vocab = self.model.vocab
        return Loaded(
            name=self.files.name,
            target_description=self.model.description,
            draft_description=None,
            n_ctx=self.longest,
            parallel=self.texts,
            chat_template=None,
            bos_token=vocab.text(vocab.bos),
            eos_token=vocab.text(vocab.eos),
            speculation=f"it is {'a reranker' if self.pooling == 'rank' else 'an embedding model'}",
            notes=self.notes,
            backend=backend() if self._settings.n_gpu_layers else "cpu",
        )

    def close(self) -> None:
        """Free everything."""
        self._opened.close()


def load_embedding_model(
    files: PairFiles, settings: EngineSettings, progress: Callable[[str, float], None]
) -> EmbeddingModel:
    """Load it, for shorter texts where memory does not hold a pass of the longest.

    Raises:
        LoadFailed: why it cannot be loaded.
    """
    longest, notes = settings.n_ctx, list[str]()
    while True:
        try:
            return EmbeddingModel(files, settings, progress, longest, notes)
        except OutOfMemory:
            longest = (longest or USUAL) // 2
            if longest < LEAST:
                raise
            notes = [f"Texts may have at most {longest} tokens: memory holds no more."]
