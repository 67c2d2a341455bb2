"""Handle completions and the tokens they consist of.

POST /v1/chat/completions with its /control, /v1/completions, and llama-server's /completion, /infill,
/tokenize, /detokenize and /apply-template.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.chat import tools
from localspec.chat.families.hermes import HERMES
from localspec.chat.tools import convert_custom_tools, convert_function_messages, convert_functions
from localspec.daemon.completion import llama_server
from localspec.daemon.completion.answer import (
    AnswerNotes,
    AnswerRun,
    PendingAnswer,
    Shape,
    respond,
)
from localspec.daemon.completion.files import expand_files, has_files
from localspec.daemon.completion.llama_server import (
    EditorPosition,
    LlamaServerShape,
    editor_position,
)
from localspec.daemon.completion.openai import ChatShape, TextShape
from localspec.daemon.completion.request import (
    begin_question,
    chat_frames,
    completion_frames,
    continue_constraint,
    is_on_battery,
    template_prompt,
    uses_tools,
)
from localspec.daemon.handlers import streams
from localspec.daemon.history.turn import ConversationTurn, begin_turn, figures_callback
from localspec.daemon.http.requests import (
    API_HEADER,
    detach,
    from_our_client,
    ignored_fields,
    json_response,
    read_body,
    while_connected,
)
from localspec.daemon.pairs.names import Role
from localspec.daemon.state import DaemonState, state_of
from localspec.daemon.worker.clients import name_client
from localspec.daemon.worker.table import PairTable
from localspec.errors import Conflict, InvalidRequest, ModelNotFound
from localspec.protocol import frames
from localspec.protocol.answers import ControlResult
from localspec.protocol.calls import EXPLAINED, CallFormat
from localspec.protocol.frames import Generate, PairFiles
from localspec.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    ControlRequest,
    DetokenizeRequest,
    GenerationRequest,
    InfillRequest,
    LocalspecOptions,
    NativeCompletionRequest,
    NativeRequest,
    TemplateRequest,
    TokenizeRequest,
)

MEDIA_MARK = "<__media__>"  # what stands for a picture in a prompt's text, as in llama-server


async def tokenize(request: Request) -> Response:
    """Handle POST /tokenize."""
    body = await read_body(request, TokenizeRequest)
    daemon = state_of(request)
    reply = await daemon.pairs.ask(
        await daemon.resolve_pair(body.model, request.receive),
        frames.Tokenize(0, body.content, body.add_special, body.parse_special, body.with_pieces),
    )
    tokens: list[int] = reply.value["tokens"]
    if not body.with_pieces:
        return json_response({"tokens": tokens, **_ignored_extra(request)})
    # A text of many rare characters has a hundred thousand tokens, but few different ones.
    entries = {}
    for token, piece in dict(zip(tokens, reply.value["pieces"], strict=True)).items():
        try:
            entries[token] = {"id": token, "piece": piece.decode()}
        except UnicodeDecodeError:
            entries[token] = {"id": token, "piece": list(piece)}
    answer = {"tokens": [entries[token] for token in tokens], **_ignored_extra(request)}
    return json_response(answer)


def _ignored_extra(request: Request) -> dict[str, Any]:
    """Return the answer's key `localspec` if fields of the request had no effect, else nothing."""
    names = ignored_fields(request)
    return {"localspec": {"ignored": names}} if names else {}


async def detokenize(request: Request) -> Response:
    """Handle POST /detokenize."""
    body = await read_body(request, DetokenizeRequest)
    daemon = state_of(request)
    reply = await daemon.pairs.ask(
        await daemon.resolve_pair(body.model, request.receive), frames.Detokenize(0, body.tokens)
    )
    return json_response({"content": reply.value["content"], **_ignored_extra(request)})


