"""Check which requests a model can serve, before it is loaded in vain."""

from __future__ import annotations

from localspec.daemon.worker.process import Request
from localspec.errors import InvalidRequest
from localspec.protocol import frames


def check_purpose(pair: frames.PairFiles, request: Request) -> None:
    """Refuse a request that the model cannot serve.

    Raises:
        InvalidRequest: The message says what the model is for.
    """
    name, pooling = pair.name, pair.pooling
    reason = ""
    match request:
        case frames.Embed() | frames.Rerank() if pair.upstream:
            reason = f"'{name}' is served by another server, which only answers with text"
        case frames.Embed() if pooling is None:
            reason = f"'{name}' writes text and computes no embeddings; name an embedding model"
        case frames.Embed() if pooling == "rank":
            reason = f"'{name}' is a reranker and computes no embeddings: POST /v1/rerank"
        case frames.Rerank() if pooling is None:
            reason = f"'{name}' writes text and ranks no documents; name a reranker"
        case frames.Rerank() if pooling != "rank":
            reason = f"'{name}' computes embeddings and ranks no documents; name a reranker"
        case frames.Generate() | frames.ApplyTemplate() | frames.CountTokens() if pooling:
            kind, path = ("a reranker", "rerank") if pooling == "rank" else _EMBEDDING_MODEL
            reason = f"'{name}' is {kind} and writes no text: POST /v1/{path}"
    if reason:
        raise InvalidRequest(f"{reason}. To see what there is: localspec list", param="model")


_EMBEDDING_MODEL = "an embedding model", "embeddings"
