"""Measure what a draft is worth: load it with a target, generate texts, and count the accepted tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from localspec.daemon.worker.supervisor import Supervisor
from localspec.errors import Conflict, LocalspecError, Unavailable
from localspec.protocol import frames
from localspec.registry.disk.gain import Trial
from localspec.registry.header.model import read_local_model

# Beginnings of typical texts: code, prose, a list, data, an answer, a diff. How often drafts are accepted
# depends on the kind of text, so a single one says little.
PROMPTS = (
    "def read_lines(path):\n",
    "The history of the steam engine begins",
    "Ten things to check before you travel:\n1.",
    '{"users": [{"name": "Ada", "mail": "',
    "Question: How do I list the files of a folder in Python?\nAnswer:",
    "diff --git a/main.py b/main.py\n--- a/main.py\n+++ b/main.py\n",
)
TOKENS = 64  # generated for each prompt
DEPTH = 4  # draft tokens per round; the best depth is computed afterwards
ENOUGH_S = 60.0  # no further prompt is started after this time, except for the second
_GREEDY = frames.Sampling(temperature=0.0, ignore_eos=True)


class Interrupted(Exception):
    """Another request needs the engine, so measuring ends."""


class Trials:
    """A function that measures drafts. It is created in the event loop and called from a thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Prepare to measure.

        Raises:
            Conflict: The engine is busy. Both would be slower, and the figures wrong.
        """
        if supervisor.residents.busy:
            raise Conflict("The engine is busy; measure when it is idle.")
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._measured = ""

    def __call__(self, target: Path, draft: Path) -> Trial:
        """Measure the target with this draft.

        Raises:
            Interrupted: Another request needs the engine.
            LocalspecError: This draft cannot be used.
        """
        files = frames.PairFiles(f"{target},{draft}", str(target), str(draft))
        heads = read_local_model(draft, as_draft=True).sidecar
        trial = self._measure(files, "mtp" if heads else "draft")
        return asyncio.run_coroutine_threadsafe(trial, self._loop).result()

    def end(self) -> None:
        """Unload the pair that was measured last, unless it is in use."""
        asyncio.run_coroutine_threadsafe(self._release(), self._loop).result()

    async def _measure(self, files: frames.PairFiles, kind: Literal["draft", "mtp"]) -> Trial:
        await self._release()  # frees the memory of the pair before
        self._measured = files.name
        texts: list[tuple[int, int]] = []
        profile: dict[str, Any] = {}
        deadline = self._loop.time() + ENOUGH_S
        for prompt in PROMPTS:
            if len(texts) >= 2 and self._loop.time() > deadline:
                break
            done = await self._generate(files, prompt, kind)
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

    async def _generate(
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
            # Some of its subclasses mean that this draft cannot be loaded. Unavailable itself does not.
            if type(error) is Unavailable:
                raise Interrupted from error
            raise

    async def _release(self) -> None:
        pair = self._supervisor.residents.of(self._measured)
        if self._measured and not pair.busy:
            await pair.unload()


def accepted(done: frames.Done) -> tuple[int, int]:
    """Return how many draft tokens were verified, and how many of them were accepted.

    In `accepts[n]` rounds n tokens were accepted. Each of these rounds verified one more token, the rejected
    one, unless it had accepted all that it drafted.
    """
    rounds_without_draft = done.depths[0] if done.depths else 0
    rejections = max(0, sum(done.accepts[:DEPTH]) - rounds_without_draft)
    accepted_tokens = sum(count * rounds for count, rounds in enumerate(done.accepts))
    return accepted_tokens + rejections, accepted_tokens
