"""Handle POST /v1/chat/completions and /v1/completions."""

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
    """Handle POST /v1/chat/completions."""
    body = await read(request, ChatRequest)
    uses_functions = functions.as_tools(body)
    daemon = state_of(request)
    turn = await unless_gone(request.receive, begin(daemon.conversations, body, daemon.config.pair))
    pair, requests, answer = await ready(request, body, turn)
    shape = ChatShape(
        answer,
        body.stream_options,
        note=daemon.supervisor.residents.note,
        news=partial(daemon.news, pair.name),
        conversation=turn.id if turn else None,
        not_kept=(lambda: turn.not_kept) if turn else str,
        ignored=ignored(request),
        functions=uses_functions,
    )
    context = turn.under_way() if turn else nullcontext()
    progress = shape.progress if body.localspec and body.localspec.progress else None
    run = Run(daemon.supervisor, pair, requests, shape, context, progress, **waiting(body, shape))
    return await run.respond(request, body.stream)


async def ready(
    request: Request, body: ChatRequest, turn: Turn | None
) -> tuple[PairFiles, list[Generate], Answer]:
    """Prepare a chat of any protocol: return its pair, one engine request per choice, and the empty answer.

    `turn` says where the chat is stored.

    Raises:
        InvalidRequest: see `tools.check` and `chat_frames`.
        LocalspecError: see `State.pair`.
    """
    daemon = state_of(request)
    if body.tools or body.tool_choice:
        tools.check(body)
    pair, call_form = None, tools.TOLD
    if uses_tools(body):
        # Each model has its own notation of calls, so the template is needed first.
        pair = await daemon.pair(body.model, request.receive)
        call_form = await call_format(daemon, pair)
    requests, parser = chat_frames(body, call_form, turn.id if turn else None)
    if turn and turn.cut:
        goes_on_in_its_language(requests, turn.cut.content)
    pair = pair or await daemon.pair(body.model, request.receive)
    on_end = turn.keep if turn else figures(daemon.conversations, body, pair.name)
    return pair, requests, Answer(pair.name, requests, n=body.n or 1, parser=parser, ended=on_end)


async def call_format(daemon: State, pair: PairFiles) -> CallFormat:
    """Return the notation in which the pair's model writes calls.

    Another server separates calls from text itself and gets the tools as tools. If it leaves a call in the
    text, that is in the notation that most models have.
    """
    if pair.upstream is not None:
        return tools.HERMES
    template = (await daemon.supervisor.ready(pair)).chat_template
    return await asyncio.to_thread(notation, template)


async def complete(request: Request) -> Response:
    """Handle POST /v1/completions."""
    body = await read(request, CompletionRequest)
    daemon = state_of(request)
    requests = completion_frames(body)
    # A suffix means that an editor asks, so its pair for fill-in-the-middle answers.
    pair = await daemon.pair(body.model, request.receive, "fim" if body.suffix else "chat")
    on_end = figures(daemon.conversations, body, pair.name)
    shape = TextShape(
        Answer(pair.name, requests, n=body.n or 1, ended=on_end),
        body.stream_options,
        note=daemon.supervisor.residents.note,
        news=partial(daemon.news, pair.name),
        ignored=ignored(request),
    )
    shape.tops, shape.prompt_tops = body.logprobs or 0, body.prompt_logprobs
    if body.echo:
        prompts = [generate.prompt for generate in requests[:: body.n or 1]]
        shape.echo = [await _prompt_text(daemon.supervisor, pair, prompt) for prompt in prompts]
    run = Run(daemon.supervisor, pair, requests, shape, **waiting(body, shape))
    return await run.respond(request, body.stream)


async def _prompt_text(supervisor: Supervisor, pair: PairFiles, prompt: frames.Prompt) -> str:
    """Return the text of a prompt, with token ids decoded; of a prompt with a suffix the part before it."""
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
    for part_type, run in groupby(parts, type):
        if part_type is str:
            text += "".join(map(str, run))
        else:
            tokens = [part for part in run if isinstance(part, int)]
            reply = await supervisor.ask(pair, frames.Detokenize(0, tokens))
            text += reply.value["content"]
    return text
