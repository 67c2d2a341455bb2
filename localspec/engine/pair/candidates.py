"""The candidates that may draft for a target, and the choice among them.

At the first load, a draft is compared with its target on short texts. If it predicts the target badly, the
next candidate is loaded and compared. The results are kept beside the profiles, so that later loads choose at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from localspec.engine.llama import OutOfMemory, gpus, llama_version
from localspec.engine.pair.profile import ProfileStore, hash_identity
from localspec.errors import LoadFailed
from localspec.protocol.frames import PairFiles

# The share of the target's tokens in short texts that good heads and sidecars predict is more than half.
POOR_AGREEMENT, DEAD_AGREEMENT = 0.25, 0.05
Draft = str | None  # the path of a draft; None: the heads in the target's own file, if it has any


class DraftFailed(LoadFailed):
    """The draft cannot be loaded or does not match. Another one may."""


class Verdict(NamedTuple):
    """How well a draft predicts its target.

    agreement: the share of the target's tokens that it predicted in short texts; 1 if that is not known.
    problem: a sentence if that is too little to be useful.
    """

    agreement: float = 1.0
    problem: str = ""


def judge_agreement(called: str, share: float, *, heads: bool) -> Verdict:
    """Return the verdict on a draft that predicted this share of the target's tokens.

    called: the draft's name in messages. heads: it was made for one target, as heads and sidecars are. A
    draft model was not, so only one that predicts next to nothing is a problem.
    """
    if share >= (POOR_AGREEMENT if heads else DEAD_AGREEMENT):
        return Verdict(share)
    cause = "made for another version of this model, or quantized too far"
    if share < DEAD_AGREEMENT:
        cause = "damaged, or made for another model"
    subject = f"{called[:1].upper()}{called[1:]}"
    shown = f"{share:.0%} of the target's tokens in short texts"
    return Verdict(share, f"{subject} predicted {shown}: probably {cause}.")


class DraftCandidates:
    """The draft of a pair and the others that lie beside its target, best first, with what is known of them.

    Nothing that is wrong with one of the others keeps the pair from loading.
    """

    def __init__(self, files: PairFiles, folder: str) -> None:
        """Read what earlier loads have left in `folder`; "" if nothing is kept."""
        other_drafts = [None if file == files.target else file for file in files.other_drafts]
        self._files = files
        self._drafts: list[Draft] = list(dict.fromkeys([files.draft, *other_drafts]))
        self._stores = {draft: _open_store(files.target, draft, folder) for draft in self._drafts}
        self._verdicts = {draft: _read_verdict(store) for draft, store in self._stores.items()}
        self._failures: dict[Draft, LoadFailed] = {}

    def choose(self) -> Draft:
        """Return the first draft that nothing is known against, or else the one that predicted best.

        A draft that the user named is replaced only if it is dead.
        """
        for draft in self._drafts:
            is_named = draft == self._files.draft and self._files.draft_named
            required = DEAD_AGREEMENT if is_named else POOR_AGREEMENT
            if self._verdicts[draft].agreement >= required:
                return draft
        return max(self._drafts, key=lambda draft: self._verdicts[draft].agreement)

    @contextmanager
    def trying(self, draft: Draft) -> Iterator[None]:
        """Load another draft than the pair's own for the first time inside this.

        llama.cpp ends the process if it meets what it does not expect. So the draft counts as useless until
        its load has ended, and the next process does without it.
        """
        store = self._stores[draft]
        if draft == self._files.draft or store.read():
            yield
            return
        ended = f"The engine ended while {_name(draft)} was loaded"
        problem = f"{ended}; to try it again, touch the file."
        store.write(Verdict(0.0, problem)._asdict())
        try:
            yield
        finally:
            store.write(Verdict()._asdict())

    def record(self, draft: Draft, verdict: Verdict | None) -> None:
        """Keep what a load has shown about a draft, if it was compared."""
        if verdict is not None:
            self._verdicts[draft] = verdict
            self._stores[draft].write(verdict._asdict())

    def discard(self, draft: Draft, error: DraftFailed | OutOfMemory) -> None:
        """Leave a draft out of this load. Raises the error of the pair's own draft if none is left."""
        self._drafts.remove(draft)
        self._failures[draft] = error
        too_large = isinstance(error, OutOfMemory)
        problem = f"Memory does not hold {_name(draft)}." if too_large else error.message
        self._verdicts[draft] = Verdict(0.0, problem)
        if not self._drafts:
            raise self._failures[self._files.draft]

    def describe(self, used: Draft, *, drafting: bool) -> list[str]:
        """Return sentences about drafts that are of little use, and about the one that is used.

        drafting: the one that is used can draft.
        """
        others = {draft: known for draft, known in self._verdicts.items() if draft != used}
        notes = [verdict.problem for verdict in others.values() if verdict.problem]
        if used != self._files.draft:
            own = "Its own MTP heads" if drafting else "N-grams alone"
            notes.append(f"{Path(used).name} drafts instead." if used else f"{own} draft instead.")
        if drafting and (problem := self._verdicts[used].problem):
            notes.append(f"{problem} Such drafts are used only where they pay.")
        return notes


def _name(draft: Draft) -> str:
    return Path(draft).name if draft else "its own MTP heads"


def _open_store(target: str, draft: Draft, folder: str) -> ProfileStore:
    try:
        key = hash_identity(filter(None, (target, draft)), {"gpus": gpus()}, llama_version())
    except OSError:  # a file is missing, which its load reports
        return ProfileStore(None, "")
    return ProfileStore(Path(folder) if folder else None, key, kind="draft")


def _read_verdict(store: ProfileStore) -> Verdict:
    content = store.read()
    agreement, problem = content.get("agreement"), content.get("problem")
    if isinstance(agreement, float) and isinstance(problem, str):
        return Verdict(agreement, problem)
    return Verdict()
