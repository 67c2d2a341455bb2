"""Collect what a request's choices have generated so far, and run them to their end.

A choice consumes the engine's events. A shape formats them for a client: chunk by chunk, or all in one
object. Shapes store none of the text themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from localspec.chat.token_report import decode_piece
from localspec.daemon.http.errors import stream_error
from localspec.daemon.http.requests import ClientGone, json_response, while_connected
from localspec.daemon.http.sse import Emit, EventStream, running_beside
from localspec.daemon.worker.process import Event
from localspec.daemon.worker.queue import Job
from localspec.daemon.worker.table import PairTable
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.answers import (
    CalledFunction,
    ChatLogprob,
    CompletionTokensDetails,
    LengthLimit,
    Progress,
    PromptProgress,
    PromptTokensDetails,
    ToolCall,
    TopLogprob,
    Usage,
)
from localspec.protocol.pieces import Arguments, Call, Piece, Text
from localspec.protocol.requests import PING_INTERVAL_S

Extension = TypeVar("Extension", bound=Struct)
Scored = TypeVar("Scored", bound=ChatLogprob)
log = logging.getLogger("localspec.daemon")
_LONG_PREFILL_S = 5.0  # a client is told of a longer wait before it begins
_PROGRESS_INTERVAL_S = 0.1  # between two checks of what an answer is waiting for


@dataclass(slots=True)
class Choice:
    """One choice so far.

    `on_end` is called once, when the choice is complete and before any client knows that.
    """

    prompt: int  # index of the prompt that it answers
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
    prefill_cost: frames.PromptCost | None = None  # as far as it is known by now
    note: str = ""  # what the engine could not do for this request
    notice: str = ""  # says which pair answered in place of another
    fallback_pair: str = ""  # the name of the pair that answered in place of another
    reasoning_tokens: int = 0
    has_output: bool = False  # text or the end has arrived
    is_finished: bool = False
    error: LocalspecError | None = None  # why it could not be completed
    done: frames.Done | None = None
    _is_thinking: bool = False  # the last piece is reasoning
    _n_tokens: int = 0  # tokens so far

    def consume(self, event: Event) -> Sequence[Piece]:
        """Consume an event and return the pieces that it adds."""
        pieces: Sequence[Piece] = ()
        match event:
            case frames.Started():
                self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                self.logit_bias, self.exact_tokens = event.logit_bias, event.exact_tokens
                self.prompt_tokens_read = event.cached_tokens
                self.prefill_cost = event.reading
                self.note, self.notice, self.fallback_pair = event.note, event.news, event.stand_in
            case frames.Reading():  # After a crash another engine starts the prompt again.
                self.prompt_tokens_read = max(self.prompt_tokens_read, event.processed)
                # An engine that started again repeats the scores of the first tokens.
                if event.scores:
                    self.prompt_logprobs[event.scores_from :] = event.scores
                self.prefill_ms = event.ms
                self.prefill_cost = event.reading or self.prefill_cost
            case frames.Delta():
                self.has_output = True
                self.logprobs += event.logprobs
                self.content_logprobs += [t for t in event.logprobs if t.is_content]
                self.tokens += event.ids
                pieces = event.pieces
                self._add(pieces)
                if self._is_thinking:
                    self.reasoning_tokens += event.tokens - self._n_tokens
                self._n_tokens = event.tokens
            case frames.Done():
                self.has_output, self.done = True, event
                self.prompt_tokens = event.prompt_tokens
                self.cached_tokens = self.cached_tokens or event.timings.cache_n
                self.end()
        return pieces

    def end(self, error: LocalspecError | None = None) -> None:
        """End the choice, if that was not done yet."""
        if self.is_finished:
            return
        self.is_finished, self.error = True, error
        if self.on_end is not None:
            self.on_end(self)

    def _add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._is_thinking = isinstance(piece, Text) and piece.kind == "reasoning"
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
        left = UNSET if self.prefill_cost is None else int(1e3 * self.prefill_s)
        return PromptProgress(self.prompt_tokens, self.cached_tokens, read, spent, left)

    @property
    def prefill_s(self) -> float:
        """The expected seconds of reading the rest of the prompt, 0 if nothing is known."""
        cost = self.prefill_cost
        return cost.range_seconds(self.prompt_tokens_read, self.prompt_tokens) if cost else 0.0

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


@dataclass(slots=True)
class AnswerNotes:
    """Remarks on an answer for its client, beside the content: the key `localspec` of any protocol.

    general: a remark that applies to all answers now, which a person may skip.
    news: what a person must be told once, with one answer; None if the protocol has no place for it.
    not_kept: why the answer was not stored, after that was due.
    ignored: the fields of the request that had no effect.
    request: a remark on what the engine gets of the request.
    """

    general: Callable[[], str | None] = str
    news: Callable[[], str] | None = None
    not_kept: Callable[[], str] = str
    ignored: Callable[[], Sequence[str]] = tuple
    request: str = ""


class PendingAnswer:
    """All choices of a request."""

    def __init__(
        self,
        model: str,
        requests: Sequence[frames.Generate],
        *,
        n: int,
        ended: Callable[[Choice], None] | None = None,
        notes: AnswerNotes | None = None,
    ) -> None:
        """Create the choices.

        Args:
            model: the pair's name.
            requests: one engine request per choice.
            n: the number of choices per prompt.
            ended: the callback of the first choice.
            notes: what is said beside its content.
        """
        self.model = model
        self.wants_timings = requests[0].timings
        self.wants_logprobs = requests[0].top_logprobs is not None
        self._predicted = requests[0].speculative.prediction is not None
        self.choices = [Choice(index // n) for index in range(len(requests))]
        self.choices[0].on_end = ended
        self.notes = notes or AnswerNotes()

    @property
    def done(self) -> list[frames.Done]:
        """The final frames of the choices that have ended."""
        return [choice.done for choice in self.choices if choice.done]

    def note(self) -> str:
        """Return remarks on this answer, with what a person must know if there is no other place for it."""
        notes, first = self.notes, self.choices[0]
        notice = first.notice if notes.news is None else ""
        return " ".join(filter(None, [notes.general(), notes.request, first.note, notice]))

    def extension(
        self, kind: type[Extension], done: Sequence[frames.Done], **more: Any
    ) -> Extension:
        """Return the key `localspec` at the end of an answer, as far as the struct `kind` has its fields.

        `done` ends one choice or all of them. `more` are fields of this protocol.
        """
        news = self.notes.news
        values = {
            "speculation": done[0].speculation if len(done) == 1 else None,
            "note": self.note(),
            "news": " ".join(filter(None, [news(), self.choices[0].notice])) if news else "",
            "not_kept": self.notes.not_kept(),
            "limit": length_limit(done),
            "loop": find_loop(done),
            "ignored": list(self.notes.ignored()),
            "passes": done[0].trace if len(done) == 1 else None,
            **more,
        }
        names = kind.__struct_fields__
        return kind(**{name: values[name] for name in names if values.get(name)})

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


def find_loop(done: Sequence[frames.Done]) -> Literal["thoughts", "text"] | UnsetType:
    """Return where an answer repeated itself without progress, if it did."""
    return next((end.loop for end in done if end.loop), UNSET)


def length_limit(done: Sequence[frames.Done]) -> LengthLimit | UnsetType:
    """Return what cut an answer off: its token limit, the context, a loop, or nothing."""
    cut = [end for end in done if end.finish_reason == "length"]
    if not cut:
        return UNSET
    if any(end.loop == "text" for end in cut):
        return "loop"
    return "context" if any(end.truncated for end in cut) else "tokens"


class Shape(ABC):
    """Formats an answer for a client, in a stream of the class `events` or as one object."""

    events: ClassVar[type[EventStream]] = EventStream

    def __init__(self, answer: PendingAnswer) -> None:
        self.answer = answer

    @abstractmethod
    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        """Return a stream's chunks for an event of choice `index` that added `pieces` to it."""

    def end(self) -> Sequence[object]:
        """Return what follows the choices in a stream."""
        return ()

    @abstractmethod
    def complete(self) -> object:
        """Return the whole answer as one object."""

    @classmethod
    def failed_early(cls, error: LocalspecError) -> Sequence[object]:
        """Return the end of a stream that failed before there was an answer."""
        return stream_error(error)

    def failed(self, error: LocalspecError) -> Sequence[object]:
        """Return the end of a stream that has begun and cannot go on."""
        return self.failed_early(error)

    @classmethod
    def pings_early(cls) -> Sequence[object]:
        """Return the events of a ping before there is an answer; none stands for a comment."""
        return ()

    def pings(self) -> Sequence[object]:
        return self.pings_early()


