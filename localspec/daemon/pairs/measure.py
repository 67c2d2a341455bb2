"""What a draft is worth with a target: both loaded in the engine, texts generated, acceptance counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from localspec.daemon.worker.supervisor import Supervisor
from localspec.errors import Conflict, LocalspecError, Unavailable
from localspec.protocol import frames
from localspec.registry.disk.gain import Trial
from localspec.registry.header.model import read_local_model

# Beginnings of what people have written: code, prose, a list, data, an answer, a diff. Texts differ in
# how easily they are guessed, so one alone says little.
PROMPTS = (
    "def read_lines(path):\n",
    "The history of the steam engine begins",
    "Ten things to check before you travel:\n1.",
    '{"users": [{"name": "Ada", "mail": "',
    "Question: How do I list the files of a folder in Python?\nAnswer:",
    "diff --git a/main.py b/main.py\n--- a/main.py\n+++ b/main.py\n",
)
TOKENS = 64  # of each text
DEPTH = 4  # drafts a round; how many pay is computed afterwards
ENOUGH_S = 60.0  # a slow pair gets through fewer texts, two at least
_GREEDY = frames.Sampling(temperature=0.0, ignore_eos=True)


class Interrupted(Exception):
    """Somebody else needs the engine: measuring ends."""


class Trials:
    """Tries drafts. Made in the event loop, called from a thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Raises Conflict when the engine is at work: both would be slower, and the numbers wrong."""
        if supervisor.residents.busy:
            raise Conflict("The engine is busy; measure when it is idle.")
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._measured = ""

    def __call__(self, target: Path, draft: Path) -> Trial:
        """The target with this draft.

        Raises:
            Interrupted: somebody else needs the engine. LocalspecError: this draft cannot be used.
        """
        files = frames.PairFiles(f"{target},{draft}", str(target), str(draft))
        heads = read_local_model(draft, as_draft=True).sidecar
        trial = self._try(files, "mtp" if heads else "draft")
        return asyncio.run_coroutine_threadsafe(trial, self._loop).result()

    def end(self) -> None:
        """Unload what was measured last, unless somebody uses it."""
        asyncio.run_coroutine_threadsafe(self._release(), self._loop).result()

    async def _try(self, files: frames.PairFiles, kind: Literal["draft", "mtp"]) -> Trial:
        await self._release()  # each has the memory of the one before it
        self._measured = files.name
        texts: list[tuple[int, int]] = []
        profile: dict[str, Any] = {}
        end = self._loop.time() + ENOUGH_S
        for prompt in PROMPTS:
            if len(texts) >= 2 and self._loop.time() > end:
                break
            done = await self._answer(files, prompt, kind)
            texts.append(accepted(done))
            info = self._supervisor.residents.info(files.name)
            if info is None or not info.profile.get("draft_ms"):
                reason = (info and info.speculation) or done.speculation.reason
                raise LocalspecError(
                    f"It could not be measured: {reason or 'no draft was loaded'}."
                )
            profile = info.profile
        return Trial(
            texts,
            {int(width): float(ms) for width, ms in profile["target_ms"].items()},
            {int(width): float(ms) for width, ms in profile["draft_ms"].items()},
            float(profile["overhead_ms"]),
        )

    async def _answer(
        self, files: frames.PairFiles, prompt: str, kind: Literal["draft", "mtp"]
    ) -> frames.Done:
        if self._supervisor.residents.busy:
            raise Interrupted
        request = frames.Generate(
            0,
            frames.TextPrompt(prompt),
            sampling=_GREEDY,
            max_tokens=TOKENS,
            speculative=frames.Speculative(depth=DEPTH, kind=kind),
            cache_prompt=False,
        )
        try:
            return await self._supervisor.generate(files, request)
        except LocalspecError as error:
            # Of its subclasses some are about this draft (it cannot be loaded); this one is not.
            if type(error) is Unavailable:
                raise Interrupted from error
            raise

    async def _release(self) -> None:
        pair = self._supervisor.residents.of(self._measured)
        if self._measured and not pair.busy:
            await pair.unload()


def accepted(done: frames.Done) -> tuple[int, int]:
    """Drafts looked at, and of them accepted. `accepts[n]` rounds accepted n: each looked at one more,
    the one it rejected, unless that was all it had drafted."""
    drafted_nothing = done.depths[0] if done.depths else 0
    rejections = max(0, sum(done.accepts[:DEPTH]) - drafted_nothing)
    kept = sum(count * times for count, times in enumerate(done.accepts))
    return kept + rejections, kept
