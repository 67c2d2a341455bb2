"""Handle llama-server's resumable streams: /v1/stream and /v1/streams/lookup.

A streamed chat with the header X-Conversation-Id goes on without its client, and can be read again from any
byte. A conversation has one stream, the newest.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.completion.answer import AnswerRun, prepared_stream
from localspec.daemon.completion.openai import ChatShape
from localspec.daemon.http.recordings import KEPT_S, Key, replay
from localspec.daemon.http.requests import json_response, read_body
from localspec.daemon.state import state_of
from localspec.errors import InvalidRequest, NotFound
from localspec.protocol.answers import StreamState
from localspec.protocol.requests import StreamLookup

CONVERSATION_HEADER = "x-conversation-id"
_CHAT = "chat"  # the kind of these recordings
_MODEL_SEPARATOR = "::"  # between a conversation's id and the name of a model
_OFFSET = re.compile(r"[0-9]{1,18}")


def recorded_name(request: Request) -> str:
    """Return the id in the header of a chat whose stream is to be recorded, "" if there is none.

    The bytes of a header are read as Latin-1. Clients that send more than ASCII send UTF-8, as in a URL.
    """
    name = request.headers.get(CONVERSATION_HEADER, "")
    with contextlib.suppress(UnicodeDecodeError):
        return name.encode("latin-1").decode()
    return name


def record(
    request: Request,
    conversation: str,
    prepare: Callable[[], Coroutine[Any, Any, AnswerRun]],
    *,
    ping_s: float,
) -> Response:
    """Begin the stream of a chat and return it. Its pings are recorded too, so that offsets agree."""

    async def prepare_run() -> AnswerRun:
        run = await prepare()
        recording.conversation = run.requests[0].conversation
        return run

    stream = prepared_stream(prepare_run, ChatShape, ping_s=ping_s)
    recording = state_of(request).recordings.start((_CHAT, conversation), stream)
    return replay(recording, begun=False)


async def resume(request: Request) -> Response:
    """Handle GET /v1/stream?conv_id=ID&from=BYTES."""
    key = _key(request)
    recording = state_of(request).recordings.get(key)
    if recording is None:
        kept = f"It is kept for {KEPT_S:.0f} s after its end."
        raise NotFound(f"Stream not found or expired: {key[1][:80]!r}. {kept}")
    offset = request.query_params.get("from") or "0"
    if not _OFFSET.fullmatch(offset):
        raise InvalidRequest("Invalid 'from' offset: it is a number of bytes.", param="from")
    if int(offset) < recording.first_byte:
        lost = f"bytes before {recording.first_byte} are not kept."
        raise InvalidRequest(f"Stream offset lost, please restart: {lost}", param="from")
    return replay(recording, int(offset))


async def stop(request: Request) -> Response:
    """Handle DELETE /v1/stream?conv_id=ID: end a stream and forget it, if there is one."""
    await state_of(request).recordings.remove(_key(request))
    return Response(status_code=204)


async def look_up(request: Request) -> Response:
    """Handle POST /v1/streams/lookup. Only streams that the client knows are listed."""
    body = await read_body(request, StreamLookup)
    states = [
        StreamState(name, one.is_done, one.total_bytes, one.started_at, one.completed_at)
        for requested in filter(None, body.conversation_ids)
        for name, one in state_of(request).recordings.find(_CHAT)
        if name == requested or name.startswith(requested + _MODEL_SEPARATOR)
    ]
    return json_response(states)


def _key(request: Request) -> Key:
    conversation = request.query_params.get("conv_id")
    if not conversation:
        raise InvalidRequest.at("conv_id", "is missing: the X-Conversation-Id of a chat.")
    return _CHAT, conversation
