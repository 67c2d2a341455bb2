"""From frames to HTTP answers, in OpenAI's shapes.

A composer knows one shape (chat or text completion) and turns the frames of each choice into
chunks, or collects them into one whole answer.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

import localspec
from localspec.protocol import frames
from localspec.protocol.http import (
    Choices,
    Completion,
    CompletionTokensDetails,
    Extra,
    PromptTokensDetails,
    TextChoice,
    TextLogprobs,
    Usage,
)

FINGERPRINT = f"localspec-{localspec.__version__}"


@dataclass(slots=True)
class Collected:
    """Everything one choice has said."""

    prompt: int  # which prompt it answers
    texts: list[str] = field(default_factory=list)
    logprobs: list[frames.TokenLogprob] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: int = 0
    length: int = 0  # characters so far
    done: frames.Done | None = None


class Composer(ABC):
    """What both shapes share: identity, usage, timings."""

    prefix = "cmpl"
    says_done = True  # whether a stream ends with OpenAI's [DONE]

    def __init__(
        self, model: str, requests: list[frames.Generate], *, n: int, note: Callable[[], str | None]
    ) -> None:
        """`requests` one per choice, `n` choices per prompt; `note` is asked for at the end."""
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model
        self.note = note
        self.news: Callable[[], str] = str  # what is told once, by the answer that it is asked for
        self.choices = [Collected(prompt=index // n) for index in range(len(requests))]
        self.wants_logprobs = requests[0].top_logprobs is not None
        self.predicted = requests[0].speculative.prediction is not None
        self.conversation: str | UnsetType = UNSET  # where the answer is kept

    def feed(self, index: int, event: frames.Started | frames.Delta | frames.Done) -> None:
        """Note what choice `index` said."""
        choice = self.choices[index]
        match event:
            case frames.Started():
                choice.prompt_tokens = event.prompt_tokens
                choice.cached = event.cached_tokens
            case frames.Delta():
                choice.texts.append(event.text)
                choice.length += len(event.text)
                choice.logprobs += event.logprobs
            case frames.Done():
                choice.done = event

    def usage(self) -> Usage:
        """Prompts are counted once, however many choices each has."""
        done = [(choice, choice.done) for choice in self.choices if choice.done]
        prompts = {choice.prompt: end.prompt_tokens for choice, end in done}
        cached = {choice.prompt: choice.cached for choice, _ in reversed(done)}
        written = sum(end.completion_tokens for _, end in done)
        details = None
        if self.predicted:
            details = CompletionTokensDetails(
                sum(end.speculation.predicted_accepted for _, end in done),
                sum(end.speculation.predicted_rejected for _, end in done),
            )
        read = sum(prompts.values())
        return Usage(
            read, written, read + written, PromptTokensDetails(sum(cached.values())), details
        )

    def usage_chunk(self) -> Completion:
        chunk = self._completion([], streamed=True)
        chunk.usage = self.usage()
        return chunk

    def chunks(
        self, index: int, event: frames.Started | frames.Delta | frames.Done
    ) -> Sequence[object]:
        """The chunks of a stream that an event of choice `index` makes."""
        match event:
            case frames.Started():
                self.feed(index, event)
                return self.opening(index)
            case frames.Delta():
                if not event.text and not event.logprobs:
                    return ()
                made = self.delta(index, event)
                self.feed(index, event)
                return made
            case frames.Done():
                self.feed(index, event)
                return self.closing(index, event)

    @abstractmethod
    def opening(self, index: int) -> Sequence[object]:
        """The first chunk of a choice, if the shape has one."""

    def delta(self, index: int, delta: frames.Delta) -> Sequence[object]:
        """Chunks of text; call it before `feed`, which moves the offset."""
        raise NotImplementedError  # not abstract: a chat overrides `chunks` and needs none

    @abstractmethod
    def closing(self, index: int, done: frames.Done) -> Sequence[object]:
        """The last chunks of a choice."""

    @abstractmethod
    def whole(self) -> object:
        """Everything in one answer."""

    def _completion(self, choices: Choices, *, streamed: bool) -> Completion:
        """These choices as one chunk or, not `streamed`, as the answer."""
        raise NotImplementedError  # not abstract: llama-server's shape has no such object

    def _ended(self, completion: Completion, done: list[frames.Done]) -> Completion:
        """Add timings and our own key. Of several choices, `timings` adds up."""
        completion.timings = total([end.timings for end in done])
        completion.localspec = Extra(
            speculation=done[0].speculation if len(done) == 1 else UNSET,
            note=self.note() or UNSET,
            news=self.news() or UNSET,
            conversation=self.conversation,
        )
        return completion

    def _all_done(self) -> list[frames.Done]:
        return [choice.done for choice in self.choices if choice.done]


class TextComposer(Composer):
    def opening(self, index: int) -> Sequence[object]:
        return ()

    def delta(self, index: int, delta: frames.Delta) -> Sequence[object]:
        logprobs = self._logprobs(delta.logprobs, self.choices[index].length)
        choice = TextChoice(index, delta.text, None, logprobs)
        return [tinted(self._completion([choice], streamed=True), delta)]

    def closing(self, index: int, done: frames.Done) -> Sequence[object]:
        choice = TextChoice(index, "", finish(done))
        return [self._ended(self._completion([choice], streamed=True), [done])]

    def whole(self) -> Completion:
        choices = [
            TextChoice(
                index,
                "".join(choice.texts),
                finish(choice.done),
                self._logprobs(choice.logprobs, 0),
            )
            for index, choice in enumerate(self.choices)
        ]
        completion = self._completion(choices, streamed=False)
        completion.usage = self.usage()
        return self._ended(completion, self._all_done())

    def _logprobs(self, tokens: list[frames.TokenLogprob], offset: int) -> TextLogprobs | None:
        if not self.wants_logprobs:
            return None
        texts = [shown(token.piece) for token in tokens]
        offsets = [offset + sum(map(len, texts[:index])) for index in range(len(texts))]
        top = [{shown(piece): value for _, piece, value in reversed(token.top)} for token in tokens]
        return TextLogprobs(texts, [token.logprob for token in tokens], top, offsets)

    def _completion(self, choices: Choices, *, streamed: bool) -> Completion:
        del streamed  # OpenAI gives whole and chunk the same name here
        return Completion(
            self.id, "text_completion", self.created, self.model, FINGERPRINT, choices
        )


def finish(done: frames.Done | None) -> str:
    """OpenAI knows "stop" and "length"; a cancelled request has nobody left to read its reason."""
    return "stop" if done is None or done.finish_reason == "cancelled" else done.finish_reason


def total(parts: list[frames.Timings]) -> frames.Timings | UnsetType:
    """One `timings` for several choices: counts and times added up, rates from the sums."""
    if not parts:
        return UNSET
    if len(parts) == 1:
        return parts[0]
    result = frames.Timings()
    for name in ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted"):
        setattr(result, name, sum(getattr(part, name) for part in parts))
    for name in ("prompt", "predicted"):
        count = getattr(result, f"{name}_n")
        milliseconds = sum(getattr(part, f"{name}_ms") for part in parts)
        setattr(result, f"{name}_ms", milliseconds)
        setattr(result, f"{name}_per_token_ms", milliseconds / count if count else 0.0)
        rate = 1000.0 * count / milliseconds if milliseconds else 0.0
        setattr(result, f"{name}_per_second", rate)
    return result


def tinted(chunk: Completion, delta: frames.Delta) -> Completion:
    if delta.drafted:
        chunk.localspec = Extra(drafted=delta.drafted)
    return chunk


def shown(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
