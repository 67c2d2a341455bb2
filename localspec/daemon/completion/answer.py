"""What the choices of a request have said, and what OpenAI's two shapes write of it.

An `Answer` takes the engine's events in. A shape writes them for a client: chunk by chunk, or all in
one object. Shapes keep nothing of the text themselves.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec import UNSET, UnsetType

import localspec
from localspec.daemon.completion.reply.calls import Arguments, Call
from localspec.daemon.completion.reply.parser import AnswerParser, Piece, Text
from localspec.daemon.http.sse import DONE
from localspec.daemon.worker.process import Event
from localspec.protocol import frames
from localspec.protocol.answers import (
    CalledFunction,
    Choices,
    Completion,
    CompletionTokensDetails,
    Extra,
    PromptTokensDetails,
    ToolCall,
    Usage,
)
from localspec.protocol.requests import StreamOptions

Kind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]

FINGERPRINT = f"localspec-{localspec.__version__}"


@dataclass(slots=True)
class Choice:
    """One choice so far. Without a `parser` all that comes is content.

    `ended` is called once, when no more comes, and before any client knows.
    """

    prompt: int  # which prompt it answers
    parser: AnswerParser | None = None
    ended: Callable[[Choice], None] | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[frames.TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    begun: bool = False  # something of it, be it the end, has come
    over: bool = False
    failed: bool = False
    done: frames.Done | None = None

    def take(self, event: Event) -> Sequence[Piece]:
        """What the event adds to what was said."""
        pieces: Sequence[Piece] = ()
        match event:
            case frames.Started():
                self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                if self.parser is not None:
                    self.parser.begin(event.tail)
            case frames.Delta():
                self.begun = True
                self.logprobs += event.logprobs
                text = Text("content", event.text)
                pieces = [text] if self.parser is None else self.parser.push(event.text)
                self._add(pieces)
            case frames.Done():
                self.begun, self.done = True, event
                pieces = self.end()
        return pieces

    def end(self, *, failed: bool = False) -> Sequence[Piece]:
        """Nothing more comes: what was held back."""
        if self.over:
            return ()
        self.over, self.failed = True, failed
        pieces = [] if self.parser is None else self.parser.finish()
        self._add(pieces)
        if self.ended is not None:
            self.ended(self)
        return pieces

    def _add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text("content"):
                    self.content += piece.text
                case Text():
                    self.reasoning += piece.text
                case Call():
                    self.calls.append(ToolCall(piece.id, CalledFunction(piece.name, "")))
                case Arguments():
                    self.calls[piece.index].function.arguments += piece.text

    @property
    def finish(self) -> str:
        """OpenAI's reason; of a cancelled request nobody is left to read it."""
        reason = self.done.finish_reason if self.done else "stop"
        if reason == "cancelled":
            reason = "stop"
        return "tool_calls" if reason == "stop" and self.calls else reason


class Answer:
    """All choices of a request."""

    def __init__(
        self,
        model: str,
        requests: Sequence[frames.Generate],
        *,
        n: int,
        parser: Callable[[], AnswerParser | None] = lambda: None,
        ended: Callable[[Choice], None] | None = None,
    ) -> None:
        """`requests` one per choice, `n` choices per prompt; `ended`: of the first choice."""
        self.model = model
        self.wants_logprobs = requests[0].top_logprobs is not None
        self._predicted = requests[0].speculative.prediction is not None
        self.choices = [Choice(index // n, parser()) for index in range(len(requests))]
        self.choices[0].ended = ended

    @property
    def done(self) -> list[frames.Done]:
        """The ends of those that have one."""
        return [choice.done for choice in self.choices if choice.done]

    def usage(self) -> Usage:
        """Prompts are counted once, however many choices each has."""
        done = [(choice, choice.done) for choice in self.choices if choice.done]
        prompts = {choice.prompt: end.prompt_tokens for choice, end in done}
        cached = {choice.prompt: choice.cached_tokens for choice, _ in reversed(done)}
        written = sum(end.completion_tokens for _, end in done)
        details = None
        if self._predicted:
            details = CompletionTokensDetails(
                sum(end.speculation.predicted_accepted for _, end in done),
                sum(end.speculation.predicted_rejected for _, end in done),
            )
        read = sum(prompts.values())
        return Usage(
            read, written, read + written, PromptTokensDetails(sum(cached.values())), details
        )


class Shape(Protocol):
    """How an answer is written for a client."""

    answer: Answer

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        """Those of a stream for an event of choice `index`, which has added `pieces` to it."""

    def end(self) -> Sequence[object]:
        """What follows the choices in a stream."""

    def whole(self) -> object:
        """Everything in one object."""


class OpenAIShape(ABC):
    """What chat and text completions share."""

    prefix: str
    kind: Kind
    chunk_kind: Kind

    def __init__(
        self,
        answer: Answer,
        options: StreamOptions | None,
        *,
        note: Callable[[], str | None],
        news: Callable[[], str],
        conversation: str | None = None,
    ) -> None:
        """`note` and `news`: what a person should know, asked for at the end; `news` is told once.
        `conversation`: where the answer is kept.
        """
        self.answer = answer
        self.conversation = conversation or UNSET
        self._usage = options is not None and options.include_usage
        self._note = note
        self._news = news
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @abstractmethod
    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]: ...

    @abstractmethod
    def choices(self) -> Choices:
        """Every choice, whole."""

    def chunk(self, choices: Choices) -> Completion:
        return self._completion(self.chunk_kind, choices)

    def closing(self, choices: Choices, done: frames.Done) -> Completion:
        """The last chunk of a choice."""
        return self._ended(self.chunk(choices), [done])

    def end(self) -> Sequence[object]:
        if not self._usage:
            return [DONE]
        chunk = self.chunk([])
        chunk.usage = self.answer.usage()
        return [chunk, DONE]

    def whole(self) -> Completion:
        completion = self._completion(self.kind, self.choices())
        completion.usage = self.answer.usage()
        return self._ended(completion, self.answer.done)

    def _completion(self, kind: Kind, choices: Choices) -> Completion:
        return Completion(self._id, kind, self._created, self.answer.model, FINGERPRINT, choices)

    def _ended(self, completion: Completion, done: list[frames.Done]) -> Completion:
        """Add timings and our own key. Of several choices, `timings` adds up."""
        completion.timings = total([end.timings for end in done])
        completion.localspec = Extra(
            speculation=done[0].speculation if len(done) == 1 else UNSET,
            note=self._note() or UNSET,
            news=self._news() or UNSET,
            conversation=self.conversation,
        )
        return completion


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


def with_drafted(chunk: Completion, delta: frames.Delta) -> Completion:
    """`chunk` with the spans of its text that came from the draft."""
    if delta.drafted:
        chunk.localspec = Extra(drafted=delta.drafted)
    return chunk


def text_of(piece: bytes) -> str:
    """A token's bytes as text; those that are part of a character become U+FFFD."""
    return piece.decode("utf-8", "replace")
