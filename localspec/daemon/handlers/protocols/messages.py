"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import Run
from localspec.daemon.completion.anthropic.answer import MessagesShape
from localspec.daemon.completion.anthropic.request import chat_request
from localspec.daemon.completion.reply import tools
from localspec.daemon.handlers.completions import ready
from localspec.daemon.handlers.tokens import prompt_tokens
from localspec.daemon.http.errors import messages_request
from localspec.daemon.http.requests import answer, read
from localspec.daemon.state import state_of
from localspec.protocol.clients.anthropic import CountTokensRequest, InputTokens, MessagesRequest


async def create(request: Request) -> Response:
    body = await read(request, MessagesRequest)
    asked, ignored = chat_request(body)
    tools.check(asked)
    pair, wanted, made = await ready(request, asked, None)
    daemon = state_of(request)
    shape = MessagesShape(
        made,
        ignored=ignored,
        note=daemon.supervisor.residents.note,
        news=partial(daemon.news, pair.name),
        hidden=body.thinking is not None and body.thinking.display == "omitted",
    )
    given = await Run(daemon.supervisor, pair, wanted, shape).respond(request, body.stream)
    given.headers["request-id"] = messages_request()
    return given


async def count_tokens(request: Request) -> Response:
    asked, _ = chat_request(await read(request, CountTokensRequest))
    tools.check(asked)
    return answer(InputTokens(await prompt_tokens(request, asked)))
