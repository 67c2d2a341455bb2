"""POST /tokenize, /detokenize, /apply-template and the counting of a chat's tokens, as llama-server has
them. Without a `model` it is the configured pair's vocabulary and template."""

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
    body = await read(request, TokenizeRequest)
    daemon = state_of(request)
    reply = await daemon.supervisor.ask(
        await daemon.pair(body.model, request.receive),
        frames.Tokenize(0, body.content, body.add_special, body.parse_special, body.with_pieces),
    )
    tokens: list[int] = reply.value["tokens"]
    if not body.with_pieces:
        return answer({"tokens": tokens, **_unheeded(request)})
    pieces = [_piece(piece) for piece in reply.value["pieces"]]
    pairs = zip(tokens, pieces, strict=True)
    shown = [{"id": token, "piece": piece} for token, piece in pairs]
    return answer({"tokens": shown, **_unheeded(request)})


def _unheeded(request: Request) -> dict[str, Any]:
    """Return `localspec` of the answer, where something of the request changed nothing."""
    found = ignored(request)
    return {"localspec": {"ignored": found}} if found else {}


def _piece(piece: bytes) -> str | list[int]:
    """Text where it is text, else the bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    body = await read(request, DetokenizeRequest)
    daemon = state_of(request)
    reply = await daemon.supervisor.ask(
        await daemon.pair(body.model, request.receive), frames.Detokenize(0, body.tokens)
    )
    return answer({"content": reply.value["content"], **_unheeded(request)})


async def apply_template(request: Request) -> Response:
    body = await read(request, TemplateRequest)
    daemon = state_of(request)
    pair = await daemon.pair(body.model, request.receive)
    messages_as_tools(body)
    form = TOLD
    if uses_tools(body):
        form = await call_format(daemon, pair)
    prompt = template_prompt(body, form)
    reply = await daemon.supervisor.ask(pair, frames.ApplyTemplate(0, prompt))
    return answer({"prompt": reply.value["prompt"], **_unheeded(request)})


async def count(request: Request) -> Response:
    """How many tokens a chat would be, also one that does not fit."""
    body = await read(request, ChatRequest)
    as_tools(body)
    tokens = await prompt_tokens(request, body)
    return answer({"input_tokens": tokens, **_unheeded(request)})


async def prompt_tokens(request: Request, body: ChatRequest) -> int:
    """The length of a chat's prompt, in whatever protocol it was asked for.

    Raises:
        InvalidRequest: as `ready`.
    """
    pair, wanted, _ = await ready(request, body, None)
    counted = frames.CountTokens(0, wanted[0].prompt)
    reply = await state_of(request).supervisor.ask(pair, counted)
    found: int = reply.value["tokens"]
    return found
