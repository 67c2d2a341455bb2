"""Estimate how long requests will take, from how long earlier ones took."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.protocol import frames

_LAST_WEIGHT = 0.3  # weight of the last request in the moving averages
_MAX_ANSWERS = 32  # answers whose lengths are remembered
# An answer longer than all remembered ones is expected to grow by this fraction of its length.
_MIN_GROWTH = 0.5
_LOAD_WEIGHT_TOKENS = 64  # weight of the speed measured at the load, in tokens


@dataclass(slots=True, eq=False)
class Job:
    """A request and its known progress, in tokens.

    characters: of its text.
    prompt: of its prompt, 0 until the engine has counted them.
    read: of its prompt so far, cached ones included.
    most: that it may write at most, None for no limit.
    placed: whether it has left the queue.
    """

    characters: int = 0
    most: int | None = None
    editor: bool = False
    placed: bool = False
    prompt: int = 0
    read: int = 0
    written: int = 0

    @classmethod
    def of(cls, request: frames.Generate) -> Job:
        most, editor = request.max_tokens, request.priority == "editor"
        return cls(_count_characters(request.prompt), most, editor)

    def sees(self, event: object) -> None:
        """Update the progress from an event of the engine."""
        match event:
            case frames.Started():
                self.prompt, self.read = event.prompt_tokens, event.cached_tokens
            case frames.Reading():
                self.read = event.processed
            case frames.Delta():
                self.read, self.written = self.prompt, event.tokens


def _count_characters(prompt: frames.Prompt) -> int:
    """Estimate the length of a prompt in characters. A token counts as four."""
    match prompt:
        case frames.ChatPrompt():
            return sum(len(message.content or "") for message in prompt.messages)
        case frames.TextPrompt():
            return len(prompt.text)
        case frames.InfillPrompt():
            return len(prompt.prefix) + len(prompt.suffix)
        case frames.TokenPrompt():
            return 4 * len(prompt.tokens)
        case frames.MixedPrompt():
            return sum(len(part) if isinstance(part, str) else 4 for part in prompt.parts)


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
        return statistics.fmean(longer) if longer else max(_MIN_GROWTH * written, 1.0)


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

    def uses(self, pair: frames.Loaded) -> None:
        """Start again for a newly loaded pair, because the speed of the previous one means nothing."""
        if pair is not self._pair:
            self._pair = pair
            self.reading = pair.reading
            step_ms = (pair.profile.get("target_ms") or {}).get(1)
            self._tokens = _LOAD_WEIGHT_TOKENS if step_ms else 0.0
            self._seconds = _LOAD_WEIGHT_TOKENS * (step_ms or 0.0) / 1e3

    def sees(self, job: Job, event: object) -> None:
        """Learn from an event of a request."""
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

    @property
    def prompt_per_second(self) -> tuple[float, float] | None:
        """Prompt tokens read per second, at the beginning of a text and at a full context."""
        if not self.reading or not self._pair:
            return None
        return 1 / self.reading.at(0), 1 / self.reading.at(self._pair.n_ctx)

    def prompt_left(self, job: Job) -> int:
        """Return how many tokens of its prompt are still to be read."""
        if job.prompt:
            return max(job.prompt - job.read, 0)
        return round(job.characters / self._characters_per_token * self._uncached_share)

    def reading_s(self, job: Job) -> float | None:
        """Return the seconds until its prompt is read if no other prompt is read, None if unknown."""
        if self.reading is None:
            return None
        total = job.prompt or job.characters / self._characters_per_token
        return self.reading.of(total - self.prompt_left(job), total)

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
