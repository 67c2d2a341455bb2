"""Handle POST /v1/embeddings, /embedding and /v1/rerank.

Embeddings turn texts into vectors. Reranking scores how well documents answer a query.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.http.requests import (
    ignored_extension,
    json_response,
    read_body,
    while_connected,
)
from localspec.daemon.state import state_of
from localspec.daemon.worker.queue import DEFAULT_RETRY_AFTER_S
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
    EmbeddingRequest,
    InputObject,
    RerankRequest,
)


async def embed(request: Request) -> Response:
    """Handle POST /v1/embeddings in OpenAI's format."""
    body = await read_body(request, EmbeddingRequest)
    pair, result = await _compute_embeddings(request, body)
    as_floats = body.encoding_format == "float"

    def write(vector: bytes) -> list[float] | str:
        return decode_vector(vector) if as_floats else base64.b64encode(vector).decode()

    def encode() -> Response:
        vectors = enumerate(result["vectors"])
        data = [Embedding(write(vector), index) for index, vector in vectors]
        usage, extra = _usage(result), ignored_extension(request)
        return json_response(EmbeddingList(data, pair.name, usage, localspec=extra))

    return await asyncio.to_thread(encode)  # An answer can have millions of numbers.


async def native(request: Request) -> Response:
    """Handle POST /embedding in llama-server's format."""
    _, result = await _compute_embeddings(request, await read_body(request, EmbeddingRequest))

    def encode() -> Response:
        vectors = enumerate(result["vectors"])
        rows = [NativeEmbedding(index, [decode_vector(vector)]) for index, vector in vectors]
        for first in rows[:1]:
            first.localspec = ignored_extension(request)
        return json_response(rows)

    return await asyncio.to_thread(encode)


async def rerank(request: Request) -> Response:
    """Handle POST /v1/rerank in Jina's format, or in Text Embeddings Inference's if `texts` is sent."""
    body = await read_body(request, RerankRequest)
    documents = [
        document if isinstance(document, str) else document.text
        for document in (body.texts if body.documents is None else body.documents) or ()
    ]
    if not documents:
        raise InvalidRequest("'documents' must have at least one text.", param="documents")
    pair = await state_of(request).resolve_pair(body.model, request.receive, "rerank")
    frame = frames.Rerank(0, body.query, documents, body.truncate, body.max_tokens_per_doc or 0)
    result = await compute(request, pair, frame)
    scored = sorted(enumerate(result["scores"]), key=lambda entry: -entry[1])[: body.top_n]
    if body.documents is None:
        texts = [
            RankedText(index, score, documents[index] if body.return_text else None)
            for index, score in scored
        ]
        for first in texts[:1]:
            first.localspec = ignored_extension(request)
        return json_response(texts)
    results = [Ranked(index, score) for index, score in scored]
    for ranked in results if body.return_documents else ():
        ranked.document = {"text": documents[ranked.index]}
    return json_response(
        RankedList(results, pair.name, _usage(result), localspec=ignored_extension(request))
    )


async def _compute_embeddings(
    request: Request, body: EmbeddingRequest
) -> tuple[PairFiles, dict[str, Any]]:
    """Return the pair that computed the embeddings, and {"vectors", "tokens"}."""
    inputs = _inputs(body)
    pair = await state_of(request).resolve_pair(body.model, request.receive, "embed")
    truncate_tokens = body.truncate_prompt_tokens or 0
    frame = frames.Embed(
        0,
        inputs,
        truncate=body.truncate or truncate_tokens < 0,
        dimensions=body.dimensions or 0,
        normalize=body.embd_normalize,
        most=max(truncate_tokens, 0),
    )
    return pair, await compute(request, pair, frame)


async def compute(
    request: Request, pair: PairFiles, frame: frames.Embed | frames.Rerank
) -> dict[str, Any]:
    """Return the engine's result for a request of any protocol; a client that disconnects ends the work.

    Raises ClientGone if the client disconnected. Raises InvalidRequest if the model computes no such thing,
    or an input does not fit. Raises QueueFull if too many requests are waiting already.
    """
    daemon = state_of(request)
    # No more of these requests wait in the engine than answers may run and wait.
    limit = daemon.config.parallel + daemon.config.queue
    if daemon.n_embedding_requests >= limit:
        raise QueueFull(
            f"{limit} requests for embeddings are running or waiting already. Try again in a moment, or "
            "set a larger `queue` in config.toml.",
            retry_after=DEFAULT_RETRY_AFTER_S,
        )
    daemon.n_embedding_requests += 1
    try:
        reply = await while_connected(request.receive, daemon.pairs.ask(pair, frame))
    finally:
        daemon.n_embedding_requests -= 1
    return reply.value


def _inputs(body: EmbeddingRequest) -> list[EmbeddingInput]:
    payload = body.content if body.input is None else body.input
    if payload is None:
        raise InvalidRequest("'input' is missing: a text, or a list of texts.", param="input")
    if isinstance(payload, str):
        return [payload]
    if isinstance(payload, InputObject):
        return [_object_input(payload)]
    entries = [_object_input(part) if isinstance(part, InputObject) else part for part in payload]
    inputs = [entry for entry in entries if isinstance(entry, str | list)]
    parts = [entry for entry in entries if not isinstance(entry, list)]
    if len(parts) == len(entries) and len(inputs) < len(entries):
        return [parts]  # Texts and token ids in one flat list are the parts of a single input.
    if len(inputs) < len(entries):
        raise InvalidRequest(
            "'input' mixes token ids with whole inputs; put the ids into a list of their own.",
            param="input",
        )
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(
            f"'input' has {len(inputs)} inputs; one request may have {MAX_INPUTS}.", param="input"
        )
    return inputs


def _object_input(payload: InputObject) -> EmbeddingInput:
    """Return the one input that an object stands for.

    Raises InvalidRequest if the object has images or sound, or is empty.
    """
    if payload.multimodal_data:
        raise InvalidRequest(
            "'input.multimodal_data' is not supported: the models here read text only.",
            param="input.multimodal_data",
        )
    if payload.prompt_string is not None:
        return payload.prompt_string
    parts = [payload.content] if isinstance(payload.content, str) else payload.content
    if not parts:
        raise InvalidRequest("'input' has neither 'prompt_string' nor 'content'.", param="input")
    text = ""  # As in llama-server, parts are joined without a separator.
    for part in parts:
        if not isinstance(part, str) and (part.type != "text" or part.text is None):
            raise InvalidRequest(
                f"'input.content' may have parts of the type 'text' only, not '{part.type[:40]}'.",
                param="input.content",
            )
        text += part if isinstance(part, str) else part.text or ""
    return text


def decode_vector(vector: bytes) -> list[float]:
    """Return a vector, sent as little-endian 32-bit floats, as numbers."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _usage(result: dict[str, Any]) -> EmbeddingUsage:
    tokens = sum(result["tokens"])
    return EmbeddingUsage(tokens, tokens)


ROUTES = (
    ("POST", "/v1/embeddings", embed),
    ("POST", "/embedding", native),
    ("POST", "/v1/rerank", rerank),
)
PATH_ALIASES = {
    "/embeddings": "/embedding",
    "/rerank": "/v1/rerank",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
}
