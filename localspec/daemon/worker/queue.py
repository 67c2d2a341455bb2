"""Admit up to `parallel` requests at once, and estimate how long the others wait.

Editors' requests go ahead of all that wait, and have a place beyond `parallel` that no chat can take, so a
person who types does not wait for the end of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from localspec.errors import LocalspecError, QueueFull, Unavailable
from localspec.protocol import frames
from localspec.protocol.answers import Ahead

# Seconds for Retry-After: the default if no forecast is possible, enough for one short answer to end, and the
# maximum if there is a forecast.
DEFAULT_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 2, 600
EDITOR_PLACES = 1  # sequences that the engine decodes beyond `parallel`
_LAST_WEIGHT = 0.3  # weight of the last request in the moving averages
_MAX_ANSWERS = 32  # answers whose lengths are remembered
# An answer longer than all remembered ones is expected to grow by this fraction of its length.
_MIN_GROWTH = 0.5
_MIN_PLAIN_TOKENS = 32  # shorter answers say little about speed
_LOAD_WEIGHT_TOKENS = 64  # weight of the speed measured at the load, in tokens


class Admission:
    """A number of places, with a bounded first-come-first-served queue before them, and one for editors."""

    def __init__(
        self,
        parallel: int,
        limit: int,
        forecast: Forecast | None = None,
        elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create the queue. `elsewhere` returns how many requests wait in other queues.

        These count towards the same limit.
        """
        self.parallel = parallel
        self.limit = limit
        self._forecast = forecast or Forecast()
        self._count_elsewhere = elsewhere
        self._running: list[Job] = []
        # Those that wait, each with a future that is done once it has a place.
        self._chats: dict[Job, asyncio.Future[None]] = {}
        self._editors: dict[Job, asyncio.Future[None]] = {}
        self._closed = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def jobs(self) -> Sequence[Job]:
        """Those that run, the first one first."""
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._chats) + len(self._editors)

    def ahead(self, job: Job) -> Ahead:
        """Return what is ahead of a request that waits, or that would wait if it came now."""
        queued = [*self._editors] if job.editor else [*self._editors, *self._chats]
        if job in queued:
            queued = queued[: queued.index(job)]
        running = [other for other in self._running if job.editor or not other.editor]
        seconds = self._forecast.wait_s(running, queued, self.parallel + EDITOR_PLACES * job.editor)
        if not queued and self._has_room(job):
            seconds = 0.0
        prompt_tokens = sum(map(self._forecast.remaining_prompt_tokens, [*self._running, *queued]))
        wait_s = None if seconds is None else math.ceil(seconds)
        return Ahead(len(queued), self.running + len(queued), prompt_tokens, wait_s)

    @contextlib.asynccontextmanager
    async def place(self, job: Job | None = None) -> AsyncIterator[None]:
        """Hold a place for the block.

        Raises QueueFull if `limit` requests wait already, and Unavailable if the daemon is ending.
        """
        job = job or Job()
        if self.check_room(job):
            self._start(job)
        else:
            await self._wait(job)
        try:
            yield
        finally:
            self._leave(job)

    def check_room(self, job: Job) -> bool:
        """Return whether a request that came now would get a place at once. Raises as `place`."""
        if self._closed:
            seconds = self._forecast.over_s(self._running)
            raise Unavailable(
                "The daemon is shutting down; try again.", retry_after=_retry_after(seconds)
            )
        queue = self._editors if job.editor else self._chats
        if not queue and self._has_room(job):
            return True
        if self.waiting + self._count_elsewhere() >= self.limit:
            seconds = self._forecast.wait_s(self._running, [], self.running)
            raise QueueFull(
                f"The queue is full: {self.running} requests are running and {self.limit} are "
                "waiting. Try again in a moment, or set a larger `queue` in config.toml.",
                retry_after=_retry_after(seconds),
            )
        return False

    async def _wait(self, job: Job) -> None:
        queue = self._editors if job.editor else self._chats
        called = queue[job] = asyncio.get_running_loop().create_future()
        try:
            await called  # by then `_leave` of another one has counted this request as running
        except BaseException:
            if called.done() and not called.cancelled() and called.exception() is None:
                self._leave(job)  # cancelled just after it got the place
            else:
                queue.pop(job, None)
            raise

    def _has_room(self, job: Job) -> bool:
        chats = sum(not other.editor for other in self._running)
        full = self.running >= self.parallel + EDITOR_PLACES
        return not full and (job.editor or chats < self.parallel)

    def _start(self, job: Job) -> None:
        job.placed = True
        self._running.append(job)

    def _leave(self, job: Job) -> None:
        """Give up a place, and admit those that wait as long as there is room."""
        self._running.remove(job)
        for queue in (self._editors, self._chats):
            while queue and self._has_room(next(iter(queue))):
                admitted, called = _pop_first(queue)
                if not called.done():
                    self._start(admitted)
                    called.set_result(None)

    def close(self) -> None:
        """Admit no new requests. Those that wait are still admitted."""
        self._closed = True

    def fail_waiting(self, error: LocalspecError) -> None:
        for queue in (self._editors, self._chats):
            while queue:
                _, called = _pop_first(queue)
                if not called.done():
                    called.set_exception(error)