def format_logprob(token: frames.TokenLogprob, kind: type[Scored]) -> Scored:
    """Return a token's log-probability as chats have it, in that struct of a protocol."""
    top = [TopLogprob(decode_piece(raw), value, list(raw)) for _, raw, value in token.top]
    return kind(decode_piece(token.piece), token.logprob, list(token.piece), top)


async def respond(
    request: Request,
    preparation: Coroutine[Any, Any, AnswerRun],
    shape: type[Shape],
    *,
    stream: bool,
    ping_s: float = PING_INTERVAL_S,
) -> Response:
    """Return the answer of a run of this shape that is prepared first.

    A preparation may hash files or load a model, which takes minutes. A stream begins with a ping when it
    has taken `ping_s`.
    """
    if stream:
        return prepared_stream(lambda: preparation, shape, ping_s=ping_s)
    return await (await preparation).respond(request)


def prepared_stream(
    prepare: Callable[[], Awaitable[AnswerRun]], shape: type[Shape], *, ping_s: float
) -> EventStream:
    """Return the stream of a run that is prepared in it; the arguments are those of `respond`."""
    run: AnswerRun | None = None

    async def work(emit: Emit) -> None:
        nonlocal run
        run = await prepare()
        await run.stream(emit)

    return shape.events(
        work,
        done=False,
        failed=lambda error: run.shape.failed(error) if run else shape.failed_early(error),
        ping_s=ping_s,
        pings=lambda: run.shape.pings() if run else shape.pings_early(),
    )


