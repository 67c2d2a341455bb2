"""One connection: HTTP read strictly, in bounded time, and from nobody but our own user.

uvicorn's protocol reads and writes; here is what it leaves open: a second way to read a request,
clients that dribble or do not read, more connections than the process has file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import select
import socket
import struct
import sys
from http import HTTPStatus
from typing import ClassVar

import h11
import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from localspec.daemon.http import errors
from localspec.errors import LocalspecError, RequestTimeout, Unavailable

log = logging.getLogger("localspec.connection")

MAX_HEAD = 64 * 1024  # bytes of a request before its body
HEAD_SECONDS = 10.0  # from the first byte of a request to the end of its head
BODY_SECONDS = 60.0  # and to the end of its body: 10 MiB at a sixth of a megabyte per second
STALL_SECONDS = 60.0  # how long a client may read nothing of an answer that waits for it
SPARE_FILES = 32  # descriptors for the log, the worker, models and databases
REFUSED_AT_ONCE = 8  # connections too many that are still told so; more are closed unread
MANY_FILES = 10_240  # what macOS allows at most
UNIX = "unix"  # in the place of a host name, before the number of the peer's process

LOOK_SECONDS = 0.25  # between two looks whether a client that has said all is still there
_ABSOLUTE = re.compile(rb"(?i)http://([^/?#]*)(.*)")
_FOLDED = re.compile(rb"\n[ \t]")
_HEAD_END = re.compile(rb"\n\r?\n")


class StrictHTTP(h11.Connection):
    """h11, which refuses besides what two programs may read in two ways."""

    problem = ""  # the sentence about a refused request
    status = 400  # of its answer
    streams = False  # whether the answer that is being sent is a stream of events

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11 has it.

        Raises:
            RemoteProtocolError: also for two statements of the body's length, and a header that
                goes on in a second line.
        """
        begun = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            if event.http_version not in (b"1.0", b"1.1"):  # such as the first line of HTTP/2
                self.status = 505
                version = event.http_version.decode().removesuffix(".0")
                self._refuse(f"HTTP/{version} is not spoken here; use HTTP/1.1.")
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                self._refuse("The request has both Content-Length and Transfer-Encoding.")
            end = _HEAD_END.search(begun)
            if _FOLDED.search(begun, 0, end.start() if end else len(begun)):
                self._refuse(
                    "A header of the request continues on a second line, which is not allowed."
                )
            return _with_a_path(event)
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """As h11 has it."""
        if isinstance(event, h11.Response):
            self.streams = any(value.startswith(b"text/event-stream") for _, value in event.headers)
        return super().send_with_data_passthrough(event)

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        raise h11.RemoteProtocolError(problem)


def _with_a_path(request: h11.Request) -> h11.Request:
    """Where the target is a whole address, as a proxy is sent it: its path, and its host as the Host."""
    found = _ABSOLUTE.fullmatch(request.target)
    if found is None:
        return request
    path = found[2] if found[2].startswith(b"/") else b"/" + found[2]
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=path,
        headers=[(b"host", found[1]), *others],
        http_version=request.http_version,
    )


