"""An answer: what a request's choices have said so far, and how they run to their end.

A choice takes the engine's events in. A shape writes them for a client: chunk by chunk, or all in one
object. Shapes keep nothing of the text themselves.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.reply.calls import Arguments, Call, new_call
from localspec.daemon.completion.reply.parser import AnswerParser, Piece, Text
from localspec.daemon.http.requests import ClientGone, answer, unless_gone
from localspec.daemon.http.sse import Emit, EventStream
from localspec.daemon.worker.process import Event
from localspec.daemon.worker.queue.forecast import Job
from localspec.daemon.worker.supervisor import Supervisor
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.answers import (
    CalledFunction,
    CompletionTokensDetails,
    Progress,
    PromptProgress,
    PromptTokensDetails,
    ToolCall,
    Usage,
)
from localspec.protocol.requests import PING_INTERVAL, GenerationRequest
from localspec.protocol.visibility import VISIBLE, Regions

_LOOK = 0.1  # seconds between two looks at what an answer waits for


class ContentTokens:
    """Picks the tokens of an answer's visible text: those with a character that is neither thought nor
    call. It looks at the text alone, so the pieces in which that comes change nothing.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._kinds: list[str] = []  # of the characters from `_start` on
        self._start = 0
        self._waiting: deque[frames.TokenLogprob] = deque()

    def take(self, delta: frames.Delta) -> list[frames.TokenLogprob]:
        """Return the tokens that are certain to belong to visible text, in their order."""
        self._waiting += delta.logprobs
        return self._picked(self._regions.feed(delta.text), final=False)

    def finish(self) -> list[frames.TokenLogprob]:
        """Return those that were left, at the end of the answer."""
        return self._picked(self._regions.finish(), final=True)

    def _picked(self, kinds: str, *, final: bool) -> list[frames.TokenLogprob]:
        self._kinds += kinds
        found = []
        while self._waiting:
            token = self._waiting[0]
            start = token.offset - self._start
            end = start + max(len(token.piece.decode("utf-8", "ignore")), 1)
            if end > len(self._kinds) and not final:
                break
            self._waiting.popleft()
            if token.offset >= 0 and VISIBLE in self._kinds[start:end]:
                found.append(token)
        if not self._waiting:
            self._start += len(self._kinds)
            self._kinds.clear()
        return found