@dataclass(frozen=True, slots=True)
class AnswerRun:
    """The requests of an answer, and the shape that receives their events.

    `during` is entered while they run. `progress` makes the chunk that says what a stream is waiting for,
    and `reading` the one that says how much of a choice's prompt is read; if they are None, nothing is
    sent. `opening` returns what is sent before the request waits in the queue.
    """

    pairs: PairTable
    pair: frames.PairFiles
    requests: Sequence[frames.Generate]  # one per choice
    shape: Shape
    during: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)
    progress: Callable[[Progress], object] | None = None
    reading: Callable[[int, PromptProgress], object] | None = None
    opening: Callable[[], Sequence[object]] = tuple

    async def respond(self, request: Request) -> Response:
        """Return the whole answer, or an empty response if the client disconnects first."""
        try:
            jobs = [Job.of(generate) for generate in self.requests]
            await while_connected(request.receive, self._run(None, jobs))
        except ClientGone:
            return Response(status_code=499)  # nginx's code for a client that has disconnected
        return json_response(self.shape.complete())

    async def stream(self, emit: Emit) -> None:
        """Run all choices, and emit the events of their answer."""
        jobs = [Job.of(request) for request in self.requests]
        progress = self._emit_progress(emit, self.progress, jobs) if self.progress else None
        async with running_beside(progress):
            await self._run(emit, jobs)
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
        name, resident = self.pair.name, self.pairs.get(self.pair.name)
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

    async def _run(self, emit: Emit | None, jobs: Sequence[Job]) -> None:
        """Run all choices to their end; the first error ends all of them."""
        failure = None
        async with self.during:
            try:
                if emit is not None and (opening := self.opening()):
                    await emit(*opening)
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
            if isinstance(event, frames.Started) and choice.prefill_s >= _LONG_PREFILL_S:
                wait = f"reading {event.prompt_tokens - event.cached_tokens:,} tokens of a prompt, "
                wait += f"in about {choice.prefill_s:.0f} s"
                log.info("%s: %s", self.pair.name, wait)
                if emit is not None:
                    await emit(*self.shape.events.comment(wait))
            if emit is None:
                return
            if not isinstance(event, frames.Reading):
                await emit(*self.shape.chunks(index, event, pieces))
            if self.reading and isinstance(event, frames.Started | frames.Reading):
                await emit(self.reading(index, choice.progress))

        await self.pairs.generate(self.pair, self.requests[index], forward, job)
