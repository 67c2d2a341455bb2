"""Load an embedding model or reranker and run its passes.

A pass holds as many texts as fit in its rows. Each text is a sequence of its own, and nothing is cached.
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

# Rows of a pass, unless a longer text must be read at once. Wider passes are not faster. Models that could
# also generate text have half as many, because llama.cpp allocates logits for each row.
PASS = 512
LEAST = 256  # Tokens of the longest text; loading is not tried with fewer.
USUAL = 2048  # Tokens of the longest text if the settings do not give a number.
TEXTS = 64  # Texts in one pass.


class EmbeddingModel:
    """A loaded embedding model or reranker.

    longest: tokens of the longest text. pooling: the kind of pooling, "rank" for a reranker.
    """

    def __init__(
        self,
        files: PairFiles,
        settings: EngineSettings,
        progress: Callable[[str, float], None],
        longest: int,
        notes: Sequence[str] = (),
    ) -> None:
        """Load the model. longest: tokens of the longest text; 0 means the default.

        Raises:
            OutOfMemory: memory does not hold the model and its pass.
            LoadFailed: the model cannot be used for embeddings.
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
        settings = self._settings
        self.model = model = self._opened.enter_context(
            Model(
                self.files.target,
                n_gpu_layers=settings.n_gpu_layers,
                split_mode=settings.split_mode,
                main_gpu=settings.main_gpu,
                extra_buffers=settings.extra_buffers,
                progress=lambda fraction: progress("target", fraction),
            )
        )
        causal = model.metadata(f"{model.architecture}.attention.causal") != "false"
        # An encoder such as T5's runs in another way.
        if model.vocab.size == 0 or model.has_encoder:
            raise LoadFailed(f"{model.path} cannot be used for embeddings.")
        trained = model.n_ctx_train or USUAL
        self.longest = min(longest or USUAL, trained)
        self.whole = reads_whole(model.architecture, causal=causal, pooling=self.pooling)
        self.texts = TEXTS if model.takes_company else 1
        min_rows = PASS if has_no_cache(model.architecture) else PASS // 2
        self.rows = max(min_rows, self.longest) if self.whole else min_rows
        threads = min(settings.n_threads or physical_cores(), usable_cores())
        self.context = self._opened.enter_context(
            Context(
                model,
                ContextSettings(
                    n_ctx=max(self.rows, self.longest),
                    n_batch=self.rows,
                    n_seq=self.texts,
                    n_outputs=self.rows,
                    n_threads=threads_for(model, threads),
                    flash_attention=settings.flash_attention,
                    pooling=self.pooling,
                ),
            )
        )
        self._batch = Batch(self.rows)
        # A trial pass shows here whether a kernel ends the process or weights are not finite.
        try:
            self.encode([[0, min(1, model.vocab.size - 1)]])
        except NotFinite as error:
            raise LoadFailed(error.message) from None
        progress("target", 1.0)

    def encode(self, texts: Sequence[Sequence[int]]) -> list[States]:
        """Return the embedding or score (n_pooled,) of each text.

        All tokens must fit in `rows`, unless there is only one text.

        Raises:
            NotFinite: a result is not finite.
            DecodeError: as in Context.decode.
        """
        try:
            self._decode_texts(texts)
            return [np.array(self.context.pooled(sequence)) for sequence in range(len(texts))]
        finally:
            for sequence in range(len(texts)):
                self.context.remove(sequence, 0)

    def _decode_texts(self, texts: Sequence[Sequence[int]]) -> None:
        batch = self._batch
        batch.clear()
        for sequence, tokens in enumerate(texts):
            for position, token in enumerate(tokens):
                # A text that need not be read at once may take several passes.
                if batch.rows == self.rows:
                    self.context.decode(batch)
                    batch.clear()
                batch.add(token, position, sequence, True)
        self.context.decode(batch)
        self.context.synchronize()

    def info(self) -> Loaded:
        """Return the description of the loaded model for the daemon."""
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
        """Free the model and its context."""
        self._opened.close()


def load_embedding_model(
    files: PairFiles, settings: EngineSettings, progress: Callable[[str, float], None]
) -> EmbeddingModel:
    """Load a model, with shorter texts if memory does not hold a pass of the longest ones.

    Raises:
        LoadFailed: the model cannot be loaded.
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
