"""POST /v1/embeddings, /embedding and /v1/rerank: texts to numbers, and how well documents answer a query."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.http.requests import answer, read, unheeded, unless_gone
from localspec.daemon.state import State, state_of
from localspec.daemon.worker.queue.admission import RETRY_AFTER
from localspec.errors import InvalidRequest, QueueFull
from localspec.protocol import frames
from localspec.protocol.answers import (
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    NativeEmbedding,
    Ranked,
    RankedList,
    RankedText,
)
from localspec.protocol.frames import EmbeddingInput, PairFiles
from localspec.protocol.requests import (
    MAX_INPUTS,
    ContentPart,
    EmbeddingRequest,
    InputObject,
    RerankRequest,
)


async def embed(request: Request) -> Response:
    """OpenAI's answer."""
    body = await read(request, EmbeddingRequest)
    pair, found = await _embedded(request, body)
    plain = body.encoding_format == "float"

    def shaped() -> Response:
        data = [
            Embedding(numbers(each) if plain else base64.b64encode(each).decode(), at)
            for at, each in enumerate(found["vectors"])
        ]
        told = unheeded(request)
        return answer(EmbeddingList(data, pair.name, _usage(found), localspec=told))

    return await asyncio.to_thread(shaped)  # millions of numbers take their time


async def native(request: Request) -> Response:
    """llama-server's answer."""
    _, found = await _embedded(request, await read(request, EmbeddingRequest))

    def shaped() -> Response:
        vectors = enumerate(found["vectors"])
        rows = [NativeEmbedding(at, [numbers(each)]) for at, each in vectors]
        for first in rows[:1]:
            first.localspec = unheeded(request)
        return answer(rows)

    return await asyncio.to_thread(shaped)


async def rerank(request: Request) -> Response:
    """Jina's answer, or that of Text Embeddings Inference where it is asked in its words."""
    body = await read(request, RerankRequest)
    documents = [
        each if isinstance(each, str) else each.text
        for each in (body.texts if body.documents is None else body.documents) or ()
    ]
    if not documents:
        raise InvalidRequest("'documents' must have at least one text.", param="documents")
    pair = await state_of(request).pair(body.model, request.receive, "rerank")
    asked = frames.Rerank(0, body.query, documents, body.truncate, body.max_tokens_per_doc or 0)
    found = await calculated(request, pair, asked)
    scored = sorted(enumerate(found["scores"]), key=lambda each: -each[1])[: body.top_n]
    if body.documents is None:
        told = body.return_text
        texts = [RankedText(at, s, documents[at] if told else None) for at, s in scored]
        for first in texts[:1]:
            first.localspec = unheeded(request)
        return answer(texts)
    results = [Ranked(at, score) for at, score in scored]
    for each in results if body.return_documents else ():
        each.document = {"text": documents[each.index]}
    return answer(RankedList(results, pair.name, _usage(found), localspec=unheeded(request)))


async def _embedded(request: Request, body: EmbeddingRequest) -> tuple[PairFiles, dict[str, Any]]:
    """Who has done it, and {"vectors", "tokens"}."""
    wanted = _inputs(body)
    pair = await state_of(request).pair(body.model, request.receive, "embed")
    most = body.truncate_prompt_tokens or 0
    asked = frames.Embed(
        0,
        wanted,
        truncate=body.truncate or most < 0,
        dimensions=body.dimensions or 0,
        normalize=body.embd_normalize,
        most=max(most, 0),
    )
    return pair, await calculated(request, pair, asked)


async def calculated(
    request: Request, pair: PairFiles, asked: frames.Embed | frames.Rerank
) -> dict[str, Any]:
    """The engine's answer, in whatever protocol it was asked for. A client that leaves ends the work.

    Raises:
        ClientGone; InvalidRequest: the model is none for it, an input does not fit; QueueFull: there are
            too many requests already.
    """
    daemon = state_of(request)
    with _place(daemon):
        reply = await unless_gone(request.receive, daemon.supervisor.ask(pair, asked))
    return reply.value


@contextmanager
def _place(daemon: State) -> Iterator[None]:
    """Requests wait in the engine, where they take turns, and no more of them than may wait for answers."""
    most = daemon.config.parallel + daemon.config.queue
    if daemon.embedding >= most:
        raise QueueFull(
            f"{most} requests for embeddings are running or waiting already. Try again in a moment, or "
            "set a larger `queue` in config.toml.",
            retry_after=RETRY_AFTER,
        )
    daemon.embedding += 1
    try:
        yield
    finally:
        daemon.embedding -= 1


def _inputs(body: EmbeddingRequest) -> list[EmbeddingInput]:
    sent = body.content if body.input is None else body.input
    if sent is None:
        raise InvalidRequest("'input' is missing: a text, or a list of texts.", param="input")
    if isinstance(sent, str):
        return [sent]
    if isinstance(sent, InputObject):
        return [_text_of(sent)]
    given = [_text_of(each) if isinstance(each, InputObject) else each for each in sent]
    whole = [each for each in given if isinstance(each, str | list)]
    parts = [each for each in given if not isinstance(each, list)]
    if len(parts) == len(given) and len(whole) < len(
        given
    ):  # ids are among them: they are one input
        return [parts]
    if len(whole) < len(given):
        raise InvalidRequest(
            "'input' mixes token ids with whole inputs; put the ids into a list of their own.",
            param="input",
        )
    if len(whole) > MAX_INPUTS:
        raise InvalidRequest(
            f"'input' has {len(whole)} inputs; one request may have {MAX_INPUTS}.", param="input"
        )
    return whole


def _text_of(sent: InputObject) -> EmbeddingInput:
    """Return the one input that an object stands for.

    Raises:
        InvalidRequest: it has images or sound, or nothing.
    """
    if sent.multimodal_data:
        raise InvalidRequest(
            "'input.multimodal_data' is not supported: the models here read text only.",
            param="input.multimodal_data",
        )
    if sent.prompt_string is not None:
        return sent.prompt_string
    parts = [sent.content] if isinstance(sent.content, str) else sent.content
    if not parts:
        raise InvalidRequest("'input' has neither 'prompt_string' nor 'content'.", param="input")
    texts = [part if isinstance(part, str) else _part(part) for part in parts]
    return "".join(texts)  # as in llama-server, nothing comes between two parts


def _part(part: ContentPart) -> str:
    if part.type != "text" or part.text is None:
        raise InvalidRequest(
            f"'input.content' may have parts of the type 'text' only, not '{part.type[:40]}'.",
            param="input.content",
        )
    return part.text


def numbers(vector: bytes) -> list[float]:
    found = array("f", vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def _usage(found: dict[str, Any]) -> EmbeddingUsage:
    tokens = sum(found["tokens"])
    return EmbeddingUsage(tokens, tokens)