class ClientConnection(H11Protocol):
    """HTTP for one client. On a Unix socket the kernel says who it is; others than us are dropped."""

    # Whoever they are: no token is needed to connect.
    over_tcp: ClassVar[set[ClientConnection]] = set()

    # uvicorn's own narrows the type that asyncio gives it
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn: StrictHTTP = StrictHTTP(h11.SERVER, MAX_HEAD)
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None  # the state of the client that the deadline is for
        self._stalled: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None  # it will say nothing more
        transport.set_write_buffer_limits(0)  # whatever the kernel does not take waits to be read
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            uid, pid = peer(connected)
            self.client = (UNIX, pid)
            if uid not in (None, os.getuid()):
                log.warning("a connection of uid %s was refused", uid)
                transport.abort()
                return
        else:
            self.over_tcp.add(self)
        over = self._too_many_by()
        if over > REFUSED_AT_ONCE:
            transport.abort()
        elif over > 0:
            self.app = _too_many
        # A connection on which nothing comes is closed like one on which nothing more comes.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _too_many_by(self) -> int:
        """How many connections there are beyond those that may be, of this one's kind.

        Anybody on this machine can connect over TCP: half the places there are stay for our own user
        on the Unix socket, and the rest too while nobody needs it.
        """
        most, tcp = most_connections(), len(self.over_tcp)
        if self in self.over_tcp:
            return tcp - most // 2
        return len(self.connections) - tcp - (most - min(tcp, most // 2))

    def connection_lost(self, exc: Exception | None) -> None:
        self.over_tcp.discard(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._deadline, self._stalled, self._looking):
            if timer:
                timer.cancel()

    # ------------------------------------------------------------------ slow writers

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception:  # numbers that Python does not read, say: h11 does not foresee all
            log.warning("a request could not be read", exc_info=True)
            self.send_400_response("The request is not valid HTTP.")
        self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()
        if self._looking and not self._awaits_an_answer():
            self.transport.close()

    def _set_deadline(self) -> None:
        """A request that has begun must end in time; one deadline for its head, one for its body."""
        state = self.conn.their_state
        if state is h11.IDLE and not self.conn.trailing_data[0]:
            state = h11.DONE  # between two requests
        if state is self._awaited:
            return
        self._awaited = state
        if self._deadline:
            self._deadline.cancel()
        seconds = {h11.IDLE: HEAD_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(state)
        self._deadline = self.loop.call_later(seconds, self._too_slow) if seconds else None

    def _too_slow(self) -> None:
        part = "head" if self._awaited is h11.IDLE else "body"
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if answering:
            cycle.disconnected = True  # the handler that waits for the body learns that it ends
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            seconds = HEAD_SECONDS if part == "head" else BODY_SECONDS
            self._end_with(
                RequestTimeout(f"The request's {part} did not arrive within {seconds:g} s.")
            )
        else:
            self.transport.close()

    # ------------------------------------------------------------------ clients that say nothing more

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn's own says nothing
        """Whether the connection stays: whoever has only closed its own side waits for the answer."""
        if not self._awaits_an_answer() or self._gone():
            return False
        # Over TCP a client that has left looks the same until something is sent to it: a sign of life
        # that every client passes over. What it answers is seen at the next look.
        begun = self.conn.our_state is h11.SEND_BODY
        if self in self.over_tcp and self.conn.their_http_version != b"1.0":
            with contextlib.suppress(h11.LocalProtocolError):
                if not begun:
                    sign = h11.InformationalResponse(
                        status_code=100, headers=[], reason=b"Continue"
                    )
                    self.transport.write(self.conn.send(sign) or b"")
                elif self.conn.streams:
                    self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        self._looking = self.loop.call_later(LOOK_SECONDS / 10, self._look)
        return True

    def _awaits_an_answer(self) -> bool:
        """Whether a whole request was read and its answer is not."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _look(self) -> None:
        if self._gone():
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    def _gone(self) -> bool:
        """Whether the client has closed both sides, as far as the kernel knows."""
        number = self.transport.get_extra_info("socket").fileno()
        if number < 0 or not hasattr(select, "poll"):
            return True
        looking = select.poll()
        looking.register(number, 0)  # of errors and of the end it tells in any case
        return bool(looking.poll(0))

    # ------------------------------------------------------------------ slow readers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self._not_read)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled:
            self._stalled.cancel()

    def _not_read(self) -> None:
        log.info("a client read nothing for %g s and was dropped", STALL_SECONDS)
        self.transport.abort()

    # ------------------------------------------------------------------ refusals

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the same shape as everything else."""
        error = LocalspecError(self.conn.problem or msg)
        error.status, error.code = self.conn.status, "invalid_request"
        if len(self.conn.trailing_data[0]) >= MAX_HEAD:
            error = LocalspecError(f"The request's head is longer than {MAX_HEAD} bytes.")
            error.status, error.code = 431, "header_too_large"
        self._end_with(error)

    def _end_with(self, error: LocalspecError) -> None:
        """Answer with `error`, if no answer has begun, and close the connection."""
        body = msgspec.json.encode(errors.error_body(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun already
            reason = HTTPStatus(error.status).phrase.encode()
            head = h11.Response(status_code=error.status, headers=headers, reason=reason)
            self.transport.write(self.conn.send(head) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.conn.send(h11.EndOfMessage())
        self.transport.close()


def peer(connected: socket.socket) -> tuple[int | None, int]:
    """User and process at the other end, from the kernel; None and 0 where it does not say."""
    if sys.platform == "linux":
        size = struct.calcsize("3i")
        pid, uid, _gid = struct.unpack(
            "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return int(uid), int(pid)
    if sys.platform == "darwin":
        # struct xucred: version, uid, …; SOL_LOCAL is 0 and LOCAL_PEERCRED 1.
        data = connected.getsockopt(0, 1, struct.calcsize("2IH16I"))
        return int(struct.unpack_from("2I", data)[1]), 0
    return None, 0


def allow_more_files() -> None:
    """As many descriptors as the system lets us have without asking; it starts with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many connections leave descriptors for everything else."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(allowed - 2 * SPARE_FILES, 8) if allowed != resource.RLIM_INFINITY else sys.maxsize


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    answer = errors.Refusal(
        Unavailable("The daemon has too many connections; try again.", retry_after=1)
    )
    answer.headers["connection"] = "close"
    await answer(scope, receive, send)
