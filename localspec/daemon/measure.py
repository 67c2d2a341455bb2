"""How fast a target really is with a draft: both loaded in the engine, a text generated."""

from __future__ import annotations

import asyncio
from pathlib import Path

from localspec.daemon.supervisor import Supervisor
from localspec.errors import Conflict, LocalspecError, Unavailable
from localspec.protocol import frames

# Enough for the depth policy to settle after its first rounds, short on a slow machine.
TOKENS = 64
PROMPT = "def read_lines(path):\n"
_GREEDY = frames.Sampling(temperature=0.0)


class Interrupted(Exception):
    """Somebody else needs the engine: measuring ends."""


class Speeds:
    """Measures in tokens per second. Made in the event loop, called from a thread."""

    def __init__(self, supervisor: Supervisor, target: str) -> None:
        """Raises Conflict when the engine is at work: both would be slower, and the numbers wrong."""
        if supervisor.busy:
            raise Conflict("The engine is at work; measure when it is idle.")
        self._supervisor = supervisor
        self._target = target
        self._loop = asyncio.get_running_loop()

    def plain(self) -> float:
        """The target alone."""
        files = frames.PairFiles(self._target, self._target)
        return self._measured(files, frames.Speculative(enabled=False))

    def __call__(self, target: Path, draft: Path) -> float:
        """The target with this draft, at the depth the policy chooses."""
        files = frames.PairFiles(f"{target},{draft}", str(target), str(draft))
        return self._measured(files, frames.Speculative())

    def end(self) -> None:
        """Unload what was measured last, unless somebody uses the engine again."""
        asyncio.run_coroutine_threadsafe(self._release(), self._loop).result()

    def _measured(self, files: frames.PairFiles, speculative: frames.Speculative) -> float:
        return asyncio.run_coroutine_threadsafe(self._run(files, speculative), self._loop).result()

    async def _run(self, files: frames.PairFiles, speculative: frames.Speculative) -> float:
        if self._supervisor.busy:
            raise Interrupted
        request = frames.Generate(
            0,
            frames.TextPrompt(PROMPT),
            sampling=_GREEDY,
            max_tokens=TOKENS,
            speculative=speculative,
            cache_prompt=False,
        )
        rate = 0.0
        try:
            async for event in self._supervisor.generate(files, request):
                if isinstance(event, frames.Done):
                    rate = event.timings.predicted_per_second
        except LocalspecError as error:
            # Of its subclasses some are about this draft (it cannot be loaded); this one is not.
            if type(error) is Unavailable:
                raise Interrupted from error
            raise
        return rate

    async def _release(self) -> None:
        if not self._supervisor.busy:
            await self._supervisor.unload()
