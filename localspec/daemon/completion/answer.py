"""Collect what a request's choices have generated so far, and run them to their end.

A choice consumes the engine's events. A shape formats them for a client: chunk by chunk, or all in one
object. Shapes store none of the text themselves.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from localspec.chat.notations.call_readers import Arguments, Call, new_call
from localspec.chat.parser import AnswerParser, Piece, Text
from localspec.chat.visibility import VISIBLE, VisibilityParser
from localspec.daemon.http.errors import stream_error
from localspec.daemon.http.requests import ClientGone, json_response, while_connected
from localspec.daemon.http.sse import Emit, EventStream
from localspec.daemon.worker.process import Event
from localspec.daemon.worker.queue import Job
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
from localspec.protocol.requests import PING_INTERVAL_S, GenerationRequest

_PROGRESS_INTERVAL_S = 0.1  # between two checks of what an answer is waiting for


class ContentTokens:
    """Selects the tokens of an answer's visible text.

    Those are tokens with a character that is neither reasoning nor part of a call. Only the text decides,
    so the pieces in which it arrives make no difference.
    """

    def __init__(self, regions: VisibilityParser) -> None:
        self._regions = regions
        self._kinds: list[str] = []  # the region of each character from `_start` on
        self._start = 0
        self._waiting: deque[frames.TokenLogprob] = deque()

    def take(self, delta: frames.Delta) -> list[frames.TokenLogprob]:
        """Return the tokens that certainly belong to visible text, in their order."""
        self._waiting += delta.logprobs
        return self._select_visible(self._regions.feed(delta.text), final=False)

    def finish(self) -> list[frames.TokenLogprob]:
        """Return the remaining tokens at the end of the answer."""
        return self._select_visible(self._regions.finish(), final=True)

    def _select_visible(self, kinds: str, *, final: bool) -> list[frames.TokenLogprob]:
        self._kinds += kinds
        tokens = []
        while self._waiting:
            token = self._waiting[0]
            start = token.offset - self._start
            end = start + max(len(token.piece.decode("utf-8", "ignore")), 1)
            if end > len(self._kinds) and not final:
                break
            self._waiting.popleft()
            if token.offset >= 0 and VISIBLE in self._kinds[start:end]:
                tokens.append(token)
        if not self._waiting:
            self._start += len(self._kinds)
            self._kinds.clear()
        return tokens


@dataclass(slots=True)
class Choice:
    """One choice so far; without a `parser` everything that arrives is content.

    `on_end` is called once, when the choice is complete and before any client knows that.
    """

    prompt: int  # index of the prompt that it answers
    parser: AnswerParser | None = None
    wants_logprobs: bool = False  # the client wants log-probabilities
    on_end: Callable[[Choice], None] | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[frames.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[frames.TokenLogprob] = field(default_factory=list)
    content_logprobs: list[frames.TokenLogprob] = field(default_factory=list)  # of `content`
    tokens: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    cached_tokens: int = 0
    exact_tokens: int | None = None  # the exactly matched part of `cached_tokens`
    prompt_tokens: int = 0
    prompt_tokens_read: int = 0  # prompt tokens that are prefilled or cached
    prefill_ms: float = 0.0  # since the prefill began
    note: str = ""  # what the engine could not do for this request
    notice: str = ""  # says which pair answered in place of another
    fallback_pair: str = ""  # the name of the pair that answered in place of another
    reasoning_tokens: int = 0
    has_output: bool = False  # text or the end has arrived
    is_finished: bool = False
    error: LocalspecError | None = None  # why it could not be completed
    done: frames.Done | None = None
    _content_tokens: ContentTokens | None = None

    def consume(self, event: Event) -> Sequence[Piece]:
        """Consume an event and return the pieces that it adds."""
        pieces: Sequence[Piece] = ()
        match event:
            case frames.Started():
                self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                self.logit_bias, self.exact_tokens = event.logit_bias, event.exact_tokens
                self.prompt_tokens_read = event.cached_tokens
                self.note, self.notice, self.fallback_pair = event.note, event.news, event.stand_in
                if self.parser is not None:
                    self.parser.begin(event.tail, event.thoughts)
                    self._content_tokens = ContentTokens(self.parser.regions(event.tail))
            case frames.Reading():  # After a crash another engine starts the prompt again.
                self.prompt_tokens_read = max(self.prompt_tokens_read, event.processed)
                # An engine that started again repeats the scores of the first tokens.
                if event.scores:
                    self.prompt_logprobs[event.scores_from :] = event.scores
                self.prefill_ms = event.ms
            case frames.Delta():
                self.has_output = True
                self._score(event)
                self.tokens += event.ids
                text = Text("content", event.text)
                pieces = [text] if self.parser is None else self.parser.feed(event.text)
                pieces = [*self._separated(event), *pieces]
                if self.parser is not None and self.parser.thinking:
                    self.reasoning_tokens += event.tokens
                self._add(pieces)
            case frames.Done():
                self.has_output, self.done = True, event
                self.prompt_tokens = event.prompt_tokens
                self.cached_tokens = self.cached_tokens or event.timings.cache_n
                pieces = self.end()
        return pieces

    def _score(self, event: frames.Delta) -> None:
        self.logprobs += event.logprobs
        if self._content_tokens is None:
            self.content_logprobs += event.logprobs
        elif self.wants_logprobs:
            self.content_logprobs += self._content_tokens.take(event)

    def _separated(self, event: frames.Delta) -> Iterator[Piece]:
        """Yield the reasoning and calls that an upstream has separated itself.

        Its calls are numbered after those that the parser has found.
        """
        if event.thought:
            yield Text("reasoning", event.thought)
        first_index = 0 if self.parser is None else self.parser.calls
        for part in event.calls:
            if part.name:
                yield Call(part.id or new_call(part.name).id, part.name, first_index + part.index)
            if part.arguments:
                yield Arguments(part.arguments, first_index + part.index)

    def end(self, error: LocalspecError | None = None) -> Sequence[Piece]:
        """End the choice, and return the pieces that the parser held back."""
        if self.is_finished:
            return ()
        self.is_finished, self.error = True, error
        if self.wants_logprobs and self._content_tokens is not None:
            self.content_logprobs += self._content_tokens.finish()
        pieces = [] if self.parser is None else self.parser.finish()
        self._add(pieces)
        if self.on_end is not None:
            self.on_end(self)
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
        read, spent = self.prompt_tokens_read, int(self.prefill_ms)
        return PromptProgress(self.prompt_tokens, self.cached_tokens, read, spent)

    @property
    def timings(self) -> frames.Timings:
        """The timings of the prompt so far."""
        prefilled = self.prompt_tokens_read - self.cached_tokens
        prefill_ms = self.prefill_ms if prefilled else 0.0
        per_token_ms, rate = (
            (prefill_ms / prefilled, 1000 * prefilled / prefill_ms) if prefill_ms else (0.0, 0.0)
        )
        exact = self.cached_tokens if self.exact_tokens is None else self.exact_tokens
        return frames.Timings(
            cache_n=self.cached_tokens,
            cache_exact_n=exact,
            prompt_n=prefilled,
            prompt_ms=prefill_ms,
            prompt_per_token_ms=per_token_ms,
            prompt_per_second=rate,
        )

    @property
    def finish_reason(self) -> str:
        """The finish reason in OpenAI's words; a cancelled request has no reader, so it counts as "stop"."""
        reason = self.done.finish_reason if self.done else "stop"
        if reason == "cancelled":
            reason = "stop"
        return "tool_calls" if reason == "stop" and self.calls else reason


