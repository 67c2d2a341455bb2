"""The servers of pairs: what is known about each, the course of a request, and the fallback without it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from localspec.chat import tools
from localspec.chat.reader import reader_of
from localspec.daemon.worker.process import Event, Request, RunningRequest
from localspec.daemon.worker.queue import Job
from localspec.errors import (
    InvalidRequest,
    LocalspecError,
    ModelNotFound,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from localspec.extras.upstream.connection import ResponseLines, UpstreamConnection
from localspec.extras.upstream.dialects import (
    KINDS,
    DraftCounts,
    ServerCounters,
    ServerDialect,
    dialect_of_owner,
    parse_count,
)
from localspec.extras.upstream.reply import UpstreamReply, parse_events
from localspec.extras.upstream.request import (
    UpstreamRequest,
    build_request,
    infill_markers,
    unsupported_field,
)
from localspec.protocol import frames
from localspec.protocol.answers import UpstreamStatus
from localspec.protocol.calls import EXPLAINED
from localspec.protocol.settings import Upstream

_LIST_TIMEOUT_S = 10.0  # for the list of models
_ASK_TIMEOUT_S = 60.0  # for a small request, such as the tokens of a text
_METRICS_TIMEOUT_S = 1.0
_METRICS_RETRY_S = 0.1  # an engine may count its last pass just after it has sent the text
_MAX_SHOWN_MODELS = 5  # in an error message


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is known about a server.

    context: in tokens, 0 if the server does not report it.
    weights: the model that its model was made from, None if the server was not asked.
    """

    dialect: ServerDialect
    model: str
    context: int = 0
    weights: str | None = None


