"""Handle /localspec/conversations (list, search, show, remove, undo) and /localspec/statistics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.http.requests import (
    json_response,
    query_flag,
    query_number,
    while_connected,
)
from localspec.daemon.state import state_of
from localspec.protocol.conversations import ConversationList, Forgotten
from localspec.protocol.frames import PRIVATE

_MAX_NUMBER = 10_000  # of conversations in a list, and of days in statistics


async def list_conversations(request: Request) -> Response:
    """List the newest conversations; ?limit=N of them, ?search=TEXT those that contain that text."""
    limit = query_number(request, "limit", 50, _MAX_NUMBER)
    search = request.query_params.get("search", "")
    store = state_of(request).conversations
    entries = await store.run(lambda conversations: conversations.list_entries(limit, search))
    return json_response(ConversationList(entries))


async def statistics(request: Request) -> Response:
    """Return sums over stored answers; ?days=N are the days that end today, ?pair=NAME is one pair."""
    days = query_number(request, "days", 30, _MAX_NUMBER)
    pair = request.query_params.get("pair", "")
    daemon = state_of(request)
    sums = await daemon.conversations.run(lambda store: store.statistics(days, pair))
    sums.read_ahead = daemon.pairs.clients.report()
    return json_response(sums)


async def show(request: Request) -> Response:
    """Return a conversation; with ?wait=true only after its answers under way have ended."""
    name = request.path_params["name"]
    store = state_of(request).conversations
    if query_flag(request, "wait"):
        await while_connected(request.receive, store.wait_until_settled(name))
    return json_response(await store.run(lambda conversations: conversations.get(name)))


async def remove(request: Request) -> Response:
    name = request.path_params["name"]
    daemon = state_of(request)
    if name == PRIVATE:  # of which engines hold something, and nothing else does
        await daemon.pairs.forget(PRIVATE)
        return json_response(Forgotten(0, PRIVATE))
    removed = await daemon.conversations.run(lambda conversations: conversations.remove(name))
    await daemon.forget_states(removed)
    return json_response(Forgotten(1, removed))


async def remove_all(request: Request) -> Response:
    daemon = state_of(request)
    count = await daemon.conversations.run(lambda conversations: conversations.remove_all())
    await daemon.forget_states(None)
    return json_response(Forgotten(count))


async def undo(request: Request) -> Response:
    """Remove the last question of a conversation and everything after it."""
    name = request.path_params["name"]
    daemon = state_of(request)
    store = daemon.conversations
    await while_connected(request.receive, store.wait_until_settled(name))
    undone = await store.run(lambda conversations: conversations.undo(name))
    await daemon.forget_states(undone.id)
    return json_response(undone)