class PendingAnswer:
    """All choices of a request."""

    def __init__(
        self,
        model: str,
        requests: Sequence[frames.Generate],
        *,
        n: int,
        parser: Callable[[], AnswerParser | None] = lambda: None,
        ended: Callable[[Choice], None] | None = None,
        note: str = "",
    ) -> None:
        """Create the choices.

        Args:
            model: the pair's name.
            requests: one engine request per choice.
            n: the number of choices per prompt.
            parser: makes the parser of a choice.
            ended: the callback of the first choice.
            note: a remark on what the engine gets of the request.
        """
        self.model = model
        self.wants_timings = requests[0].timings
        self.wants_logprobs = requests[0].top_logprobs is not None
        self._predicted = requests[0].speculative.prediction is not None
        self.choices = [
            Choice(index // n, parser(), self.wants_logprobs) for index in range(len(requests))
        ]
        self.choices[0].on_end = ended
        self.request_note = note

    @property
    def done(self) -> list[frames.Done]:
        """The final frames of the choices that have ended."""
        return [choice.done for choice in self.choices if choice.done]

    def note(self, general: str | None) -> str:
        """Return remarks on this answer that a person may skip; `general` applies to all answers now."""
        return " ".join(filter(None, [general, self.request_note, self.choices[0].note]))

    def notice(self, general: str = "") -> str:
        """Return what a person must know about this answer; `general` applies to all answers now."""
        return " ".join(filter(None, [general, self.choices[0].notice]))

    def usage(self) -> Usage:
        """Return the token counts; a prompt counts once, however many choices it has."""
        ended_choices = [(choice, choice.done) for choice in self.choices if choice.done]
        prompts = {choice.prompt: end.prompt_tokens for choice, end in ended_choices}
        # Of several choices for a prompt the first one counts, because it made the cache that the others use.
        cached = {choice.prompt: choice.cached_tokens for choice, _ in reversed(ended_choices)}
        completion_tokens = sum(end.completion_tokens for _, end in ended_choices)
        details = None
        if self._predicted:
            details = CompletionTokensDetails(
                sum(end.speculation.predicted_accepted for _, end in ended_choices),
                sum(end.speculation.predicted_rejected for _, end in ended_choices),
            )
        prompt_tokens = sum(prompts.values())
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(sum(cached.values())),
            details,
        )


