"""Handle POST /tokenize, /detokenize, /apply-template and the counting of a chat's tokens.

All of them have llama-server's format. A request without a `model` uses the configured pair's vocabulary
and template.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.functions import as_tools, messages_as_tools
from localspec.daemon.completion.reply.tools import TOLD
from localspec.daemon.completion.request import template_prompt, uses_tools
from localspec.daemon.handlers.completions import call_format, ready
from localspec.daemon.http.requests import answer, ignored, read
from localspec.daemon.state import state_of
from localspec.protocol import frames
from localspec.protocol.requests import (
    ChatRequest,
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
)


async def tokenize(request: Request) -> Response:
    """Handle POST /tokenize."""
    body = await read(request, TokenizeRequest)
    daemon = state_of(request)
    reply = await daemon.supervisor.ask(
        await daemon.pair(body.model, request.receive),
        frames.Tokenize(0, body.content, body.add_special, body.parse_special, body.with_pieces),
    )
    tokens: list[int] = reply.value["tokens"]
    if not body.with_pieces:
        return answer({"tokens": tokens, **_ignored_extra(request)})
    pieces = [_decode_piece(piece) for piece in reply.value["pieces"]]
    entries = [{"id": token, "piece": piece} for token, piece in zip(tokens, pieces, strict=True)]
    return answer({"tokens": entries, **_ignored_extra(request)})


def _ignored_extra(request: Request) -> dict[str, Any]:
    """Return the answer's key `localspec` if fields of the request had no effect, else nothing."""
    names = ignored(request)
    return {"localspec": {"ignored": names}} if names else {}


def _decode_piece(piece: bytes) -> str | list[int]:
    """Return a token's bytes as text if they are valid UTF-8, else as a list of numbers."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    """Handle POST /detokenize."""
    body = await read(request, DetokenizeRequest)
    daemon = state_of(request)
    reply = await daemon.supervisor.ask(
        await daemon.pair(body.model, request.receive), frames.Detokenize(0, body.tokens)
    )
    return answer({"content": reply.value["content"], **_ignored_extra(request)})


async def apply_template(request: Request) -> Response:
    """Handle POST /apply-template."""
    body = await read(request, TemplateRequest)
    daemon = state_of(request)
    pair = await daemon.pair(body.model, request.receive)
    messages_as_tools(body)
    call_form = TOLD
    if uses_tools(body):
        call_form = await call_format(daemon, pair)
    prompt = template_prompt(body, call_form)
    reply = await daemon.supervisor.ask(pair, frames.ApplyTemplate(0, prompt))
    return answer({"prompt": reply.value["prompt"], **_ignored_extra(request)})


async def count(request: Request) -> Response:
    """Count the tokens of a chat, even of one that does not fit into the context."""
    body = await read(request, ChatRequest)
    as_tools(body)
    tokens = await prompt_tokens(request, body)
    return answer({"input_tokens": tokens, **_ignored_extra(request)})


async def prompt_tokens(request: Request, body: ChatRequest) -> int:
    """Return the number of tokens in the prompt of a chat of any protocol.

    Raises:
        InvalidRequest: see `ready`.
    """
    pair, requests, _ = await ready(request, body, None)
    frame = frames.CountTokens(0, requests[0].prompt)
    reply = await state_of(request).supervisor.ask(pair, frame)
    count: int = reply.value["tokens"]
    return count
