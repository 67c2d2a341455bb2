"""A stream of server-sent events into objects. What is none of them ends the request that it belongs to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from localspec.daemon.upstream.connection import MAX_LINE, Connection, Lines

_DONE = b"[DONE]"


async def objects(connection: Connection, lines: Lines) -> AsyncGenerator[dict[str, Any], None]:
    """The objects of a stream; an empty one where it says that it is over.

    Raises:
        UpstreamError: one is no JSON object. As `Lines`.
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
            found = connection.decoded(event)
            if not isinstance(found, dict) or not found:
                raise connection.nonsense("an event of its stream is no object")
            yield found
        elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise connection.nonsense("its stream has a line that is none of an event stream")
    # What stands behind the last empty line was cut off, and counts for nothing.