class Shape(Protocol):
    """Formats an answer for a client."""

    answer: PendingAnswer

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        """Return a stream's chunks for an event of choice `index` that added `pieces` to it."""

    def end(self) -> Sequence[object]:
        """Return what follows the choices in a stream."""

    def failed(self, error: LocalspecError) -> Sequence[object]:
        """Return the end of a stream that has begun and cannot go on."""

    def complete(self) -> object:
        """Return the whole answer as one object."""


class PromptProgressShape(Protocol):
    """A shape that can report how much of a prompt is read."""

    def reading(self, index: int, now: PromptProgress) -> object: ...


def progress_options(body: GenerationRequest, shape: PromptProgressShape) -> dict[str, Any]:
    """Return the arguments of `AnswerRun` that control what is sent before the answer begins."""
    reading = shape.reading if body.return_progress else None
    return {"reading": reading, "ping_s": body.sse_ping_interval}


def decode_piece(piece: bytes) -> str:
    """Return a token's bytes as text; incomplete characters become U+FFFD."""
    return piece.decode("utf-8", "replace")


# ------------------------------------------------------------------------ running the answer


async def respond(
    request: Request,
    preparation: Coroutine[Any, Any, AnswerRun],
    *,
    stream: bool,
    failed: Callable[[LocalspecError], Sequence[object]] = stream_error,
    ping_s: float = PING_INTERVAL_S,
    pings: Callable[[], Sequence[object]] = tuple,
    events: type[EventStream] = EventStream,
) -> Response:
    """Return the answer of a run that is prepared first.

    A preparation may hash files or load a model, which takes minutes. A stream begins with a ping when it
    has taken `ping_s`. Until the run is there, `failed` and `pings` are the stream's; see EventStream.
    """
    if not stream:
        return await (await preparation).respond(request, stream)
    task = asyncio.create_task(preparation)
    try:
        await asyncio.wait({task}, timeout=ping_s if ping_s > 0 else None)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        return await task.result().respond(request, stream)

    async def begin(emit: Emit) -> AnswerRun:
        try:
            await emit(*pings())
            return await task
        finally:
            task.cancel()

    return prepared_stream(begin, failed=failed, ping_s=ping_s, pings=pings, events=events)


