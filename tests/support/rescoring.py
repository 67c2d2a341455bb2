"""Re-scoring: was each token of a greedy answer the target's argmax, or nearly?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from localspec.engine.llama import Batch, Context, ContextSettings, Model

# Logits of other pass widths differ in their last bits (measured on these float32 models: below 1e-4).
NEAR_TIE = 1e-3


def worst_gap(
    path: str, prompt: Sequence[int], answer: Sequence[int], banned: Iterable[int] = ()
) -> float:
    """The largest amount by which another token's logit beat the answer's, reading it one by one.

    The tokens `banned` could not be chosen, as the tokens that end an answer with `ignore_eos`.
    """
    text = [*prompt, *answer]
    settings = ContextSettings(n_ctx=len(text) + 8, n_batch=64, n_seq=1, n_outputs=1, n_threads=1)
    worst = 0.0
    with Model(path) as model, Context(model, settings) as context:
        batch = Batch(64)
        for position, token in enumerate(text[:-1]):
            batch.clear()
            batch.add(token, position, 0, True)
            context.decode(batch)
            if position >= len(prompt) - 1:
                row = np.array(context.logits(0))
                row[list(banned)] = -np.inf
                worst = max(worst, float(row.max() - row[text[position + 1]]))
    return worst
