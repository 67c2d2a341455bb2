"""Parse a stream of server-sent events to objects. Any invalid event ends the request."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from localspec.daemon.upstream.connection import MAX_LINE, Connection, Lines

_DONE = b"[DONE]"


async def objects(connection: Connection, lines: Lines) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the objects of a stream, and an empty one for [DONE].

    Raises:
        UpstreamError: An event is not a JSON object. Also the errors of `Lines`.
    """
    parts: list[bytes] = []
    size = 0
    async for line in lines:
        if line.startswith(b"data:"):
            parts.append(line[5:].removeprefix(b" "))
            size += len(line) + 1
            if size > MAX_LINE:
                raise connection.nonsense(f"an event has more than {MAX_LINE >> 20} MiB")
        elif not line and parts:
            event, parts, size = b"\n".join(parts), [], 0
            if not event:
                continue
            if event == _DONE:
                yield {}
                return
            decoded = connection.decoded(event)
            if not isinstance(decoded, dict) or not decoded:
                raise connection.nonsense("an event of the stream is not an object")
            yield decoded
        elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise connection.nonsense("a line of the stream does not belong to an event")
    # Data after the last empty line is an incomplete event, which is dropped.
