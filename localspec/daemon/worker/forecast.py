"""How long requests will take, by what those before them took."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.protocol import frames

_NEWEST = 0.3  # the share that the last request has in what is expected of the next
_LEAST_LEFT = 0.25  # of what it has written, an answer that is longer than others goes on to write
_FEWEST = 8  # tokens of an answer, to tell how fast they came


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


class Forecast:
    """What is learned of requests, and what it says of others. Seconds; tokens a second, 0: not known."""

    def __init__(self) -> None:
        self.prompt_per_second = 0.0
        self._per_second = 0.0  # that one answer gets
        self._characters = 4.0  # of a token
        self._fresh = 1.0  # share of a prompt that is in no cache
        self._answers = {False: 128.0, True: 24.0}  # tokens, of chats and of editors
        self._pair: frames.Loaded | None = None

    def uses(self, pair: frames.Loaded) -> None:
        """It answers from now on: what another's speed was says nothing."""
        if pair is not self._pair:
            self._pair = pair
            self.prompt_per_second = pair.prompt_per_second
            step_ms = (pair.profile.get("target_ms") or {}).get(1)
            self._per_second = 1e3 / step_ms if step_ms else 0.0

    def sees(self, job: Job, event: object) -> None:
        """Learn from what the engine says of a request."""
        match event:
            case frames.Started():
                self.prompt_per_second = event.prompt_per_second or self.prompt_per_second
                fresh = 1 - event.cached_tokens / max(event.prompt_tokens, 1)
                self._fresh += _NEWEST * (fresh - self._fresh)
                if job.characters and event.prompt_tokens > 16:
                    each = max(job.characters / event.prompt_tokens, 0.25)
                    self._characters += _NEWEST * (each - self._characters)
            case frames.Done() if event.finish_reason != "cancelled":
                usual = self._answers[job.editor]
                self._answers[job.editor] += _NEWEST * (event.completion_tokens - usual)
                speed = event.timings.predicted_per_second
                if event.completion_tokens >= _FEWEST and speed > 0:
                    known = self._per_second or speed
                    self._per_second = known + _NEWEST * (speed - known)

    def prompt_left(self, job: Job) -> int:
        """Tokens of its prompt that are still to be read."""
        if job.prompt:
            return max(job.prompt - job.read, 0)
        return round(job.characters / self._characters * self._fresh)

    def reading_s(self, job: Job) -> float | None:
        """Until its prompt is read, as far as nobody else's is."""
        return self.prompt_left(job) / self.prompt_per_second if self.prompt_per_second else None

    def wait_s(self, running: Sequence[Job], before: Sequence[Job], places: int) -> float | None:
        """Until one of so many places is free, after those `before` have had theirs; None: not known."""
        if not self.prompt_per_second or not self._per_second:
            return None
        ends = [0.0] * (places - len(running)) + sorted(map(self._left_s, running))
        for job in before:
            heapq.heapreplace(ends, ends[0] + self._left_s(job))
        return ends[0]

    def over_s(self, running: Sequence[Job]) -> float | None:
        """Until all of these are over; None: not known."""
        if not self.prompt_per_second or not self._per_second:
            return None
        return max(map(self._left_s, running), default=0.0)

    def _left_s(self, job: Job) -> float:
        usual = self._answers[job.editor]
        left = max(usual - job.written, _LEAST_LEFT * job.written, 1.0)
        if job.most is not None:
            left = min(left, max(job.most - job.written, 0))
        return self.prompt_left(job) / self.prompt_per_second + left / self._per_second