async def apply_template(request: Request) -> Response:
    """Handle POST /apply-template."""
    body = await read_body(request, TemplateRequest)
    daemon = state_of(request)
    pair = await daemon.resolve_pair(body.model, request.receive)
    convert_custom_tools(body)
    convert_function_messages(body)
    if await has_files(body.messages):
        await expand_chat(request, body, pair)
    call_form = await call_format(daemon, pair) if uses_tools(body) else EXPLAINED
    prompt = await asyncio.to_thread(template_prompt, body, call_form)
    reply = await daemon.pairs.ask(pair, frames.ApplyTemplate(0, prompt))
    text: str = reply.value["prompt"]
    if prompt.pictures:
        text = text.replace(prompt.picture_mark, MEDIA_MARK)
    return json_response({"prompt": text, **_ignored_extra(request)})


async def count(request: Request) -> Response:
    """Count the tokens of a chat, even of one that does not fit into the context."""
    body = await read_body(request, ChatRequest)
    convert_custom_tools(body)
    convert_functions(body)
    tokens = await prompt_tokens(request, body)
    return json_response({"input_tokens": tokens, **_ignored_extra(request)})


async def prompt_tokens(request: Request, body: ChatRequest) -> int:
    """Return the number of tokens in the prompt of a chat of any protocol."""
    pair, requests, _ = await prepare_chat(request, body, None)
    frame = frames.CountTokens(0, requests[0].prompt)
    tokens: int = (await state_of(request).pairs.ask(pair, frame)).value["tokens"]
    return tokens


async def native_completion(request: Request) -> Response:
    """Handle POST /completion."""
    body = await read_body(request, NativeCompletionRequest)
    requests = llama_server.completion_requests(body)
    return await _respond(request, body, LlamaServerShape, _native_run(request, body, requests))


async def infill(request: Request) -> Response:
    """Handle POST /infill."""
    arrival = state_of(request).editors.next_arrival()
    body = await read_body(request, InfillRequest)
    requests = llama_server.infill_requests(body)
    # A warm-up request (n_predict 0) must not cancel the editor's completion under way.
    is_warm_up = body.n_predict == 0 or requests[0].priority == "ahead"
    editor = None if is_warm_up else editor_position(request, body, arrival)
    run = _native_run(request, body, requests, "fim", editor)
    return await _respond(request, body, LlamaServerShape, run)


def _respond(
    request: Request,
    body: GenerationRequest,
    shape: type[Shape],
    preparation: Coroutine[Any, Any, AnswerRun],
) -> Awaitable[Response]:
    return respond(request, preparation, shape, stream=body.stream, ping_s=body.sse_ping_interval)


async def _native_run(
    request: Request,
    body: NativeRequest,
    requests: list[Generate],
    role: Role = "chat",
    editor: EditorPosition | None = None,
) -> AnswerRun:
    daemon = state_of(request)
    try:
        pair = await daemon.resolve_pair(body.model, request.receive, role)
    except ModelNotFound:
        # llama-server serves one model and ignores the name in a request, so plug-ins send any name.
        if API_HEADER in request.headers:
            raise
        pair = await daemon.resolve_pair("", request.receive, role)
    answer = _text_answer(request, body, pair, requests)
    answer.notes.news = None
    if requests[0].priority == "ahead":
        _check_idle(daemon, pair)
        answer.choices[0].on_end = None
    shape = LlamaServerShape(answer, body, partial(daemon.pairs.info, pair.name))
    context = nullcontext() if editor is None else daemon.editors.completing(editor)
    reading = shape.reading if body.return_progress else None
    return AnswerRun(daemon.pairs, pair, requests, shape, context, reading=reading)


async def chat(request: Request) -> Response:
    """Handle POST /v1/chat/completions."""
    body = await read_body(request, ChatRequest)
    if body.stream and (conversation := streams.recorded_name(request)):
        detached, ping_s = detach(request), body.sse_ping_interval
        return streams.record(
            request, conversation, lambda: _chat_run(detached, body), ping_s=ping_s
        )
    return await _respond(request, body, ChatShape, _chat_run(request, body))


