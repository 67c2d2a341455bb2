"""One client's connection: HTTP read strictly, in bounded time, and on a Unix socket from our own user only.

uvicorn's protocol reads and writes. This module adds what uvicorn leaves open: requests that two programs
could read differently, clients that send or read very slowly, and more connections than the process has
file descriptors.
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

MAX_HEAD_BYTES = 64 * 1024  # bytes of a request's head
HEAD_TIMEOUT_S = 10.0  # from the first byte of a request to the end of its head
BODY_TIMEOUT_S = 60.0  # from there to the end of its body: enough for 32 MiB at 560 kB/s
STALL_TIMEOUT_S = 60.0  # how long a client may leave the data of a response unread
SPARE_DESCRIPTORS = 32  # descriptors for the log, the worker, models and databases
# Excess connections that still get a response with status 503. Those beyond are closed unread.
MAX_REFUSED_CONNECTIONS = 8
MAX_DESCRIPTORS = 10_240  # the most descriptors that macOS allows
# It stands for the host in a client's address, and the pid of the peer for the port.
UNIX_HOST = "unix"
GONE_CHECK_INTERVAL_S = 0.25  # whether a client that closed its sending side is there
_ABSOLUTE_TARGET = re.compile(rb"(?i)http://([^/?#]*)(.*)")
_FOLDED_HEADER = re.compile(rb"\n[ \t]")
_HEAD_END = re.compile(rb"\n\r?\n")


class StrictHTTP(h11.Connection):
    """An h11 connection that also refuses requests which two programs may read differently."""

    problem = ""  # the error message for a refused request
    status = 400  # the HTTP status of its response
    streams = False  # whether the response being sent is a stream of events

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, as h11 does.

        Raises:
            RemoteProtocolError: The request is invalid. This includes a body length that is declared
                twice, and a header that continues on a second line.
        """
        buffered = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            if event.http_version not in (b"1.0", b"1.1"):  # for example the preface of HTTP/2
                self.status = 505
                version = event.http_version.decode().removesuffix(".0")
                self._refuse(f"HTTP/{version} is not spoken here; use HTTP/1.1.")
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                self._refuse("The request has both Content-Length and Transfer-Encoding.")
            end = _HEAD_END.search(buffered)
            if _FOLDED_HEADER.search(buffered, 0, end.start() if end else len(buffered)):
                self._refuse(
                    "A header of the request continues on a second line, which is not allowed."
                )
            if match := _ABSOLUTE_TARGET.fullmatch(event.target):
                # Clients send it to a proxy. The path takes its place, and a Host header that of its host.
                headers = [(name, value) for name, value in event.headers if name != b"host"]
                return h11.Request(
                    method=event.method,
                    target=match[2] if match[2].startswith(b"/") else b"/" + match[2],
                    headers=[(b"host", match[1]), *headers],
                    http_version=event.http_version,
                )
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """Send an event as h11 does, and note whether the response is a stream of events."""
        if isinstance(event, h11.Response):
            self.streams = any(value.startswith(b"text/event-stream") for _, value in event.headers)
        return super().send_with_data_passthrough(event)

    def _refuse(self, problem: str) -> None:
        self.problem = problem
        raise h11.RemoteProtocolError(problem)


