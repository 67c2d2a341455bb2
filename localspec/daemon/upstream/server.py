"""One server: what is known of it, found out with the first request, and a request on its way through it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from localspec.daemon.upstream.connection import Connection, Lines
from localspec.daemon.upstream.counting import Counting
from localspec.daemon.upstream.dialects import KINDS, of_owner
from localspec.daemon.upstream.dialects.base import Counters, Dialect, whole
from localspec.daemon.upstream.events import objects
from localspec.daemon.upstream.reply import Reply
from localspec.daemon.upstream.request import Asked, asked, fills_in, refusal
from localspec.daemon.worker.process import Event
from localspec.errors import InvalidRequest, UpstreamError, UpstreamUnreachable
from localspec.protocol import frames
from localspec.protocol.settings import Upstream

_LOOK = 10.0  # seconds for a list of models
_SMALL = 60.0  # seconds for tokens of a text
_SHOWN = 5  # models that an error names


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a server. context: tokens, 0 where it does not say. weights: what it says the model
    is made of, None where it was not asked.
    """

    dialect: Dialect
    model: str
    context: int = 0
    weights: str | None = None


@dataclass
class Counted:
    """The requests of one pair since the daemon started. measured: tokens of answers whose speculation
    was told, `passes` of the target that gave them.
    """

    running: int = 0
    requests: int = 0
    failed: int = 0
    fallbacks: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    measured: int = 0
    passes: int = 0

    def done(self, done: frames.Done) -> None:
        told = done.speculation
        self.tokens += done.completion_tokens
        self.drafted += told.drafted
        self.accepted += told.accepted
        if told.rounds:
            self.measured += done.completion_tokens
            self.passes += told.rounds