@dataclass(slots=True)
class Choice:
    """One choice so far. Without a `parser` all that comes is content.

    `ended` is called once, when no more comes, and before any client knows.
    """

    prompt: int  # which prompt it answers
    parser: AnswerParser | None = None
    scored: bool = False  # log-probabilities were asked for
    ended: Callable[[Choice], None] | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[frames.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[frames.TokenLogprob] = field(default_factory=list)
    content_logprobs: list[frames.TokenLogprob] = field(default_factory=list)  # of `content`
    tokens: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    cached_tokens: int = 0
    exact_tokens: int | None = None  # of the cached ones, as Started has it
    prompt_tokens: int = 0
    processed: int = 0  # tokens of the prompt that are read, the cached ones among them
    reading_ms: float = 0.0  # since it was begun
    note: str = ""  # what of the request could not be had
    news: str = ""  # who answered in the place of another
    stand_in: str = ""  # that pair's name
    reasoning_tokens: int = 0
    begun: bool = False  # something of it, be it the end, has come
    over: bool = False
    failed: bool = False
    done: frames.Done | None = None
    _content_tokens: ContentTokens | None = None

    def take(self, event: Event) -> Sequence[Piece]:
        """What the event adds to what was said."""
        pieces: Sequence[Piece] = ()
        match event:
            case frames.Started():
                self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                self.logit_bias, self.exact_tokens = event.logit_bias, event.exact_tokens
                self.processed = event.cached_tokens
                self.note, self.news, self.stand_in = event.note, event.news, event.stand_in
                if self.parser is not None:
                    self.parser.begin(event.tail, event.thoughts)
                    self._content_tokens = ContentTokens(self.parser.regions(event.tail))
            case frames.Reading():  # another engine may read it anew
                self.processed = max(self.processed, event.processed)
                if event.scores:  # an engine that began anew begins with the first token again
                    self.prompt_logprobs[event.scores_from :] = event.scores
                self.reading_ms = event.ms
            case frames.Delta():
                self.begun = True
                self._score(event)
                self.tokens += event.ids
                text = Text("content", event.text)
                pieces = [text] if self.parser is None else self.parser.push(event.text)
                pieces = [*self._apart(event), *pieces]
                if self.parser is not None and self.parser.thinking:
                    self.reasoning_tokens += event.tokens
                self._add(pieces)
            case frames.Done():
                self.begun, self.done = True, event
                self.prompt_tokens = event.prompt_tokens
                self.cached_tokens = self.cached_tokens or event.timings.cache_n
                pieces = self.end()
        return pieces

    def _score(self, event: frames.Delta) -> None:
        self.logprobs += event.logprobs
        if self._content_tokens is None:
            self.content_logprobs += event.logprobs
        elif self.scored:
            self.content_logprobs += self._content_tokens.take(event)

    def _apart(self, event: frames.Delta) -> Iterator[Piece]:
        """What another server has told apart. Its calls follow those that were found in its text."""
        if event.thought:
            yield Text("reasoning", event.thought)
        before = 0 if self.parser is None else self.parser.calls
        for part in event.calls:
            if part.name:
                yield Call(part.id or new_call(part.name).id, part.name, before + part.index)
            if part.arguments:
                yield Arguments(part.arguments, before + part.index)

    def end(self, *, failed: bool = False) -> Sequence[Piece]:
        """Nothing more comes: what was held back."""
        if self.over:
            return ()
        self.over, self.failed = True, failed
        if self.scored and self._content_tokens is not None:
            self.content_logprobs += self._content_tokens.finish()
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
    def progress(self) -> PromptProgress:
        """How much of the prompt is read."""
        read, spent = self.processed, int(self.reading_ms)
        return PromptProgress(self.prompt_tokens, self.cached_tokens, read, spent)

    @property
    def timings(self) -> frames.Timings:
        """How long its prompt has taken so far."""
        read = self.processed - self.cached_tokens
        spent = self.reading_ms if read else 0.0
        each, rate = (spent / read, 1000 * read / spent) if spent else (0.0, 0.0)
        exact = self.cached_tokens if self.exact_tokens is None else self.exact_tokens
        return frames.Timings(
            cache_n=self.cached_tokens,
            cache_exact_n=exact,
            prompt_n=read,
            prompt_ms=spent,
            prompt_per_token_ms=each,
            prompt_per_second=rate,
        )

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
        self.wants_timings = requests[0].timings
        self.wants_logprobs = requests[0].top_logprobs is not None
        self._predicted = requests[0].speculative.prediction is not None
        self.choices = [
            Choice(index // n, parser(), self.wants_logprobs) for index in range(len(requests))
        ]
        self.choices[0].ended = ended

    @property
    def done(self) -> list[frames.Done]:
        """The ends of those that have one."""
        return [choice.done for choice in self.choices if choice.done]

    def note(self, general: str | None) -> str:
        """What a person may want to know of how it came about; `general`: of all answers now."""
        return " ".join(filter(None, [general, self.choices[0].note]))

    def news(self, general: str = "") -> str:
        """What a person is told in any case, as `note`."""
        return " ".join(filter(None, [general, self.choices[0].news]))

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

    def failed(self, error: LocalspecError) -> Sequence[object]:
        """How a stream ends that has begun and cannot go on."""

    def whole(self) -> object:
        """Everything in one object."""


class Reads(Protocol):
    """A shape that can say how much of a prompt is read."""

    def reading(self, index: int, now: PromptProgress) -> object: ...


def waiting(body: GenerationRequest, shape: Reads) -> dict[str, Any]:
    """What a request says of the time before its answer, as fields of `Run`."""
    told = shape.reading if body.return_progress else None
    return {"reading": told, "ping_s": body.sse_ping_interval}


def text_of(piece: bytes) -> str:
    """A token's bytes as text; those that are part of a character become U+FFFD."""
    return piece.decode("utf-8", "replace")


# ------------------------------------------------------------------------ to its end


@dataclass(frozen=True, slots=True)
class Run:
    """What runs, and what becomes of it; `during` is held meanwhile.

    `progress` makes the chunk that says what a stream waits for, `reading` the one that says how much of
    a choice's prompt is read; without them that is not said. `ping_s`: as EventStream's.
    """

    supervisor: Supervisor
    pair: frames.PairFiles
    requests: Sequence[frames.Generate]  # one per choice
    shape: Shape
    during: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)
    progress: Callable[[Progress], object] | None = None
    reading: Callable[[int, PromptProgress], object] | None = None
    ping_s: float = PING_INTERVAL
    events: type[EventStream] = EventStream

    async def respond(self, request: Request, stream: bool) -> Response:
        """The answer, unless the client leaves first."""
        if stream:
            failed, ping_s = self.shape.failed, self.ping_s
            return self.events(self._streamed, done=False, failed=failed, ping_s=ping_s)
        try:
            await unless_gone(request.receive, self._run())
        except ClientGone:
            return Response(status_code=499)  # nobody reads it; nginx's number for this
        return answer(self.shape.whole())

    async def _streamed(self, emit: Emit) -> None:
        if self.progress is None:
            await self._run(emit)
        else:
            jobs = [Job.of(request) for request in self.requests]
            telling = asyncio.create_task(self._tell(emit, self.progress, jobs))
            try:
                await self._run(emit, jobs)
            finally:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
        await emit(*self.shape.end())

    async def _tell(
        self, emit: Emit, progress: Callable[[Progress], object], jobs: Sequence[Job]
    ) -> None:
        """What it waits for, whenever that changes, until something of the answer has come."""
        told = None
        while True:
            await asyncio.sleep(_LOOK)
            if any(choice.begun for choice in self.shape.answer.choices):
                return
            now = self._waits_for(jobs)
            if now != told:
                await emit(progress(now))
            told = now

    def _waits_for(self, jobs: Sequence[Job]) -> Progress:
        name, asked = self.pair.name, self.supervisor.residents.of(self.pair.name)
        job = next((job for job in jobs if job.placed), None)
        if job is None:
            return Progress("queued", name, ahead=asked.admission.ahead(jobs[0]))
        if not job.prompt and self.pair.upstream is not None:
            return Progress("waiting", name)
        if not job.prompt:
            return asked.waits_for(self.pair)
        seconds = asked.forecast.reading_s(job)
        left = UNSET if seconds is None else math.ceil(seconds)
        return Progress("reading", name, job.read / job.prompt, UNSET, job.prompt, left)

    async def _run(self, emit: Emit | None = None, jobs: Sequence[Job] = ()) -> None:
        """All choices to their end. The first error ends all."""
        failed = False
        async with self.during:
            try:
                jobs = jobs or [Job.of(request) for request in self.requests]
                if len(self.requests) == 1:
                    await self._follow(0, emit, jobs[0])
                else:
                    await self._follow_all(emit, jobs)
            except LocalspecError:
                failed = True
                raise
            finally:
                for choice in self.shape.answer.choices:
                    choice.end(failed=failed)

    async def _follow_all(self, emit: Emit | None, jobs: Sequence[Job]) -> None:
        tasks = [asyncio.create_task(self._follow(i, emit, job)) for i, job in enumerate(jobs)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, index: int, emit: Emit | None, job: Job) -> None:
        choice = self.shape.answer.choices[index]

        async def take(event: Event) -> None:
            pieces = choice.take(event)
            if emit is None:
                return
            if not isinstance(event, frames.Reading):
                await emit(*self.shape.chunks(index, event, pieces))
            if self.reading and isinstance(event, frames.Started | frames.Reading):
                await emit(self.reading(index, choice.progress))

        await self.supervisor.generate(self.pair, self.requests[index], take, job)