def prepared_stream(
    prepare: Callable[[Emit], Awaitable[AnswerRun]],
    *,
    failed: Callable[[LocalspecError], Sequence[object]] = stream_error,
    ping_s: float,
    pings: Callable[[], Sequence[object]] = tuple,
    events: type[EventStream] = EventStream,
) -> EventStream:
    """Return the stream of a run that is prepared in it; the arguments are those of `respond`."""
    run: AnswerRun | None = None

    async def work(emit: Emit) -> None:
        nonlocal run
        run = await prepare(emit)
        await run.stream(emit)

    return events(
        work,
        done=False,
        failed=lambda error: run.shape.failed(error) if run else failed(error),
        ping_s=ping_s,
        pings=lambda: (run.pings if run else pings)(),
    )


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """The requests of an answer, and the shape that receives their events.

    `during` is entered while they run. `progress` makes the chunk that says what a stream is waiting for,
    and `reading` the one that says how much of a choice's prompt is read; if they are None, nothing is
    sent. `ping_s` and `pings` are as in EventStream. `opening` returns what is sent before the request waits
    in the queue.
    """

    supervisor: Supervisor
    pair: frames.PairFiles
    requests: Sequence[frames.Generate]  # one per choice
    shape: Shape
    during: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)
    progress: Callable[[Progress], object] | None = None
    reading: Callable[[int, PromptProgress], object] | None = None
    ping_s: float = PING_INTERVAL_S
    pings: Callable[[], Sequence[object]] = tuple
    opening: Callable[[], Sequence[object]] = tuple
    events: type[EventStream] = EventStream

    async def respond(self, request: Request, stream: bool) -> Response:
        """Return the answer, or an empty response if the client disconnects first."""
        if stream:
            return self.events(
                self.stream,
                done=False,
                failed=self.shape.failed,
                ping_s=self.ping_s,
                pings=self.pings,
            )
        try:
            await while_connected(request.receive, self._run())
        except ClientGone:
            return Response(status_code=499)  # nginx's code for a client that has disconnected
        return json_response(self.shape.complete())

    async def stream(self, emit: Emit) -> None:
        """Run all choices, and emit the events of their answer."""
        if self.progress is None:
            await self._run(emit)
        else:
            jobs = [Job.of(request) for request in self.requests]
            progress_task = asyncio.create_task(self._emit_progress(emit, self.progress, jobs))
            try:
                await self._run(emit, jobs)
            finally:
                progress_task.cancel()
                await asyncio.gather(progress_task, return_exceptions=True)
        await emit(*self.shape.end())

    async def _emit_progress(
        self, emit: Emit, progress: Callable[[Progress], object], jobs: Sequence[Job]
    ) -> None:
        """Emit what the answer is waiting for whenever that changes, until its text begins."""
        last = None
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            if any(choice.has_output for choice in self.shape.answer.choices):
                return
            current = self._current_progress(jobs)
            if current != last:
                await emit(progress(current))
            last = current

    def _current_progress(self, jobs: Sequence[Job]) -> Progress:
        name, resident = self.pair.name, self.supervisor.residents.get(self.pair.name)
        job = next((job for job in jobs if job.placed), None)
        if job is None:
            return Progress("queued", name, ahead=resident.admission.ahead(jobs[0]))
        if not job.prompt and self.pair.upstream is not None:
            return Progress("waiting", name)
        if not job.prompt:
            return resident.waits_for(self.pair)
        seconds = resident.forecast.reading_s(job)
        remaining_s = UNSET if seconds is None else math.ceil(seconds)
        return Progress("reading", name, job.read / job.prompt, UNSET, job.prompt, remaining_s)

    async def _run(self, emit: Emit | None = None, jobs: Sequence[Job] = ()) -> None:
        """Run all choices to their end; the first error ends all of them."""
        failure = None
        async with self.during:
            try:
                if emit is not None and (opening := self.opening()):
                    await emit(*opening)
                jobs = jobs or [Job.of(request) for request in self.requests]
                if len(self.requests) == 1:
                    await self._follow(0, emit, jobs[0])
                else:
                    await self._follow_all(emit, jobs)
            except LocalspecError as error:
                failure = error
                raise
            finally:
                for choice in self.shape.answer.choices:
                    choice.end(failure)

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

        async def forward(event: Event) -> None:
            pieces = choice.consume(event)
            if emit is None:
                return
            if not isinstance(event, frames.Reading):
                await emit(*self.shape.chunks(index, event, pieces))
            if self.reading and isinstance(event, frames.Started | frames.Reading):
                await emit(self.reading(index, choice.progress))

        await self.supervisor.generate(self.pair, self.requests[index], forward, job)
