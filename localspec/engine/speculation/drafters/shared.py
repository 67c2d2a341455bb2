"""The tokens that target and draft model share, where their vocabularies differ.

All code but the draft's own memory uses the target's ids. What the draft reads and what it proposes is
translated here. An id is shared if both vocabularies have it with the same text.
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
    """The part of the target's vocabulary that the draft can read and propose; by default all of it.

    size: size of the target's vocabulary, 0 where the two are the same. common, differing: as in
    Compatibility. stand_ins: the draft's token for each that only the target has.
    """

    size: int = 0
    common: int = 0
    differing: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    stand_ins: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Vocab, draft: Vocab, compatibility: Compatibility) -> SharedTokens:
        if not compatibility.differing and target.size == draft.size:
            return cls()
        differing = np.array(compatibility.differing, dtype=np.intp)
        return cls(
            target.size, compatibility.common, differing, _stand_ins(target, draft, compatibility)
        )

    def shown(self, token: int) -> int:
        """Return the draft's id for a token of the target: the same, or its stand-in."""
        return self.stand_ins.get(token, token)

    def proposals(self, logits: Logits) -> Logits:
        """Return the draft's logits as a row of the target's.

        The argument has shape (n_vocab of the draft,), the result (n_vocab of the target,) with minus
        infinity for every token that is not shared.
        """
        if not self.size:
            return logits
        row = np.full(self.size, -np.inf, dtype=np.float32)
        row[: self.common] = logits[: self.common]
        row[self.differing] = -np.inf
        return row


def _stand_ins(target: Vocab, draft: Vocab, compatibility: Compatibility) -> Mapping[int, int]:
    """Return the draft's stand-in for each token that only the target has.

    It has the same text, or the same meaning as begin or end of the text. Otherwise it is a space, which
    says little and keeps all positions as they are.
    """
    missing = [*compatibility.differing, *range(compatibility.common, target.size)]
    if not missing:
        return {}
    by_text = _index_by_text(draft)
    space = _find_space(draft)
    meanings = {target.bos: draft.bos, target.eos: draft.eos, target.end: draft.end}
    stand_ins = {}
    for token in missing:
        equivalent = meanings.get(token, -1)
        stand_ins[token] = by_text.get(target.text(token), equivalent if equivalent >= 0 else space)
    return stand_ins


def _index_by_text(vocab: Vocab) -> Mapping[str, int]:
    return {vocab.text(token): token for token in reversed(range(vocab.size))}


def _find_space(vocab: Vocab) -> int:
    tokens: Sequence[int] = vocab.tokenize(" ", add_special=False, parse_special=False)
    return tokens[-1] if tokens else 0
