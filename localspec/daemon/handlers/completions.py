"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from functools import partial
from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion import functions
from localspec.daemon.completion.answer import Answer, Run, waiting
from localspec.daemon.completion.openai import ChatShape, TextShape
from localspec.daemon.completion.reply import tools
from localspec.daemon.completion.reply.seen import notation
from localspec.daemon.completion.request import (
    chat_frames,
    completion_frames,
    goes_on_in_its_language,
    uses_tools,
)
from localspec.daemon.history.turn import Turn, begin, figures
from localspec.daemon.http.requests import ignored, read, unless_gone
from localspec.daemon.state import State, state_of
from localspec.daemon.worker.supervisor import Supervisor
from localspec.protocol import frames
from localspec.protocol.calls import CallFormat
from localspec.protocol.frames import Generate, PairFiles
from localspec.protocol.requests import ChatRequest, CompletionRequest


async def chat(request: Request) -> Response:
    body = await read(request, ChatRequest)
    older = functions.as_tools(body)
    daemon = state_of(request)
    turn = await unless_gone(request.receive, begin(daemon.conversations, body, daemon.config.pair))
    pair, wanted, answer = await ready(request, body, turn)
    shape = ChatShape(
        answer,
        body.stream_options,
        note=daemon.supervisor.residents.note,
        news=partial(daemon.news, pair.name),
        conversation=turn.id if turn else None,
        not_kept=(lambda: turn.not_kept) if turn else str,
        ignored=ignored(request),
        functions=older,
    )
    during = turn.under_way() if turn else nullcontext()
    told = shape.progress if body.localspec and body.localspec.progress else None
    run = Run(daemon.supervisor, pair, wanted, shape, during, told, **waiting(body, shape))
    return await run.respond(request, body.stream)


async def ready(
    request: Request, body: ChatRequest, turn: Turn | None
) -> tuple[PairFiles, list[Generate], Answer]:
    """A chat, in whatever protocol it was asked for: who answers, what the engine is asked, and the
    answer that is to come. `turn`: where it is kept.

    Raises:
        InvalidRequest: as `tools.check` and `chat_frames`. As State.pair: the pair.
    """
    daemon = state_of(request)
    if body.tools or body.tool_choice:
        tools.check(body)
    pair, form = None, tools.TOLD
    if uses_tools(body):  # how a call is written is the model's own matter
        pair = await daemon.pair(body.model, request.receive)
        form = await call_format(daemon, pair)
    wanted, parser = chat_frames(body, form, turn.id if turn else None)
    if turn and turn.cut:
        goes_on_in_its_language(wanted, turn.cut.content)
    pair = pair or await daemon.pair(body.model, request.receive)
    ended = turn.keep if turn else figures(daemon.conversations, body, pair.name)
    return pair, wanted, Answer(pair.name, wanted, n=body.n or 1, parser=parser, ended=ended)


async def call_format(daemon: State, pair: PairFiles) -> CallFormat:
    """How the pair's model writes calls. Another server tells them apart itself, and is shown tools as
    tools; where it leaves one in the text, it is in the notation that most models have.
    """
    if pair.upstream is not None:
        return tools.HERMES
    template = (await daemon.supervisor.ready(pair)).chat_template
    return await asyncio.to_thread(notation, template)


async def complete(request: Request) -> Response:
    body = await read(request, CompletionRequest)
    daemon = state_of(request)
    wanted = completion_frames(body)
    # With a suffix it is an editor's.
    pair = await daemon.pair(body.model, request.receive, "fim" if body.suffix else "chat")
    ended = figures(daemon.conversations, body, pair.name)
    shape = TextShape(
        Answer(pair.name, wanted, n=body.n or 1, ended=ended),
        body.stream_options,
        note=daemon.supervisor.residents.note,
        news=partial(daemon.news, pair.name),
        ignored=ignored(request),
    )
    shape.tops, shape.prompt_tops = body.logprobs or 0, body.prompt_logprobs
    if body.echo:
        asked = [each.prompt for each in wanted[:: body.n or 1]]
        shape.echo = [await _text(daemon.supervisor, pair, each) for each in asked]
    run = Run(daemon.supervisor, pair, wanted, shape, **waiting(body, shape))
    return await run.respond(request, body.stream)


async def _text(supervisor: Supervisor, pair: PairFiles, prompt: frames.Prompt) -> str:
    """What a prompt says, token ids and all; of one with a suffix what comes before."""
    match prompt:
        case frames.TextPrompt():
            return prompt.text
        case frames.InfillPrompt():
            return prompt.prefix
        case frames.TokenPrompt():
            parts: list[str | int] = [*prompt.tokens]
        case frames.MixedPrompt():
            parts = prompt.parts
        case frames.ChatPrompt():
            parts = []
    text = ""
    for kind, found in groupby(parts, type):
        if kind is str:
            text += "".join(map(str, found))
        else:
            tokens = [each for each in found if isinstance(each, int)]
            reply = await supervisor.ask(pair, frames.Detokenize(0, tokens))
            text += reply.value["content"]
    return text