@dataclass
class UpstreamServer:
    """The server of one pair. `status` counts its requests since the daemon started."""

    name: str
    upstream: Upstream
    known: ServerInfo | None = None

    def __post_init__(self) -> None:
        self.connection = UpstreamConnection(self.name, self.upstream)
        fallback = self.upstream.fallback or None
        self.status = UpstreamStatus(self.name, self.connection.origin, fallback=fallback)
        # Tokens of the answers whose speculation was reported, and target passes that produced them.
        self._measured = self._passes = 0
        self._lookup_lock = asyncio.Lock()
        self._counter_tasks: set[asyncio.Task[ServerCounters | None]] = set()
        self._reports_drafts = False  # whether its answers report their drafts

    def count(self, done: frames.Done) -> None:
        """Add the figures of an answer to the status."""
        status, speculation = self.status, done.speculation
        status.tokens += done.completion_tokens
        status.drafted += speculation.drafted
        status.accepted += speculation.accepted
        if speculation.rounds:
            self._measured += done.completion_tokens
            self._passes += speculation.rounds
            status.tokens_per_pass = self._measured / self._passes

    async def discover(self, *, weights: bool = False) -> ServerInfo:
        """Return what is known about the server. The first call finds it out; `weights` asks for these too.

        Raises:
            UpstreamError: The server cannot be asked.
            InvalidRequest: It has several models, and the pair names none of them.
        """
        async with self._lookup_lock:
            if self.known is None or (weights and self.known.weights is None):
                self.known = await self._discover(weights)
            return self.known

    async def _discover(self, weights: bool) -> ServerInfo:
        name, stated = self.upstream.upstream_model, KINDS.get(self.upstream.upstream_kind)
        if stated and name and not weights:
            return ServerInfo(stated, name)
        data = self.connection.decode(await self.connection.get("models", _LIST_TIMEOUT_S))
        entries = data.get("data") if isinstance(data, dict) else None
        models = [
            item
            for item in (entries if isinstance(entries, list) else [])
            if isinstance(item, dict) and isinstance(item.get("id"), str) and item["id"]
        ]
        if not models:
            raise self.connection.invalid_response("the list of models is empty or invalid")
        if name:
            entry = next((model for model in models if model["id"] == name), models[0])
        else:
            entry = self._choose_model(models)
        meta, root = entry.get("meta"), entry.get("root")
        n_ctx = parse_count(meta.get("n_ctx") if isinstance(meta, dict) else None)
        return ServerInfo(
            stated or dialect_of_owner(entry.get("owned_by")),
            name or entry["id"],
            parse_count(entry.get("max_model_len")) or n_ctx or 0,
            root if isinstance(root, str) else "",
        )

    def _choose_model(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the entry of the server's only model.

        Another localspec lists its default model first. Adapters, which have a parent, are not counted.
        """
        base_models = [model for model in models if not model.get("parent")]
        kinds = [dialect_of_owner(model.get("owned_by")).kind for model in base_models[:1]]
        if len(base_models) == 1 or kinds == ["localspec"]:
            return base_models[0]
        shown = models[:_MAX_SHOWN_MODELS]
        names = ", ".join(self.connection.clean(model["id"]) for model in shown)
        raise InvalidRequest(
            f"The server of '{self.name}' has several models: {names}{'…' * (models != shown)}. "
            f"Name one: localspec add {self.name} --upstream … --upstream-model NAME --replace",
            param="model",
        )

    def info(self) -> frames.Loaded:
        """Return the information of a loaded pair, without a request to the server."""
        known = self.known
        model = known.model if known else self.upstream.upstream_model
        target = f"{model or 'its model'} at {self.connection.origin}"
        context = known.context if known else 0
        backend = known.dialect.name if known else "upstream"
        return frames.Loaded(self.name, target, None, context, 0, None, "", "", backend=backend)

    async def events(self, request: frames.Generate) -> AsyncGenerator[Event, None]:
        """Yield the events of one answer. Closing this generator closes the connection.

        A connection that fails before the first text is tried once more, unless the pair has a fallback.

        Raises:
            UpstreamUnreachable: The server does not respond.
            UpstreamError, InvalidRequest: The server refused the request or broke off the answer.
        """
        text_began = False
        for is_last_try in (False, True):
            try:
                async with contextlib.aclosing(self._try_once(request)) as events:
                    async for event in events:
                        text_began = text_began or isinstance(event, frames.Delta)
                        if isinstance(event, frames.Done):
                            self.status.problem = ""  # now, because the reader stops at this event
                        yield event
                return
            except UpstreamUnreachable as error:
                self.status.problem = error.message
                if text_began:  # the client has a part of the answer, so it cannot start again
                    raise UpstreamError(error.message) from None
                self.known = None  # another server may come back at this address
                if is_last_try or self.upstream.fallback:
                    raise

    async def _try_once(self, request: frames.Generate) -> AsyncGenerator[Event, None]:
        known = await self.discover()
        dialect = known.dialect
        infill = isinstance(request.prompt, frames.InfillPrompt) and not dialect.has_native_api
        if infill and not infill_markers([known.model]):
            known = await self.discover(weights=True)
        sent = build_request(request, dialect, known.model, known.weights or "")
        sent.reader = reader_of(request, reasoning=bool(request.thoughts))
        if sent.endless and dialect.kind == "vllm":
            await self._fill_context(sent)
        began = time.monotonic()
        if sent.only_read and not dialect.has_native_api:
            # Only servers with llama-server's own API can read a prompt ahead without an answer.
            yield frames.Started(0, 0, 0, note=sent.note)
            yield frames.Done(0, "length", 0, 0, frames.Timings(), frames.Speculation())
            return
        counters = None
        # The server's counters measure one answer if its answers do not report their drafts and no other
        # request of ours is running. The first reading runs beside the request and does not delay it.
        if dialect.metrics_path and not self._reports_drafts and self.status.running <= 1:
            counters = asyncio.create_task(self._read_counters(dialect))
            self._counter_tasks.add(counters)
            counters.add_done_callback(self._counter_tasks.discard)
        async with self.connection.stream(sent.path, sent.body, sent.max_bytes) as lines:
            yield frames.Started(0, 0, 0, note=sent.note)
            reply = UpstreamReply(self.connection, dialect, sent, began)
            marked = False
            async with contextlib.aclosing(parse_events(self.connection, lines)) as chunks:
                async for chunk in chunks:
                    for delta in reply.parse_chunk(chunk) if chunk is not None else ():
                        lines.use_silence_timeout()
                        yield delta
                    if marked := chunk is None or reply.over:
                        break
            for delta in reply.end(marked=marked):
                yield delta
            await _finish_stream(lines)
        self._reports_drafts = self._reports_drafts or reply.reports_drafts
        counted = None
        if counters and not reply.reports_drafts:
            counted = await self._count_drafts(dialect, await counters, reply.completion_tokens)
        yield reply.done(counted)

    async def _fill_context(self, sent: UpstreamRequest) -> None:
        """Set the limit of a text to the rest of vLLM's context. Without a limit vLLM writes 16 tokens."""
        known, prompt = await self.discover(weights=True), sent.body["prompt"]
        if isinstance(prompt, str):
            prompt = (await self._tokenize(known, prompt=prompt))["tokens"]
        if known.context > len(prompt):
            sent.body["max_tokens"], sent.endless = known.context - len(prompt), False

    async def _count_drafts(
        self, dialect: ServerDialect, before: ServerCounters | None, tokens: int
    ) -> DraftCounts | None:
        """Return the drafts of an answer of `tokens` tokens by the server's counters before and after it.

        Return None if they cannot be known: the server counts no drafts, or has generated tokens for other
        requests meanwhile.
        """
        for wait in (0.0, _METRICS_RETRY_S) if before else ():
            await asyncio.sleep(wait)
            after = await self._read_counters(dialect)
            if before and after and tokens and after.tokens - before.tokens == tokens:
                drafted = after.drafted - before.drafted
                return DraftCounts(drafted, after.accepted - before.accepted)
        return None

    async def _read_counters(self, dialect: ServerDialect) -> ServerCounters | None:
        with contextlib.suppress(LocalspecError, ValueError, OverflowError):
            data = await self.connection.get(dialect.metrics_path, _METRICS_TIMEOUT_S)
            return dialect.parse_counters(data.decode(errors="replace"))
        return None

    async def close(self) -> None:
        await asyncio.gather(*self._counter_tasks)
        await self.connection.close()

    async def ask(self, request: Any) -> dict[str, Any]:
        """Return the response to a small request.

        Raises:
            InvalidRequest: The server has no endpoint for it.
            UpstreamError: The server failed.
        """
        known = await self.discover()
        dialect, is_vllm = known.dialect, known.dialect.kind == "vllm"
        match request:
            case frames.Tokenize() if dialect.has_native_api:
                return await self._tokenize(
                    known,
                    content=request.text,
                    add_special=request.add_special,
                    parse_special=request.parse_special,
                    with_pieces=request.pieces,
                )
            case frames.Tokenize() if is_vllm:
                if not request.parse_special:
                    reason = "it always parses special tokens"
                    raise unsupported_field("parse_special", dialect, reason)
                if request.pieces:
                    reason = "its texts are not those of the prompt"
                    raise unsupported_field("with_pieces", dialect, reason)
                special = request.add_special
                return await self._tokenize(known, prompt=request.text, add_special_tokens=special)
            case frames.Detokenize() if dialect.has_native_api or is_vllm:
                key = "content" if dialect.has_native_api else "prompt"
                body: dict[str, Any] = {"tokens": request.tokens, "model": known.model}
                return {"content": await self._ask_for_text("/detokenize", body, key)}
            case frames.ApplyTemplate() if dialect.has_native_api:
                return {"prompt": await self._apply_template(_template_body(request.prompt, known))}
            case frames.CountTokens(prompt=frames.ChatPrompt() as prompt) if (
                dialect.has_native_api or is_vllm
            ):
                body = _template_body(prompt, known)
                if dialect.has_native_api:
                    text = await self._apply_template(body)
                    body = {"content": text, "add_special": True, "parse_special": True}
                return {"tokens": len((await self._tokenize(known, **body))["tokens"])}
        field = _ERROR_FIELDS.get(type(request), "model")
        raise unsupported_field(field, dialect, "it has no endpoint for it")

    async def _tokenize(self, known: ServerInfo, **body: Any) -> dict[str, Any]:
        """Return the ids of a text's tokens, and their texts where llama-server sends them."""
        body["model"] = known.model  # another localspec may have several
        response = await self.connection.post("/tokenize", body, _ASK_TIMEOUT_S)
        entries = response.get("tokens") if isinstance(response, dict) else None
        if not isinstance(entries, list) or len(entries) > frames.MAX_REPLY_TOKENS:
            raise self.connection.invalid_response("there is no list of 'tokens'")
        tokens, pieces = [], []
        for entry in entries:
            token_id, piece = entry, ""
            if isinstance(entry, dict):
                token_id, piece = entry.get("id"), entry.get("piece", "")
            if parse_count(token_id) is None:
                raise self.connection.invalid_response("a token is not a number")
            tokens.append(token_id)
            if isinstance(piece, list) and all(isinstance(b, int) and 0 <= b < 256 for b in piece):
                pieces.append(bytes(piece))
            else:
                pieces.append(str(piece).encode(errors="replace"))
        return {"tokens": tokens, "pieces": pieces}

    async def _apply_template(self, body: dict[str, Any]) -> str:
        return await self._ask_for_text("/apply-template", body, "prompt")

    async def _ask_for_text(self, path: str, body: dict[str, Any], key: str) -> str:
        response = await self.connection.post(path, body, _ASK_TIMEOUT_S)
        value = response.get(key) if isinstance(response, dict) else None
        if not isinstance(value, str):
            raise self.connection.invalid_response(f"there is no '{key}'")
        return value


# The fields of a chat request that a chat template uses.
_TEMPLATE_FIELDS = (
    *("messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    "model",
)
# The field that an error names, by the type of a small request.
_ERROR_FIELDS: dict[type, str] = {
    frames.Tokenize: "content",
    frames.Detokenize: "tokens",
    frames.ApplyTemplate: "messages",
    frames.CountTokens: "messages",
}


def _template_body(prompt: frames.ChatPrompt, known: ServerInfo) -> dict[str, Any]:
    """Return the body of a request to apply the chat template."""
    sent = build_request(frames.Generate(0, prompt), known.dialect, known.model)
    body = {key: sent.body[key] for key in _TEMPLATE_FIELDS if key in sent.body}
    return {**body, "tools": prompt.tools} if prompt.tools else body


async def _finish_stream(lines: ResponseLines) -> None:
    """Read the end of a finished stream for a short time, so that its connection can be used again."""
    with contextlib.suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(0.05):
            async for _ in lines:
                pass


# If the pair has a fallback and no event arrives within the first time, the server must respond to a small
# request within the second. Otherwise the fallback answers.
_FIRST_EVENT_S = 0.1
_PROBE_TIMEOUT_S = 0.8
# Seconds between two tries in the background. The last one repeats.
_RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_GIVE_UP_AFTER_S = 600.0  # without a request for the pair, the tries end


class Upstreams:
    """The servers that were used since the daemon started.

    A server with a fallback that did not answer is tried again in the background as long as clients ask for
    its pair. Until it answers, their requests go to the fallback at once. Other servers are contacted only
    for a request.
    """

    def __init__(self, resolve: Callable[[str], frames.PairFiles]) -> None:
        """Create the table of servers. `resolve` returns the files of a pair by its name, and blocks."""
        self._resolve = resolve
        self._servers: dict[str, UpstreamServer] = {}
        self._away: dict[str, asyncio.Task[None]] = {}  # the tasks that try a server again, by pair
        self._requested_at: dict[str, float] = {}  # time of the last request, by pair
        self._heard_at: dict[str, float] = {}  # time of the last event of any answer, by pair
        self._running: set[StreamedRequest] = set()

    def of(self, pair: frames.PairFiles) -> UpstreamServer:
        """Return the server of a pair, a new one if models.toml names another server by now."""
        assert pair.upstream is not None
        server = self._servers.get(pair.name)
        if server is None or server.upstream != pair.upstream:
            self.forget(pair.name)
            server = self._servers[pair.name] = UpstreamServer(pair.name, pair.upstream)
        return server

    def forget(self, name: str) -> None:
        """Drop the server of a pair. Its running requests go on."""
        if server := self._servers.pop(name, None):
            self._stop_retries(server)

    def _stop_retries(self, server: UpstreamServer) -> None:
        if retry_task := self._away.pop(server.name, None):
            retry_task.cancel()
        self._heard_at.pop(server.name, None)

    @contextlib.asynccontextmanager
    async def running(
        self, pair: frames.PairFiles, request: frames.Generate, job: Job
    ) -> AsyncIterator[RunningRequest]:
        """Run one request. Leaving the block early closes its connection at once.

        Raises:
            UpstreamUnreachable: The server does not respond, and no part of an answer has arrived.
        """
        server = self.of(pair)
        counts = server.status
        counts.requests += 1
        counts.running += 1
        self._requested_at[pair.name] = time.monotonic()
        running = StreamedRequest(request, job, self._record_events(server, request))
        self._running.add(running)
        watch_task: asyncio.Task[None] | None = None
        try:
            if server.upstream.fallback:
                if server.name in self._away:
                    raise UpstreamUnreachable(server.status.problem)
                watch_task = asyncio.create_task(self._abort_if_unreachable(server, running))
            yield running
        except LocalspecError:
            counts.failed += 1
            raise
        finally:
            if watch_task:
                watch_task.cancel()
            counts.running -= 1
            self._running.discard(running)
            await running.close()
            if running.done:
                server.count(running.done)

    async def _record_events(
        self, server: UpstreamServer, request: frames.Generate
    ) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(server.events(request)) as events:
            async for event in events:
                self._heard_at[server.name] = time.monotonic()
                yield event

    async def _abort_if_unreachable(self, server: UpstreamServer, running: StreamedRequest) -> None:
        """End a request of a pair with a fallback if its server seems to be unreachable.

        A small second request, which does not delay the first, must get a response. An answer a short time
        ago proves nothing: the link may have been cut since, without any sign of it.
        """
        began = time.monotonic()
        await asyncio.sleep(_FIRST_EVENT_S)
        if running.begun:
            return
        try:
            await self._probe(server)
        except UpstreamUnreachable as error:
            # A busy server may be slow to respond while its other answers go on.
            if not running.begun and self._heard_at.get(server.name, 0.0) < began:
                running.abort(error)

    async def _probe(self, server: UpstreamServer) -> None:
        try:
            await server.connection.get("models", _PROBE_TIMEOUT_S)
        except (UpstreamTimeout, UpstreamUnreachable) as error:
            server.status.problem = error.message
            raise UpstreamUnreachable(error.message) from None
        except LocalspecError:
            pass  # it responds; the actual request will run into the same error, if it matters

    async def ask(self, pair: frames.PairFiles, request: Request) -> frames.Reply:
        """Return the response to a small request. Raises as `UpstreamServer.ask`."""
        return frames.Reply(0, await self.of(pair).ask(request))

    def info(self, pair: frames.PairFiles) -> frames.Loaded:
        """Return the information of a loaded pair, without a request to the server."""
        return self.of(pair).info()

    async def fallback_pair(
        self,
        request: frames.Generate,
        failed: Sequence[tuple[frames.PairFiles, UpstreamUnreachable]],
    ) -> tuple[frames.PairFiles, frames.Generate, str]:
        """Return the pair that answers in place of the last of these servers, its request, and a note.

        `failed` are the servers that did not answer, each the fallback of the one before.

        Raises:
            UpstreamUnreachable: No fallback is configured, it is missing, or it has failed too.
        """
        server = self.of(failed[-1][0])
        name = server.upstream.fallback
        problems = [error.message for _, error in failed]
        if name and server.name not in self._away:
            self._away[server.name] = asyncio.create_task(self._retry(server))
        fallback: frames.PairFiles | None = None
        try:
            fallback = await asyncio.to_thread(self._resolve, name) if name else None
        except ModelNotFound:
            problems.append(f"Its fallback '{name}' does not exist.")
        except LocalspecError as unusable:
            problems.append(f"Its fallback '{name}' cannot be used: {unusable.message}")
        said = " ".join(problems)  # the reason for each server of the chain
        if fallback is None or fallback.name in {pair.name for pair, _ in failed}:
            raise UpstreamUnreachable(said)
        server.status.fallbacks += 1
        return fallback, _adapt_request(request), f"{said} '{fallback.name}' answers in its place."

    async def _retry(self, server: UpstreamServer) -> None:
        """Try the server again until it responds or no client uses its pair any more."""
        delays = itertools.chain(_RETRY_DELAYS_S, itertools.repeat(_RETRY_DELAYS_S[-1]))
        try:
            while time.monotonic() - self._requested_at.get(server.name, 0.0) < _GIVE_UP_AFTER_S:
                await asyncio.sleep(next(delays))
                with contextlib.suppress(UpstreamUnreachable):
                    await self._probe(server)
                    server.status.problem, server.known = "", None
                    return
        finally:
            self._away.pop(server.name, None)

    def statuses(self) -> list[UpstreamStatus]:
        for server in self._servers.values():
            known, status = server.known, server.status
            status.kind = known.dialect.name if known else None
            status.model = known.model if known else server.upstream.upstream_model or None
            status.away = server.name in self._away
        return [server.status for server in self._servers.values()]

    def abort(self, error: LocalspecError) -> None:
        """Fail every running request."""
        for running in self._running:
            running.abort(error)

    async def close(self) -> None:
        for server in self._servers.values():
            self._stop_retries(server)
            await server.close()


class StreamedRequest(RunningRequest):
    """A running request whose events are fetched from the server when they are read."""

    def __init__(
        self, request: frames.Generate, job: Job, events: AsyncGenerator[Event, None]
    ) -> None:
        super().__init__(request, job)
        self.begun = False  # whether any event has arrived
        self.done: frames.Done | None = None
        self._events = events
        self._reader: asyncio.Task[object] | None = None
        self._aborted: LocalspecError | None = None

    async def next(self) -> Event | frames.Reply:
        if self._aborted:
            raise self._aborted
        self._reader = asyncio.current_task()
        try:
            event = await anext(self._events)
        except asyncio.CancelledError:
            if self._aborted and self._reader:
                self._reader.uncancel()
                raise self._aborted from None
            raise
        finally:
            self._reader = None
        self.begun = True
        self.job.update(event)
        if isinstance(event, frames.Done):
            self.done = event
        return event

    def abort(self, error: LocalspecError) -> None:
        self._aborted = error
        if self._reader:
            self._reader.cancel()

    async def close(self) -> None:
        await self._events.aclose()


def _adapt_request(request: frames.Generate) -> frames.Generate:
    """Return the request for a local pair.

    Its chat template may not support tools, so tools and calls are described in the messages, in the notation
    that the answer is parsed with.
    """
    prompt, allowed = request.prompt, request.tools
    if not isinstance(prompt, frames.ChatPrompt):
        return request
    has_calls = any(
        message.role == "tool" or message.extra.get("tool_calls") for message in prompt.messages
    )
    if not prompt.tools and not has_calls:
        return request
    messages = tools.explain_tools(prompt.messages, prompt.tools or [])
    if allowed is not None:
        allowed = msgspec.structs.replace(allowed, format=EXPLAINED)
    prompt = msgspec.structs.replace(prompt, messages=messages, tools=None)
    return msgspec.structs.replace(request, prompt=prompt, tools=allowed)