@dataclass
class Server:
    """The server of one pair."""

    name: str
    upstream: Upstream
    counted: Counted = field(default_factory=Counted)
    known: Known | None = None
    problem: str = ""  # why it did not answer, the last time that it was asked

    def __post_init__(self) -> None:
        self.connection = Connection(self.name, self.upstream)
        self._looking = asyncio.Lock()
        self._looks: set[asyncio.Task[Counters | None]] = set()
        self._tells = False  # whether its answers say what drafts came to

    # ------------------------------------------------------------------ what it is

    async def found(self, *, weights: bool = False) -> Known:
        """What is known of it; the first who asks has it found out. weights: those, too.

        Raises:
            UpstreamError: it cannot be. InvalidRequest: it has several models, and none is named.
        """
        async with self._looking:
            if self.known is None or (weights and self.known.weights is None):
                self.known = await self._look(weights)
            return self.known

    async def _look(self, weights: bool) -> Known:
        told = self.upstream
        stated = KINDS.get(told.upstream_kind)
        if stated and told.upstream_model and not weights:
            return Known(stated, told.upstream_model)
        data = self.connection.decoded(await self.connection.get("models", _LOOK))
        entries = data.get("data") if isinstance(data, dict) else None
        models = [
            each
            for each in (entries if isinstance(entries, list) else [])
            if isinstance(each, dict) and isinstance(each.get("id"), str) and each["id"]
        ]
        if not models:
            raise self.connection.nonsense("it lists no models")
        entry = self._chosen(models)
        meta = entry.get("meta")
        context = whole(entry.get("max_model_len")) or whole(
            meta.get("n_ctx") if isinstance(meta, dict) else None
        )
        dialect = stated or of_owner(entry.get("owned_by"))
        root = entry.get("root")
        made_of = root if isinstance(root, str) else ""
        return Known(dialect, told.upstream_model or entry["id"], context or 0, made_of)

    def _chosen(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        """The entry of the model that is named, or of the only one; another localspec's first is its own
        choice. What hangs on another one (an adapter) is none of its own.
        """
        wanted = self.upstream.upstream_model
        if wanted:
            return next((each for each in models if each["id"] == wanted), models[0])
        own = [each for each in models if not each.get("parent")]
        if len(own) == 1 or (own and of_owner(own[0].get("owned_by")).kind == "localspec"):
            return own[0]
        names = ", ".join(self.connection.clean(each["id"]) for each in models[:_SHOWN])
        raise InvalidRequest(
            f"The server of '{self.name}' has several models: {names}{'…' * (len(models) > _SHOWN)}. "
            f"Name one: localspec add {self.name} --upstream … --upstream-model NAME --replace",
            param="model",
        )

    def info(self) -> frames.Loaded:
        """As of a pair that is loaded; nobody is asked for it."""
        known = self.known
        model = known.model if known else self.upstream.upstream_model
        return frames.Loaded(
            self.name,
            f"{model or 'its model'} at {self.connection.place}",
            None,
            known.context if known else 0,
            0,
            None,
            "",
            "",
            backend=known.dialect.name if known else "upstream",
        )

    # ------------------------------------------------------------------ requests

    async def events(self, request: frames.Generate) -> AsyncGenerator[Event, None]:
        """Those of one answer. Closing this closes the connection.

        Raises:
            UpstreamUnreachable: nobody answers. UpstreamError, InvalidRequest: no answer, or no more of it.
        """
        came = False
        for last in (False, True):
            try:
                async with contextlib.aclosing(self._once(request)) as events:
                    async for event in events:
                        came = came or isinstance(event, frames.Delta)
                        if isinstance(event, frames.Done):
                            self.problem = ""  # here, for nobody reads on behind it
                        yield event
                return
            except UpstreamUnreachable as error:
                self.problem = error.message
                if came:  # a part of an answer was seen, so it cannot begin anew
                    raise UpstreamError(error.message) from None
                self.known = None  # who comes back may be another
                if last or self.upstream.fallback:
                    raise

    async def _once(self, request: frames.Generate) -> AsyncGenerator[Event, None]:
        known = await self.found()
        dialect, connection = known.dialect, self.connection
        infill = isinstance(request.prompt, frames.InfillPrompt) and not dialect.native
        if infill and not fills_in([known.model]):
            known = await self.found(weights=True)
        sent = asked(request, dialect, known.model, known.weights or "")
        if sent.endless and dialect.kind == "vllm":
            await self._filling(sent)
        began = time.monotonic()
        if sent.only_read and not dialect.native:
            # A prompt that is to be read ahead, which only those take that share our names.
            yield frames.Started(0, 0, 0, note=sent.note)
            yield frames.Done(0, "length", 0, 0, frames.Timings(), frames.Speculation())
            return
        counting = Counting(connection, dialect, self._looks) if self._counts(dialect) else None
        answered = self._answered(sent, known, began, counting)
        async with contextlib.aclosing(answered) as events:
            async for event in events:
                yield event

    async def _filling(self, sent: Asked) -> None:
        """A text that may fill vLLM's context: it takes no more than that, and 16 tokens for no limit."""
        known, prompt = await self.found(weights=True), sent.body["prompt"]
        if isinstance(prompt, str):
            body = {"prompt": prompt, "model": known.model}
            said = await self.connection.ask("/tokenize", body, _SMALL)
            prompt = _tokens(self.connection, said)["tokens"]
        if known.context > len(prompt):
            sent.body["max_tokens"], sent.endless = known.context - len(prompt), False

    def _counts(self, dialect: Dialect) -> bool:
        """Whether the server's counters may tell of one answer: where its answers do not, and we ask for
        no other beside it.
        """
        return bool(dialect.metrics) and not self._tells and self.counted.running <= 1

    async def _answered(
        self, sent: Asked, known: Known, began: float, counting: Counting | None
    ) -> AsyncGenerator[Event, None]:
        dialect, connection = known.dialect, self.connection
        async with connection.streamed(sent.path, sent.body, sent.most_bytes) as lines:
            yield frames.Started(0, 0, 0, note=sent.note)
            reply = Reply(connection, dialect, sent, began)
            async with contextlib.aclosing(objects(connection, lines)) as found:
                async for chunk in found:
                    for delta in reply.take(chunk):
                        lines.heard()
                        yield delta
                    if reply.over:
                        break
            if not reply.over:
                raise reply.cut()
            await _to_its_end(lines)
        self._tells = self._tells or reply.tells
        yield reply.done(
            await counting.end(reply.written) if counting and not reply.tells else None
        )

    async def close(self) -> None:
        """The end: no connection stays."""
        await asyncio.gather(*self._looks)
        await self.connection.close()

    async def ask(self, request: Any) -> dict[str, Any]:
        """The answer to a small request.

        Raises:
            InvalidRequest: the server has nothing for it. UpstreamError.
        """
        known = await self.found()
        dialect, ask = known.dialect, self.connection.ask
        match request:
            case frames.Tokenize() if dialect.native:
                body = {"content": request.text, "add_special": request.add_special}
                body |= {"parse_special": request.parse_special, "with_pieces": request.pieces}
                body["model"] = known.model  # another localspec has several
                return _tokens(self.connection, await ask("/tokenize", body, _SMALL))
            case frames.Tokenize() if dialect.kind == "vllm":
                if not request.parse_special:
                    raise refusal("parse_special", dialect, "it takes markers for tokens")
                if request.pieces:
                    raise refusal("with_pieces", dialect, "it shows them as its tokenizer has them")
                body = {"prompt": request.text, "add_special_tokens": request.add_special}
                body["model"] = known.model
                return _tokens(self.connection, await ask("/tokenize", body, _SMALL))
            case frames.Detokenize() if dialect.native or dialect.kind == "vllm":
                body = {"tokens": request.tokens, "model": known.model}
                said = await ask("/detokenize", body, _SMALL)
                key = "content" if dialect.native else "prompt"
                return {"content": self._text(said, key)}
            case frames.ApplyTemplate() if dialect.native:
                return {"prompt": await self._templated(request.prompt, known)}
            case frames.CountTokens(prompt=frames.ChatPrompt() as prompt) if dialect.native:
                text = await self._templated(prompt, known)
                body = {"content": text, "add_special": True, "parse_special": True}
                body["model"] = known.model
                tokens = _tokens(self.connection, await ask("/tokenize", body, _SMALL))
                return {"tokens": len(tokens["tokens"])}
            case frames.CountTokens(prompt=frames.ChatPrompt() as prompt) if dialect.kind == "vllm":
                said = await ask("/tokenize", _template(prompt, known), _SMALL)
                return {"tokens": len(_tokens(self.connection, said)["tokens"])}
        raise refusal(_FIELDS.get(type(request), "model"), dialect, "it offers nothing for it")

    async def _templated(self, prompt: frames.ChatPrompt, known: Known) -> str:
        body = _template(prompt, known)
        return self._text(await self.connection.ask("/apply-template", body, _SMALL), "prompt")

    def _text(self, said: Any, key: str) -> str:
        value = said.get(key) if isinstance(said, dict) else None
        if not isinstance(value, str):
            raise self.connection.nonsense(f"it has no '{key}'")
        return value


# Of a chat, what its template makes something of.
_OF_TEMPLATES = {
    "messages",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "model",
}


def _template(prompt: frames.ChatPrompt, known: Known) -> dict[str, Any]:
    """A chat as it is sent to have its template applied."""
    sent = asked(frames.Generate(0, prompt), known.dialect, known.model)
    body = {key: sent.body[key] for key in sent.body.keys() & _OF_TEMPLATES}
    return {**body, "tools": prompt.tools} if prompt.tools else body


_FIELDS: dict[type, str] = {
    frames.Tokenize: "content",
    frames.Detokenize: "tokens",
    frames.ApplyTemplate: "messages",
    frames.CountTokens: "messages",
}


async def _to_its_end(lines: Lines) -> None:
    """Let a stream that is over end, so that its connection can be used again; a short while at most."""
    with contextlib.suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(0.05):
            async for _ in lines:
                pass


def _tokens(connection: Connection, said: Any) -> dict[str, Any]:
    """Token ids, and where llama-server names them so their texts."""
    entries = said.get("tokens") if isinstance(said, dict) else None
    if not isinstance(entries, list) or len(entries) > frames.MOST_TOKENS:
        raise connection.nonsense("it has no list of 'tokens'")
    tokens, pieces = [], []
    for entry in entries:
        number, piece = entry, ""
        if isinstance(entry, dict):
            number, piece = entry.get("id"), entry.get("piece", "")
        if whole(number) is None:
            raise connection.nonsense("a token is no number")
        tokens.append(number)
        if isinstance(piece, list) and all(isinstance(b, int) and 0 <= b < 256 for b in piece):
            pieces.append(bytes(piece))
        else:
            pieces.append(str(piece).encode(errors="replace"))
    return {"tokens": tokens, "pieces": pieces}
