"""Learn in idle time how well the draft model would have drafted answers that were written without it.

Where drafts seem not to pay, an answer can afford a few short probes of the draft model and no more. So a
pair whose first impression was wrong would keep it for hundreds of answers. When nobody waits for anything,
the draft model reads such answers with the text before them, and its predictions are compared with what the
target wrote. That costs no answer any time, and a new request ends it. Heads and sidecars, which need the
target's states, only compare at the end of an answer how much of its text they should see (windows.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from localspec.engine.cache.slot import ALL_TOKENS, Slot
from localspec.engine.llama import Aborted, NoKvSlot, NotFinite, Stop
from localspec.engine.speculation.acceptance import Belief, Calibration
from localspec.engine.speculation.drafters.base import Drafter
from localspec.engine.speculation.drafters.draft_model import DraftModel, ModelDrafter

# Drafts of an answer that are compared in one pass, and how many such passes there are, evenly spread.
COMPARED_TOKENS, MAX_PASSES = 16, 3
CONTEXT_TOKENS = 128  # that a pass reads before them
# Passes that wait for idle time. The newest are kept, because they say most about the next answer.
MAX_WAITING = 12


@dataclass(frozen=True)
class _Passage:
    """The end of a text, of which the last `count` tokens are compared."""

    model: DraftModel
    calibration: Calibration
    tokens: list[int]
    count: int

    def learn(self, stop: Stop | None) -> None:
        """Compare the draft's predictions with the passage. Raises as `DraftModel.review`."""
        belief = Belief(self.calibration)
        for bucket, hit in self.model.review(self.tokens, self.count, stop):
            belief.observe(bucket, hit)


@dataclass(frozen=True)
class _TextEnd:
    """The end of the text in a slot, at which it is compared how much of the text a draft should see."""

    model: DraftModel
    calibration: Calibration
    slot: Slot

    def learn(self, stop: Stop | None) -> None:
        """Compare the draft's predictions. Raises as `DraftModel.review`."""
        if not self.slot.busy:
            self.model.compare_windows(self.slot, self.calibration.windows, stop)


class Hindsight:
    """The passages of answers that are still to be read in idle time."""

    def __init__(self) -> None:
        self._passages: deque[_Passage | _TextEnd] = deque(maxlen=MAX_WAITING)

    @property
    def is_due(self) -> bool:
        """Whether there is something to read."""
        return bool(self._passages)

    def note(
        self, drafters: Sequence[Drafter], text: Sequence[int], n_answer: int, n_drafted: int
    ) -> None:
        """Note an answer that has ended, unless its own drafts have shown enough.

        drafters: of its request. text: the prompt and the answer, of which the last `n_answer` tokens are the
        answer. n_drafted: tokens that the draft model has drafted for it.
        """
        if n_drafted >= COMPARED_TOKENS:
            return
        n_passes = min(n_answer // COMPARED_TOKENS, MAX_PASSES)
        for drafter in drafters:
            if not (isinstance(drafter, ModelDrafter) and drafter.kind == ModelDrafter.kind):
                continue  # heads and blocks read the target's states, which are gone
            for number in range(n_passes):
                end = len(text) - number * n_answer // n_passes
                tokens = list(text[max(end - COMPARED_TOKENS - CONTEXT_TOKENS, 0) : end])
                count = min(COMPARED_TOKENS, len(tokens) - 1)
                self._passages.append(
                    _Passage(drafter.model, drafter.belief.calibration, tokens, count)
                )

    def note_end(self, drafters: Sequence[Drafter], slot: Slot) -> None:
        """Note the end of an answer of which a draft that reads the target's states has seen everything."""
        if slot.window == ALL_TOKENS:
            for drafter in drafters:
                if isinstance(drafter, ModelDrafter):
                    end = _TextEnd(drafter.model, drafter.belief.calibration, slot)
                    self._passages.append(end)

    def forget(self) -> None:
        self._passages.clear()

    def learn(self, stop: Stop | None) -> None:
        """Read one passage. One whose pass is ended by `stop` is read another time.

        Raises:
            DecodeFatal: The draft's context is lost.
        """
        passage = self._passages.pop()
        with suppress(NoKvSlot, NotFinite):
            try:
                passage.learn(stop)
            except Aborted:
                self._passages.append(passage)