class ClientConnection(H11Protocol):
    """HTTP for one client. On a Unix socket, connections of other users are closed."""

    # All TCP connections. They count before they have shown a token.
    tcp_connections: ClassVar[set[ClientConnection]] = set()

    # uvicorn's method narrows the type of asyncio's
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn: StrictHTTP = StrictHTTP(h11.SERVER, MAX_HEAD_BYTES)
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_state: object = None  # the state of the client that the deadline is for
        self._stall_timer: asyncio.TimerHandle | None = None
        # Set once the client closed its sending side.
        self._gone_timer: asyncio.TimerHandle | None = None
        # Pause as soon as the kernel takes no more data, so that the stall timer starts.
        transport.set_write_buffer_limits(0)
        connected = transport.get_extra_info("socket")
        if connected.family == socket.AF_UNIX:
            uid, pid = peer_credentials(connected)
            self.client = (UNIX_HOST, pid)
            if uid not in (None, os.getuid()):
                log.warning("a connection of uid %s was refused", uid)
                transport.abort()
                return
        else:
            self.tcp_connections.add(self)
        # Any process on this machine can connect over TCP. So TCP gets at most half of the places, and our
        # own user on the Unix socket gets the other half and whatever TCP does not use.
        limit, tcp = max_connections(), len(self.tcp_connections)
        excess = len(self.connections) - tcp - (limit - min(tcp, limit // 2))
        if self in self.tcp_connections:
            excess = tcp - limit // 2
        if excess > MAX_REFUSED_CONNECTIONS:
            transport.abort()
        elif excess > 0:
            self.app = _refuse_connection
        # A connection without a first request is closed like one without a further request.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.tcp_connections.discard(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._deadline, self._stall_timer, self._gone_timer):
            if timer:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception:
            # h11 does not foresee everything, for example numbers that Python cannot parse.
            log.warning("a request could not be read", exc_info=True)
            self.send_400_response("The request is not valid HTTP.")
        self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()
        if self._gone_timer and not self._awaits_response():
            self.transport.close()

    def _set_deadline(self) -> None:
        """Set the deadline for the part of the request that is arriving: its head or its body."""
        state = self.conn.their_state
        if state is h11.IDLE and not self.conn.trailing_data[0]:
            state = h11.DONE  # no request has begun
        if state is self._deadline_state:
            return
        self._deadline_state = state
        if self._deadline:
            self._deadline.cancel()
        seconds = {h11.IDLE: HEAD_TIMEOUT_S, h11.SEND_BODY: BODY_TIMEOUT_S}.get(state)
        self._deadline = self.loop.call_later(seconds, self._end_slow_request) if seconds else None

    def _end_slow_request(self) -> None:
        part = "head" if self._deadline_state is h11.IDLE else "body"
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if answering:
            cycle.disconnected = True  # wakes the handler that waits for the body
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            seconds = HEAD_TIMEOUT_S if part == "head" else BODY_TIMEOUT_S
            message = f"The request's {part} did not arrive within {seconds:g} s."
            self._end_with(RequestTimeout(message))
        else:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn's method returns None
        """Return whether to keep the connection: a client that only closed its sending side still reads."""
        if not self._awaits_response() or self._is_gone():
            return False
        # Over TCP a client that has left looks the same until something is sent to it. So send data that
        # every client ignores. If the client has left, its kernel responds with a reset, which the next
        # check notices.
        response_begun = self.conn.our_state is h11.SEND_BODY
        if self in self.tcp_connections and self.conn.their_http_version != b"1.0":
            with contextlib.suppress(h11.LocalProtocolError):
                if not response_begun:
                    reason = b"Continue"
                    probe = h11.InformationalResponse(status_code=100, headers=[], reason=reason)
                    self.transport.write(self.conn.send(probe) or b"")
                elif self.conn.streams:
                    self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        self._gone_timer = self.loop.call_later(GONE_CHECK_INTERVAL_S / 10, self._abort_if_gone)
        return True

    def _awaits_response(self) -> bool:
        """Return whether a request was read completely and its response is not complete."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def _abort_if_gone(self) -> None:
        if self._is_gone():
            self.transport.abort()
        else:
            self._gone_timer = self.loop.call_later(GONE_CHECK_INTERVAL_S, self._abort_if_gone)

    def _is_gone(self) -> bool:
        """Return whether the client has closed both directions, as far as the kernel knows."""
        descriptor = self.transport.get_extra_info("socket").fileno()
        if descriptor < 0 or not hasattr(select, "poll"):
            return True
        poller = select.poll()
        poller.register(descriptor, 0)  # errors and hang-ups are always reported
        return bool(poller.poll(0))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self._drop_stalled_client)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer:
            self._stall_timer.cancel()

    def _drop_stalled_client(self) -> None:
        log.info("a client read nothing for %g s and was dropped", STALL_TIMEOUT_S)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP with an error in the same shape as all others."""
        error = LocalspecError(self.conn.problem or msg)
        error.status, error.code = self.conn.status, "invalid_request"
        if len(self.conn.trailing_data[0]) >= MAX_HEAD_BYTES:
            error = LocalspecError(f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")
            error.status, error.code = 431, "header_too_large"
        self._end_with(error)

    def _end_with(self, error: LocalspecError) -> None:
        """Send `error`, if no response has begun, and close the connection."""
        body = msgspec.json.encode(errors.error_body(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # a response has begun already
            reason = HTTPStatus(error.status).phrase.encode()
            head = h11.Response(status_code=error.status, headers=headers, reason=reason)
            self.transport.write(self.conn.send(head) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.conn.send(h11.EndOfMessage())
        self.transport.close()


def peer_credentials(connected: socket.socket) -> tuple[int | None, int]:
    """Return the user and the process at the other end, or None and 0 where the kernel does not say."""
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


def raise_file_limit() -> None:
    """Raise the limit of open files as far as an ordinary user may. The initial limit is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def max_connections() -> int:
    """Return how many connections leave enough descriptors for everything else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(limit - 2 * SPARE_DESCRIPTORS, 8) if limit != resource.RLIM_INFINITY else sys.maxsize


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    message = "The daemon has too many connections; try again."
    response = errors.ErrorResponse(Unavailable(message, retry_after=1))
    response.headers["connection"] = "close"
    await response(scope, receive, send)