def _pop_first(queue: dict[Job, asyncio.Future[None]]) -> tuple[Job, asyncio.Future[None]]:
    job = next(iter(queue))
    return job, queue.pop(job)


def _retry_after(seconds: float | None) -> int:
    if seconds is None:
        return DEFAULT_RETRY_AFTER_S
    return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S)


@dataclass(slots=True, eq=False)
class Job:
    """A request and its known progress, in tokens."""

    characters: int = 0  # of its text
    most: int | None = None  # that it may write at most, None for no limit
    editor: bool = False
    placed: bool = False  # whether it has left the queue
    prompt: int = 0  # of its prompt, 0 until the engine has counted them
    read: int = 0  # of its prompt so far, cached ones included
    written: int = 0

    @classmethod
    def of(cls, request: frames.Generate) -> Job:
        # What is read ahead takes no chat's place, because any request that gets one ends it.
        most, editor = request.max_tokens, request.priority != "chat"
        match request.prompt:  # its length in characters is estimated: a token counts as four
            case frames.ChatPrompt(messages=messages):
                characters = sum(len(message.content or "") for message in messages)
            case frames.TextPrompt(text=text):
                characters = len(text)
            case frames.InfillPrompt(prefix=prefix, suffix=suffix):
                characters = len(prefix) + len(suffix)
            case frames.TokenPrompt(tokens=tokens):
                characters = 4 * len(tokens)
            case frames.MixedPrompt(parts=parts):
                characters = sum(len(part) if isinstance(part, str) else 4 for part in parts)
        return cls(characters, most, editor)

    def update(self, event: object) -> None:
        """Update the progress from an event of the engine."""
        match event:
            case frames.Started():
                self.prompt, self.read = event.prompt_tokens, event.cached_tokens
            case frames.Reading():
                self.read = event.processed
            case frames.Delta():
                self.read, self.written = self.prompt, event.tokens


class _Lengths:
    """The lengths of the last answers in tokens, initially one of `usual` tokens."""

    def __init__(self, usual: float) -> None:
        self._lengths = deque([usual], _MAX_ANSWERS)

    def sees(self, tokens: int, was_cut: bool) -> None:
        """Remember an answer. One that was cut at a limit would have become longer."""
        self._lengths.append(tokens + self.left(tokens) if was_cut else tokens)

    def left(self, written: int) -> float:
        """Return the expected further tokens of an answer with `written` tokens, from the longer ones."""
        longer = [length - written for length in self._lengths if length > written]
        return sum(longer) / len(longer) if longer else max(_MIN_GROWTH * written, 1.0)