async def _chat_run(request: Request, body: ChatRequest) -> AnswerRun:
    custom = tools.convert_custom_tools(body, ignored_fields(request))
    uses_functions = tools.convert_functions(body)
    daemon = state_of(request)
    turn = await while_connected(
        request.receive, begin_turn(daemon.conversations, body, daemon.config.pair)
    )
    pair, requests, answer = await prepare_chat(request, body, turn)
    shape = ChatShape(
        answer,
        body.stream_options,
        conversation=turn.id if turn else None,
        functions=uses_functions,
        custom=custom,
    )
    stored: AbstractAsyncContextManager[object] = nullcontext()
    if turn and requests[0].priority != "ahead":
        stored = turn.under_way(answer.choices[0])
    context = _controllable(daemon, shape.id, (pair, requests), stored)
    progress = shape.progress if body.localspec and body.localspec.progress else None
    reading = shape.reading if body.return_progress else None
    return AnswerRun(daemon.pairs, pair, requests, shape, context, progress, reading)


@asynccontextmanager
async def _controllable(
    daemon: DaemonState,
    answer: str,
    running: tuple[PairFiles, Sequence[Generate]],
    context: AbstractAsyncContextManager[object],
) -> AsyncIterator[None]:
    """Enter another context, and let /v1/chat/completions/control find the answer meanwhile."""
    daemon.running_chats[answer] = running
    try:
        async with context:
            yield
    finally:
        del daemon.running_chats[answer]


async def control(request: Request) -> Response:
    """Handle POST /v1/chat/completions/control."""
    body, daemon = await read_body(request, ControlRequest), state_of(request)
    message = f"No chat completion with the id {body.id!r} is running."
    if running := daemon.running_chats.get(body.id):
        message = "It is not in its thoughts."
        if await daemon.pairs.end_thoughts(*running):
            return json_response(ControlResult(True))
    return json_response(ControlResult(False, message))


async def prepare_chat(
    request: Request,
    body: ChatRequest,
    turn: ConversationTurn | None,
    pair: PairFiles | None = None,
    note: str = "",
) -> tuple[PairFiles, list[Generate], PendingAnswer]:
    """Prepare a chat of any protocol: return its pair, one engine request per choice, and the empty answer.

    `turn` says where the chat is stored. `pair` is what `body.model` means, if that is known already. `note`
    is what `expand_chat` returned, if the files are expanded already.

    Raises:
        InvalidRequest: see `check_tools` and `chat_frames`.
        LocalspecError: see `DaemonState.resolve_pair`.
    """
    daemon = state_of(request)
    tools.check_tools(body)
    call_form = EXPLAINED
    if await has_files(body.messages):
        pair = pair or await daemon.resolve_pair(body.model, request.receive)
        note = await expand_chat(request, body, pair)
    if uses_tools(body):
        # Each model has its own notation of calls, so the template is needed first.
        pair = pair or await daemon.resolve_pair(body.model, request.receive)
        call_form = await call_format(daemon, pair)
    # In a thread, because the pictures in the messages are decoded.
    requests = await asyncio.to_thread(chat_frames, body, call_form, turn.id if turn else None)
    agent = request.headers.get("user-agent", "")
    requests[0].client = name_client(agent, request.url.path, is_ours=from_our_client())
    pair = pair or await daemon.resolve_pair(body.model, request.receive)
    options = body.localspec or LocalspecOptions()
    if options.agent and request.client:
        requests[0] = daemon.agents.begin(request.client, options.agent, pair.name)
    elif options.ahead:
        if turn is None or not turn.continues:
            raise InvalidRequest.at("localspec.ahead", "needs a conversation that exists.")
        requests[0] = begin_question(requests[0])
    else:
        daemon.agents.note(request.client, pair.name, requests[0])
    if is_ahead := requests[0].priority == "ahead":
        _check_idle(daemon, pair)
    if turn and turn.cut_answer:
        continue_constraint(requests, turn.cut_answer.content)
    on_end = turn.store_answer if turn else figures_callback(daemon.conversations, body, pair.name)
    on_end = None if is_ahead else on_end
    notes = answer_notes(request, pair, turn, note)
    answer = PendingAnswer(pair.name, requests, n=body.n or 1, ended=on_end, notes=notes)
    return pair, requests, answer


