"""/localspec/conversations: list, search, show, forget, take back; /localspec/statistics adds them up."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.http.requests import answer, unless_gone
from localspec.daemon.state import state_of
from localspec.errors import InvalidRequest
from localspec.protocol.conversations import ConversationList, Forgotten

_MOST = 10_000


async def listed(request: Request) -> Response:
    """?limit=N of the newest, ?search=TEXT those with that text."""
    limit = _number(request, "limit", 50)
    search = request.query_params.get("search", "")
    store = state_of(request).conversations
    return answer(ConversationList(await store.run(lambda each: each.listing(limit, search))))


async def statistics(request: Request) -> Response:
    """?days=N that end today, ?pair=NAME of that pair alone."""
    days = _number(request, "days", 30)
    pair = request.query_params.get("pair", "")
    store = state_of(request).conversations
    return answer(await store.run(lambda each: each.statistics(days, pair)))


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    short = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST))
    if not (short and 1 <= int(text) <= _MOST):
        raise InvalidRequest(f"'{name}' must be a whole number from 1 to {_MOST}.", param=name)
    return int(text)


async def show(request: Request) -> Response:
    """?wait=true until the answers under way in it have ended."""
    name = request.path_params["name"]
    store = state_of(request).conversations
    if _flag(request, "wait"):
        await unless_gone(request.receive, store.settled(name))
    return answer(await store.run(lambda each: each.get(name)))


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"'{name}' must be true or false.", param=name)
    return text == "true"


async def remove(request: Request) -> Response:
    name = request.path_params["name"]
    daemon = state_of(request)
    removed = await daemon.conversations.run(lambda each: each.remove(name))
    await daemon.forget_states(removed)
    return answer(Forgotten(1, removed))


async def remove_all(request: Request) -> Response:
    daemon = state_of(request)
    count = await daemon.conversations.run(lambda each: each.remove_all())
    await daemon.forget_states(None)
    return answer(Forgotten(count))


async def undo(request: Request) -> Response:
    name = request.path_params["name"]
    daemon = state_of(request)
    store = daemon.conversations
    await unless_gone(request.receive, store.settled(name))
    undone = await store.run(lambda each: each.undo(name))
    if not undone.left:
        await daemon.forget_states(undone.id)
    return answer(undone)
