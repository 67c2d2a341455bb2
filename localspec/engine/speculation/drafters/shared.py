"""The tokens that target and draft share, where they do not share all.

Everything outside the draft's own memory speaks the target's ids: what the draft is shown and what it
proposes is translated here. An id is shared if both vocabularies have it with the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localspec.compatibility import Compatibility
from localspec.engine.llama import Logits, Vocab


@dataclass(frozen=True)
class SharedTokens:
    """What of the target's vocabulary the draft may see and propose; by default all of it.

    size: of the target's vocabulary, 0 where the two are the same. common, differing: as in
    Compatibility. stand_ins: the draft's token for each that only the target has.
    """

    size: int = 0
    common: int = 0
    differing: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    stand_ins: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Vocab, draft: Vocab, found: Compatibility) -> SharedTokens:
        if not found.differing and target.size == draft.size:
            return cls()
        differing = np.array(found.differing, dtype=np.intp)
        return cls(target.size, found.common, differing, _stand_ins(target, draft, found))

    def shown(self, token: int) -> int:
        """The draft's id for a token of the target: the same, or what stands for it."""
        return self.stand_ins.get(token, token)

    def proposals(self, logits: Logits) -> Logits:
        """The draft's logits (n_vocab of the draft,) as a row of the target's (n_vocab of the target,):
        minus infinity for every token that is not shared."""
        if not self.size:
            return logits
        row = np.full(self.size, -np.inf, dtype=np.float32)
        row[: self.common] = logits[: self.common]
        row[self.differing] = -np.inf
        return row


def _stand_ins(target: Vocab, draft: Vocab, found: Compatibility) -> Mapping[int, int]:
    """For each token that only the target has, one of the draft's with its meaning: of the same text,
    or also the begin or the end; else a space, which says nothing, and leaves the places as they are.
    """
    missing = [*found.differing, *range(found.common, target.size)]
    if not missing:
        return {}
    by_text = _by_text(draft)
    space = _space(draft)
    meanings = {target.bos: draft.bos, target.eos: draft.eos, target.end: draft.end}
    stand_ins = {}
    for token in missing:
        meant = meanings.get(token, -1)
        stand_ins[token] = by_text.get(target.text(token), meant if meant >= 0 else space)
    return stand_ins


def _by_text(vocab: Vocab) -> Mapping[str, int]:
    return {vocab.text(token): token for token in reversed(range(vocab.size))}


def _space(vocab: Vocab) -> int:
    tokens: Sequence[int] = vocab.tokenize(" ", add_special=False, parse_special=False)
    return tokens[-1] if tokens else 0
