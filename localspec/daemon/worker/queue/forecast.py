"""How long requests will take, by what those before them took."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.protocol import frames

_NEWEST = 0.3  # the share that the last request has in what is expected of the next
_ANSWERS = 32  # whose lengths are remembered
_LEAST_LEFT = (
    0.5  # of what it has written, an answer that is longer than all others goes on to write
)
_KNOWN = 64  # tokens that what a load has measured is worth


@dataclass(slots=True, eq=False)
class Job:
    """A request, and what is known of how far it is. Tokens.

    characters: of its text. prompt, read: of its prompt, 0 until the engine has counted. most: that it
    may write. placed: it does not wait in the queue any more.
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
        return cls(_characters(request.prompt), most, editor)

    def sees(self, event: object) -> None:
        """Take in what the engine says of it."""
        match event:
            case frames.Started():
                self.prompt, self.read = event.prompt_tokens, event.cached_tokens
            case frames.Reading():
                self.read = event.processed
            case frames.Delta():
                self.read, self.written = self.prompt, event.tokens


def _characters(prompt: frames.Prompt) -> int:
    """About how long it is; four are a token, until more is known."""
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
    """How long answers are, in tokens: the last ones, and at first one that is `usual`."""

    def __init__(self, usual: float) -> None:
        self._seen = deque([usual], _ANSWERS)

    def sees(self, tokens: int, cut: bool) -> None:
        """cut: at a limit. That says only how long an answer is at least."""
        self._seen.append(tokens + self.left(tokens) if cut else tokens)

    def left(self, written: int) -> float:
        """What an answer that has so many goes on to write: as those did that were longer."""
        longer = [length - written for length in self._seen if length > written]
        return statistics.fmean(longer) if longer else max(_LEAST_LEFT * written, 1.0)


class Forecast:
    """What is learned of requests, and what it says of others, in seconds."""

    def __init__(self) -> None:
        self.reading: frames.PromptCost | None = None
        self._tokens = self._seconds = 0.0  # of answers, the last one's most
        self._characters = 4.0  # of a token
        self._fresh = 1.0  # share of a prompt that is in no cache
        self._answers = {False: _Lengths(128.0), True: _Lengths(24.0)}  # of chats and of editors
        self._pair: frames.Loaded | None = None

    def uses(self, pair: frames.Loaded) -> None:
        """It answers from now on: what another's speed was says nothing."""
        if pair is not self._pair:
            self._pair = pair
            self.reading = pair.reading
            step_ms = (pair.profile.get("target_ms") or {}).get(1)
            self._tokens = _KNOWN if step_ms else 0.0
            self._seconds = _KNOWN * (step_ms or 0.0) / 1e3

    def sees(self, job: Job, event: object) -> None:
        """Learn from what the engine says of a request."""
        match event:
            case frames.Started():
                self.reading = event.reading or self.reading
                fresh = 1 - event.cached_tokens / max(event.prompt_tokens, 1)
                self._fresh += _NEWEST * (fresh - self._fresh)
                if job.characters and event.prompt_tokens > 16:
                    each = max(job.characters / event.prompt_tokens, 0.25)
                    self._characters += _NEWEST * (each - self._characters)
            case frames.Reading():
                self.reading = event.reading or self.reading
            case frames.Done() if event.finish_reason != "cancelled":
                cut, timings = event.finish_reason == "length", event.timings
                self._answers[job.editor].sees(event.completion_tokens, cut)
                if timings.predicted_per_second > 0:  # a short answer says little of it
                    keep, tokens = 1 - _NEWEST, event.completion_tokens
                    self._tokens = keep * self._tokens + tokens
                    self._seconds = keep * self._seconds + tokens / timings.predicted_per_second

    @property
    def prompt_per_second(self) -> tuple[float, float] | None:
        """Tokens of prompts that are read, at a text's beginning and where the context is full."""
        if not self.reading or not self._pair:
            return None
        return 1 / self.reading.at(0), 1 / self.reading.at(self._pair.n_ctx)

    def prompt_left(self, job: Job) -> int:
        """Tokens of its prompt that are still to be read."""
        if job.prompt:
            return max(job.prompt - job.read, 0)
        return round(job.characters / self._characters * self._fresh)

    def reading_s(self, job: Job) -> float | None:
        """Until its prompt is read, as far as nobody else's is."""
        if self.reading is None:
            return None
        whole = job.prompt or job.characters / self._characters
        return self.reading.of(whole - self.prompt_left(job), whole)

    def wait_s(self, running: Sequence[Job], before: Sequence[Job], places: int) -> float | None:
        """Until one of so many places is free, after those `before` have had theirs; None: not known."""
        if not self.reading or not self._tokens:
            return None
        ends = [0.0] * (places - len(running)) + sorted(map(self._left_s, running))
        for job in before:
            heapq.heapreplace(ends, ends[0] + self._left_s(job))
        return ends[0]

    def over_s(self, running: Sequence[Job]) -> float | None:
        """Until all of these are over; None: not known."""
        if not self.reading or not self._tokens:
            return None
        return max(map(self._left_s, running), default=0.0)

    def _left_s(self, job: Job) -> float:
        left = self._answers[job.editor].left(job.written)
        if job.most is not None:
            left = min(left, max(job.most - job.written, 0))
        return (self.reading_s(job) or 0.0) + left * self._seconds / self._tokens