def _check_idle(daemon: DaemonState, pair: PairFiles) -> None:
    """Raise Conflict if a pair reads nothing ahead now, because it is not loaded or somebody waits."""
    if daemon.pairs.info(pair.name) is None or daemon.pairs.busy or is_on_battery():
        raise Conflict("It is read ahead in idle time only.")


def answer_notes(
    request: Request, pair: PairFiles, turn: ConversationTurn | None = None, note: str = ""
) -> AnswerNotes:
    """Return what is said beside an answer of `pair`. `turn` stores it, and `note` is on the request."""
    daemon = state_of(request)
    not_kept = (lambda: turn.store_error) if turn else str
    news, ignored = partial(daemon.take_notice, pair.name), partial(ignored_fields, request)
    return AnswerNotes(daemon.pairs.safe_mode.note, news, not_kept, ignored, note)


async def expand_chat(
    request: Request, body: ChatRequest | TemplateRequest, pair: PairFiles
) -> str:
    """Replace the files in the messages by what the pair reads of them, and return a note, or ""."""
    daemon = state_of(request)
    loaded = await daemon.pairs.ready(pair)
    expansion = expand_files(
        body.messages, daemon.converter, pair=pair.name, reads_pictures=loaded.reads_pictures
    )
    return await while_connected(request.receive, expansion)


async def call_format(daemon: DaemonState, pair: PairFiles) -> CallFormat:
    """Return the notation in which the pair's model writes calls.

    Another server separates calls from text itself and gets the tools as tools. If it leaves a call in the
    text, that is in the notation that most models have.
    """
    if pair.upstream is not None:
        return HERMES
    return (await daemon.pairs.ready(pair)).dialect.calls


async def complete(request: Request) -> Response:
    """Handle POST /v1/completions."""
    body = await read_body(request, CompletionRequest)
    return await _respond(request, body, TextShape, _text_run(request, body))


async def _text_run(request: Request, body: CompletionRequest) -> AnswerRun:
    daemon = state_of(request)
    requests = completion_frames(body)
    # A suffix means that an editor asks, so its pair for fill-in-the-middle answers.
    pair = await daemon.resolve_pair(body.model, request.receive, "fim" if body.suffix else "chat")
    shape = TextShape(_text_answer(request, body, pair, requests), body.stream_options)
    shape.tops, shape.prompt_tops = body.logprobs or 0, body.prompt_logprobs
    if body.echo:
        shape.echo = [
            await _prompt_text(daemon.pairs, pair, generate.prompt)
            for generate in requests[:: body.n or 1]
        ]
    reading = shape.reading if body.return_progress else None
    return AnswerRun(daemon.pairs, pair, requests, shape, reading=reading)


def _text_answer(
    request: Request, body: GenerationRequest, pair: PairFiles, requests: list[Generate]
) -> PendingAnswer:
    """Return the empty answer to a request that is not a chat."""
    on_end = figures_callback(state_of(request).conversations, body, pair.name)
    notes = answer_notes(request, pair)
    return PendingAnswer(pair.name, requests, n=body.n or 1, ended=on_end, notes=notes)


async def _prompt_text(pairs: PairTable, pair: PairFiles, prompt: frames.Prompt) -> str:
    """Return the text of a prompt, with token ids decoded; of a prompt with a suffix the part before it."""
    text, parts = "", list[str | int]()
    match prompt:
        case frames.TextPrompt():
            parts = [prompt.text]
        case frames.InfillPrompt():
            parts = [prompt.prefix]
        case frames.TokenPrompt():
            parts = [*prompt.tokens]
        case frames.MixedPrompt():
            parts = prompt.parts
    for is_text, run in groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            text += "".join(map(str, run))
        else:
            reply = await pairs.ask(pair, frames.Detokenize(0, [*map(int, run)]))
            text += reply.value["content"]
    return text
