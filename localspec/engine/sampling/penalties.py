"""Apply the penalties on repetition: the repeat, frequency and presence penalties, and DRY.

DRY (p-e-w, 2024) penalises a token that would extend a repeated sequence, the more the longer the sequence. A
repeated sequence does not reach back across a sequence breaker.

The penalties are llama.cpp's own. They follow the text token by token, and copies of them follow drafts. Only
the logits of tokens that were seen are looked at. At 100 000 tokens, a row of DRY takes 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from localspec.engine.llama import Logits, NativeSampler, dry_penalty, is_picture, repeat_penalty
from localspec.engine.sampling.settings import Settings

_MAX_FLOAT32 = np.finfo(np.float32).max
# A larger penalty would not matter, because every other token is likelier at this one. The bound keeps the
# logit finite, since a grammar may allow no other token.
MAX_DRY_PENALTY = np.float32(1e6)
# Tokens that are looked at at most, where no context says how many there can be.
_USUAL_CONTEXT = 1 << 17
# Makes DRY from its multiplier, base, allowed length, last tokens and sequence breakers.
FindDry = Callable[[float, float, int, int, tuple[str, ...]], NativeSampler]
_WITHOUT_BREAKERS: FindDry = partial(dry_penalty, None)


class Penalties:
    """The penalties of one request, for the growing text of its sequence and for drafts after it.

    No penalty counts the pictures among the tokens.
    """

    def __init__(
        self,
        settings: Settings,
        n_ctx: int = _USUAL_CONTEXT,
        find_dry: FindDry = _WITHOUT_BREAKERS,
    ) -> None:
        """Prepare for texts of at most `n_ctx` tokens.

        find_dry: makes DRY by its settings; by default without sequence breakers.

        Raises:
            InvalidRequest: a sequence breaker is not valid Unicode.
        """
        given = self._settings = settings
        # llama.cpp allocates memory for each token that it looks back.
        self._last_n, dry_last_n = (
            min(last_n, n_ctx) if last_n >= 0 else n_ctx
            for last_n in (given.repeat_last_n, given.dry_penalty_last_n)
        )
        self._dry: list[NativeSampler] = []
        if given.dry_multiplier > 0.0:
            options = given.dry_multiplier, given.dry_base, given.dry_allowed_length, dry_last_n
            self._dry = [find_dry(*options, given.dry_sequence_breakers)]
        self._reach = max(self._last_n, dry_last_n if self._dry else 0)
        self._text: Sequence[int] = ()  # The list that `apply` was given.
        self._n_read = 0  # Tokens of it that the penalties have seen, or are pictures.
        self._drafts: list[int] = []  # Tokens after the text that `_ahead` has seen.
        self._of_text: list[NativeSampler] = []  # The repeat penalties, and DRY if it applies.
        self._ahead = self._of_text
        self._seen = np.empty(0, np.bool_)  # Whether a token was seen, by its id.

    def apply(self, row: Logits, text: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Apply every penalty to `row`, in place, for the token after `text` and `drafts`.

        If `text` is the list of the last call, it has only grown since.
        """
        if text is not self._text or len(text) < self._n_read:
            self._begin(text, len(row))
        self._follow(text, list(drafts))
        ids: npt.NDArray[np.integer] = np.flatnonzero(self._seen)
        repeats, *dry = self._ahead
        logits = repeats.apply(ids, row[ids])["logit"]
        possible = row[ids] > -np.inf
        logits[possible] = np.clip(logits[possible], -_MAX_FLOAT32, _MAX_FLOAT32)
        for penalty in dry:
            logits = np.maximum(penalty.apply(ids, logits)["logit"], logits - MAX_DRY_PENALTY)
        row[ids] = logits

    def _begin(self, text: Sequence[int], n_vocab: int) -> None:
        """Begin to follow another text."""
        given = self._settings
        penalties = given.repeat_penalty, given.frequency_penalty, given.presence_penalty
        self._of_text = [repeat_penalty(n_vocab, self._last_n, *penalties)]
        self._of_text += [penalty.clone() for penalty in self._dry]
        self._ahead, self._drafts = self._of_text, []
        self._seen = np.zeros(n_vocab, np.bool_)
        n_pictures = int((np.array(text, np.int32) < 0).sum())
        self._text, self._n_read = text, max(len(text) - n_pictures - self._reach, 0)

    def _follow(self, text: Sequence[int], drafts: list[int]) -> None:
        """See what `text` has gained, and `drafts` after it."""
        new = [token for token in text[self._n_read :] if not is_picture(token)]
        self._n_read = len(text)
        if new or drafts[: len(self._drafts)] != self._drafts:
            self._ahead, self._drafts = self._of_text, []
            self._see(new)
        if len(drafts) > len(self._drafts):
            if not self._drafts:
                self._ahead = [penalty.clone() for penalty in self._of_text]
            self._see(drafts[len(self._drafts) :])
            self._drafts = drafts

    def _see(self, tokens: list[int]) -> None:
        for penalty in self._ahead:
            penalty.accept(tokens)
        self._seen[tokens] = True