class Forecast:
    """Estimates for requests in seconds, learned from the events of earlier ones."""

    def __init__(self) -> None:
        self.reading: frames.PromptCost | None = None
        self._tokens = self._seconds = 0.0  # decayed sums over the answers
        self._characters_per_token = 4.0
        self._uncached_share = 1.0  # fraction of a prompt that is not in a cache
        # The lengths of answers for chats (False) and editors (True).
        self._answers = {False: _Lengths(128.0), True: _Lengths(24.0)}
        self._pair: frames.Loaded | None = None
        # Milliseconds of tokens of answers without drafts, and their number.
        self._plain_ms = self._plain_tokens = 0.0

    def use_pair(self, pair: frames.Loaded) -> None:
        """Start again for a newly loaded pair, because the speed of the previous one means nothing."""
        if pair is not self._pair:
            self._pair = pair
            self.reading = pair.reading
            self._plain_ms = self._plain_tokens = 0.0
            step_ms = pair.costs.target_ms.get(1) if pair.costs else None
            self._tokens = _LOAD_WEIGHT_TOKENS if step_ms else 0.0
            self._seconds = _LOAD_WEIGHT_TOKENS * (step_ms or 0.0) / 1e3

    def learn(self, job: Job, event: object) -> None:
        match event:
            case frames.Started():
                self.reading = event.reading or self.reading
                fresh = 1 - event.cached_tokens / max(event.prompt_tokens, 1)
                self._uncached_share += _LAST_WEIGHT * (fresh - self._uncached_share)
                if job.characters and event.prompt_tokens > 16:
                    characters = max(job.characters / event.prompt_tokens, 0.25)
                    self._characters_per_token += _LAST_WEIGHT * (
                        characters - self._characters_per_token
                    )
            case frames.Reading():
                self.reading = event.reading or self.reading
            case frames.Done() if event.finish_reason != "cancelled":
                cut, timings = event.finish_reason == "length", event.timings
                self._answers[job.editor].sees(event.completion_tokens, cut)
                # Weighted by tokens, as a short answer proves little.
                if timings.predicted_per_second > 0:
                    keep, tokens = 1 - _LAST_WEIGHT, event.completion_tokens
                    self._tokens = keep * self._tokens + tokens
                    self._seconds = keep * self._seconds + tokens / timings.predicted_per_second

    def learn_plain(self, done: frames.Done) -> float | None:
        """Learn from an answer what a token takes without drafts, and return its milliseconds.

        Returns None if others were decoded beside it, or it is too short to tell.
        """
        rate, tokens = done.speculation.plain_tokens_per_second, done.timings.predicted_n
        if not done.speculation.drafted:
            rate = done.timings.predicted_per_second
        if not rate or tokens < _MIN_PLAIN_TOKENS or done.busy > done.passes:
            return None
        self._plain_ms += tokens * 1e3 / rate
        self._plain_tokens += tokens
        return 1e3 / rate

    @property
    def plain_per_second(self) -> float | None:
        """Tokens per second of this pair's answers without drafts, None if there were none alone."""
        return 1e3 * self._plain_tokens / self._plain_ms if self._plain_tokens else None

    @property
    def prompt_per_second(self) -> tuple[float, float] | None:
        """Prompt tokens read per second, at the beginning of a text and at a full context."""
        if not self.reading or not self._pair:
            return None
        return 1 / self.reading.token_seconds(0), 1 / self.reading.token_seconds(self._pair.n_ctx)

    def remaining_prompt_tokens(self, job: Job) -> int:
        """Return how many tokens of its prompt are still to be read."""
        if job.prompt:
            return max(job.prompt - job.read, 0)
        return round(job.characters / self._characters_per_token * self._uncached_share)

    def reading_s(self, job: Job) -> float | None:
        """Return the seconds until its prompt is read if no other prompt is read, None if unknown."""
        if self.reading is None:
            return None
        total = job.prompt or job.characters / self._characters_per_token
        return self.reading.range_seconds(total - self.remaining_prompt_tokens(job), total)

    def wait_s(self, running: Sequence[Job], before: Sequence[Job], places: int) -> float | None:
        """Return the seconds until a place is free after the requests `before` had one, None if unknown."""
        if not self.reading or not self._tokens:
            return None
        ends = [0.0] * (places - len(running)) + sorted(map(self._remaining_s, running))
        for job in before:
            heapq.heapreplace(ends, ends[0] + self._remaining_s(job))
        return ends[0]

    def over_s(self, running: Sequence[Job]) -> float | None:
        """Return the seconds until all of these requests are done, None if unknown."""
        if not self.reading or not self._tokens:
            return None
        return max(map(self._remaining_s, running), default=0.0)

    def _remaining_s(self, job: Job) -> float:
        remaining = self._answers[job.editor].left(job.written)
        if job.most is not None:
            remaining = min(remaining, max(job.most - job.written, 0))
        return (self.reading_s(job) or 0.0) + remaining * self._seconds / self._tokens
