"""HTTP to one server. TLS is always verified, and the key is sent to this server only.

The key is read again for each request and sent in one header. It appears in no message of ours: a text of
the server is searched for it before it is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import msgspec

import localspec
from localspec.errors import (
    ContextExceeded,
    InvalidRequest,
    LocalspecError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
    replace_control_characters,
)
from localspec.extras.upstream.dialects import DraftCounts, ServerCounters, ServerDialect
from localspec.files import keepalive_options
from localspec.paths import expand_user, read_private_file
from localspec.protocol.settings import Upstream

if TYPE_CHECKING:
    import httpx2


_REQUEST_TIMEOUT_S = 1.0
_RETRY_DELAY_S = 0.1  # an engine may count its last pass just after it has sent the text


class CounterMeasurement:
    """The drafts of one answer, by the difference of the server's own counters.

    The first reading runs beside the request and does not delay it.
    """

    def __init__(
        self,
        connection: UpstreamConnection,
        dialect: ServerDialect,
        looks: set[asyncio.Task[ServerCounters | None]],
    ) -> None:
        """Start the first reading. Its task is kept in `looks` until it ends."""
        self._connection = connection
        self._dialect = dialect
        self._before = asyncio.create_task(self._read_counters())
        looks.add(self._before)
        self._before.add_done_callback(looks.discard)

    async def end(self, tokens: int) -> DraftCounts | None:
        """Return the drafts of an answer of `tokens` tokens.

        Return None if they cannot be known: the server counts no drafts, or has generated tokens for other
        requests meanwhile.
        """
        before = await self._before
        for wait in (0.0, _RETRY_DELAY_S) if before else ():
            await asyncio.sleep(wait)
            after = await self._read_counters()
            if before and after and tokens and after.tokens - before.tokens == tokens:
                drafted = after.drafted - before.drafted
                return DraftCounts(drafted, after.accepted - before.accepted)
        return None

    async def _read_counters(self) -> ServerCounters | None:
        with contextlib.suppress(LocalspecError):
            data = await self._connection.get(self._dialect.metrics_path, _REQUEST_TIMEOUT_S)
            with contextlib.suppress(ValueError, OverflowError):
                return self._dialect.parse_counters(data.decode(errors="replace"))
        return None


# An HTTP/1.1 server may first send any number of 1xx responses, each with headers of its own. The HTTP
# client drops them without counting, so this module counts the bytes that are read from the network.
MAX_HEADER_BYTES = 1 << 18

_bytes_left: ContextVar[list[int] | None] = ContextVar("header_bytes_left", default=None)


class TooManyHeaders(Exception):
    """A server sent more than MAX_HEADER_BYTES before its response."""


@contextlib.contextmanager
def header_limit() -> Iterator[None]:
    """Limit what this task reads from the network until the block is left."""
    token = _bytes_left.set([MAX_HEADER_BYTES])
    try:
        yield
    finally:
        _bytes_left.reset(token)


def count_header_bytes(transport: httpx2.AsyncHTTPTransport) -> None:
    """Make the connections of a transport count the bytes that are read from them."""
    import httpcore2

    def count(stream: httpcore2.AsyncNetworkStream) -> httpcore2.AsyncNetworkStream:
        read, start_tls = stream.read, stream.start_tls

        async def counted_read(max_bytes: int, timeout: float | None = None) -> bytes:
            data = await read(max_bytes, timeout)
            remaining = _bytes_left.get()
            if remaining:
                remaining[0] -= len(data)
                if remaining[0] < 0:
                    raise TooManyHeaders
            return data

        async def counted_tls(*arguments: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
            return count(await start_tls(*arguments, **options))

        stream.read, stream.start_tls = counted_read, counted_tls  # type: ignore[method-assign]
        return stream

    class Backend(httpcore2.AnyIOBackend):
        async def connect_tcp(
            self, *arguments: Any, **options: Any
        ) -> httpcore2.AsyncNetworkStream:
            return count(await super().connect_tcp(*arguments, **options))

    pool = transport._pool
    assert isinstance(pool, httpcore2.AsyncConnectionPool)
    pool._network_backend = Backend()


MAX_LINE_BYTES = 4 << 20  # bytes of one event; a usual one has a few characters of text
MAX_ANSWER_BYTES = 64 << 20  # of a stream, including the JSON around the text
# Lists and objects in one body or event. A body of nothing else would take seconds to decode, and the event
# loop would stand still meanwhile, even with the work in a thread.
_MAX_CONTAINERS = 200_000
_MAX_BODY_BYTES = 8 << 20  # of a response that is not a stream
_MAX_ERROR_BYTES = 1 << 16  # of the body of an error
_MAX_SHOWN_CHARACTERS = 300  # of a server's message
# Longest wait for a connection to a server that has a fallback, because the client waits as long.
_FALLBACK_CONNECT_TIMEOUT_S = 0.8


class UpstreamConnection:
    """A connection to the server of one pair."""

    def __init__(self, name: str, upstream: Upstream) -> None:
        self.name = name
        self.upstream = upstream
        parts = urlsplit(upstream.upstream)
        path = parts.path.rstrip("/") or "/v1"
        self.root = f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v1')}"
        self.base = f"{parts.scheme}://{parts.netloc}{path}"
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self._client: httpx2.AsyncClient | None = None
        self._client_lock = asyncio.Lock()

    # ------------------------------------------------------------------ requests

    async def get(self, path: str, seconds: float) -> bytes:
        """Return the body of a GET request. Raises UpstreamError, InvalidRequest."""
        # Before the deadline is set, so that the import does not count as the server's time.
        await self._ready()
        deadline = time.monotonic() + seconds
        async with self._open_response("GET", path, None, deadline) as response:
            return await self._read(response, deadline, _MAX_BODY_BYTES)

    async def post(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        """Return the JSON response to a small request. Raises UpstreamError, InvalidRequest."""
        await self._ready()
        deadline = time.monotonic() + seconds
        async with self._open_response("POST", path, body, deadline) as response:
            return self.decode(await self._read(response, deadline, _MAX_BODY_BYTES))

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: dict[str, Any], max_bytes: int = MAX_ANSWER_BYTES
    ) -> AsyncIterator[ResponseLines]:
        """Send a request whose response is a stream of lines, of at most `max_bytes` in all.

        Leaving the block closes the connection, unless the response was read to its end.

        Raises:
            UpstreamUnreachable: The server does not respond.
            UpstreamError, UpstreamTimeout, InvalidRequest: The server refused the request.
        """
        await self._ready()
        deadline = time.monotonic() + self.upstream.first_token_timeout
        async with self._open_response("POST", path, body, deadline) as response:
            content_type = response.headers.get("content-type", "")
            media_type = content_type.partition(";")[0].strip().lower()
            # A server that cannot stream sends the whole answer as JSON.
            if media_type not in ("text/event-stream", "application/json"):
                kind = self.clean(content_type)[:80]
                raise self.invalid_response(f"'{kind}' in place of an event stream")
            lines = ResponseLines(self, response, deadline, max_bytes)
            lines.are_events = media_type == "text/event-stream"
            yield lines

    @contextlib.asynccontextmanager
    async def _open_response(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> AsyncIterator[httpx2.Response]:
        client = await self._ready()
        key = await asyncio.to_thread(self._key)
        url = f"{self.root}{path}" if path.startswith("/") else f"{self.base}/{path}"
        response = await self._send(client, method, url, key, body, deadline)
        try:
            if response.is_redirect:
                url = self._redirect_target(url, response)
                await response.aclose()
                response = await self._send(client, method, url, key, body, deadline)
            if response.status_code != 200:
                raise await self._read_error(response, key, deadline)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise self.invalid_response("it is compressed, although that was not requested")
            yield response
        finally:
            await response.aclose()

    async def _send(
        self,
        client: httpx2.AsyncClient,
        method: str,
        url: str,
        key: str,
        body: dict[str, Any] | None,
        deadline: float,
    ) -> httpx2.Response:
        headers = {
            "accept-encoding": "identity",
            "user-agent": f"localspec/{localspec.__version__}",
        }
        if key:
            headers["authorization"] = f"Bearer {key}"
        content = None
        if body is not None:
            content = msgspec.json.encode(body)
            headers["content-type"] = "application/json"
        request = client.build_request(method, url, headers=headers, content=content)
        with self._translated_errors(), header_limit():
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    return await client.send(request, stream=True)
            except TimeoutError:
                raise self.timeout_error() from None
            except TooManyHeaders:
                raise self.invalid_response("it has too many headers") from None

    def _redirect_target(self, url: str, response: httpx2.Response) -> str:
        """Return the target of a redirect. Raises UpstreamError if it leads to another server."""
        try:
            target = urljoin(url, response.headers.get("location", ""))
            parts = urlsplit(target)
        except ValueError:
            raise self.invalid_response("a redirect to an invalid address") from None
        is_same_server = f"{parts.scheme}://{parts.netloc}" == self.origin
        if not is_same_server or response.status_code not in (307, 308):
            host = self.clean(target).partition("//")[2].partition("/")[0][:120]
            raise UpstreamError(
                f"{self._who} redirects to {host}, which is not "
                "followed: the request and its key are for this server alone. If that is the one you "
                f"mean: localspec add {self.name} --upstream … --replace"
                if not is_same_server
                else f"{self._who} redirects a request in a way that loses it ({response.status_code})."
            )
        return target

    async def _read(self, response: httpx2.Response, deadline: float, max_bytes: int) -> bytes:
        body = bytearray()
        with self._translated_errors():
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if len(body) > max_bytes:
                            raise self.invalid_response(f"it is longer than {max_bytes >> 10} KiB")
            except TimeoutError:
                raise self.timeout_error() from None
        return bytes(body)

    # ------------------------------------------------------------------ errors

    @property
    def _who(self) -> str:
        return f"The server of '{self.name}' ({self.origin})"

    def invalid_response(self, reason: str) -> UpstreamError:
        """Return the error that the server's response is invalid."""
        return UpstreamError(
            f"Invalid response from the server of '{self.name}' ({self.origin}): {reason}."
        )

    def timeout_error(self) -> UpstreamTimeout:
        return UpstreamTimeout(
            f"{self._who} sent nothing for too long; its time-outs are set in models.toml."
        )

    def decode(self, data: bytes) -> Any:
        """Decode JSON. Raises UpstreamError if `data` is not JSON, or has too many values."""
        if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
            raise self.invalid_response("the JSON has too many values")
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise self.invalid_response("it is not JSON") from None

    @contextlib.contextmanager
    def _translated_errors(self) -> Any:
        """Replace the transport's errors by ours, without the data that they quote."""
        import httpx2

        try:
            yield
        except (httpx2.ConnectTimeout, httpx2.ConnectError) as error:
            raise self._connect_error(error) from None
        except httpx2.RemoteProtocolError as error:
            broken = "disconnect" in str(error) or "closed connection" in str(error)
            if broken:
                raise UpstreamUnreachable(f"{self._who} broke the connection.") from None
            raise self.invalid_response("it is not HTTP") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise UpstreamUnreachable(
                f"{self._who} broke the connection ({type(error).__name__})."
            ) from None

    def _connect_error(self, error: BaseException) -> LocalspecError:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLError):
                reason = getattr(cause, "verify_message", "") or "no secure connection can be made"
                return UpstreamError(
                    f"{self._who} is not trusted: {reason}. Name the certificate that vouches for it: "
                    f"localspec add {self.name} --upstream … --ca FILE --replace"
                )
            cause = cause.__cause__ or cause.__context__
        timed_out = "Timeout" in type(error).__name__
        reason = "it cannot be connected in time" if timed_out else "it cannot be connected"
        return UpstreamUnreachable(f"{self._who} does not answer: {reason}.")

    async def _read_error(
        self, response: httpx2.Response, key: str, deadline: float
    ) -> LocalspecError:
        status = response.status_code
        data = b""
        with contextlib.suppress(LocalspecError):
            data = await self._read(response, min(deadline, time.monotonic() + 5), _MAX_ERROR_BYTES)
        message, error = self._error_message(data, key)
        if status in (401, 403) and not key:
            return UpstreamError(
                f"{self._who} wants a key ({status}), and none is named for it: localspec add "
                f"{self.name} --upstream … --key-file FILE --replace"
            )
        if status in (401, 403):
            return UpstreamError(
                f"{self._who} refuses the key ({status}). It is named by `key_env` or `key_file` in "
                "models.toml."
            )
        if status in (502, 503, 504):
            return UpstreamUnreachable(f"{self._who} is not ready ({status}): {message}")
        if status in (400, 404, 413, 422, 429, 501):
            code, kind = str(error.get("code")), str(error.get("type"))
            # vLLM uses OpenAI's message for this error, but sends no code.
            too_long = status == 400 and "maximum context length" in message
            if too_long or code == "context_length_exceeded" or kind == "exceed_context_size_error":
                return ContextExceeded(f"{self._who} refuses the request: {message}")
            if status in (400, 413, 422):
                param = error.get("param")
                field = param if isinstance(param, str) and len(param) < 200 else None
                field = None if field is None or (key and key in field) else field
                return InvalidRequest(f"{self._who} refuses the request: {message}", param=field)
        return UpstreamError(f"{self._who} failed ({status}): {message}")

    def _error_message(self, data: bytes, key: str) -> tuple[str, dict[str, Any]]:
        """Return the error object of a body, and its message in any known shape, without the key."""
        error: Any = None
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            error = msgspec.json.decode(data)
            error = error.get("error", error) if isinstance(error, dict) else error
        detail = error if isinstance(error, dict) else {}
        text = detail.get("message") or detail.get("detail") or error
        return self.clean(text, key) or "it gave no reason.", detail

    def clean(self, text: object, key: str | None = None) -> str:
        """Return a server's text for a person: shortened, without control characters and without the key."""
        if not isinstance(text, str):
            return ""
        if key is None:
            with contextlib.suppress(LocalspecError):
                key = self._key()
        text = text.replace(key, "…") if key else text
        return replace_control_characters(text[:_MAX_SHOWN_CHARACTERS], lines=False)

    # ------------------------------------------------------------------ key and client

    def _key(self) -> str:
        """Return the server's key, or "" if none is configured. Raises UpstreamError if it cannot be read."""
        upstream, key = self.upstream, ""
        if upstream.key_env:
            key = os.environ.get(upstream.key_env, "").strip()
            if not key:
                raise UpstreamError(
                    f"The variable {upstream.key_env}, which holds the key for '{self.name}', is not "
                    "set where the daemon was started. Start it from a shell that has it: localspec "
                    "stop; or name a file: key_file."
                )
        elif upstream.key_file:
            # The path is left out, because the message may go to a client that came by TCP.
            subject = f"The key file of '{self.name}' (key_file in models.toml)"
            try:
                key = read_private_file(expand_user(upstream.key_file)).decode("ascii")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not a text"
                advice = "; use chmod 600" if "other users" in str(reason) else ""
                raise UpstreamError(f"{subject} cannot be read: {reason}{advice}.") from None
            if not (key := key.strip()):
                raise UpstreamError(f"{subject} is empty.")
        if not (key.isascii() and key.isprintable()) or len(key) > 1 << 14:
            raise UpstreamError(f"The key for '{self.name}' is not one line of plain characters.")
        return key

    async def _ready(self) -> httpx2.AsyncClient:
        """Return the client, which is created at first use because its import takes time and memory."""
        async with self._client_lock:
            if self._client is None:
                self._client = await asyncio.to_thread(self._create_client)
            return self._client

    def _create_client(self) -> httpx2.AsyncClient:
        # Without this line anyio would be imported during the first request, within its time limit.
        import httpx2
        from anyio import connect_tcp  # noqa: F401
        from anyio._backends import _asyncio  # noqa: F401

        for name in ("httpx2", "httpcore2"):  # they log a line for every request
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            trust = httpx2.create_ssl_context(trust_env=False)
            if self.upstream.ca:
                trust = ssl.create_default_context(cafile=expand_user(self.upstream.ca))
        except (OSError, ssl.SSLError):
            raise UpstreamError(
                f"The certificates for '{self.name}' (ca in models.toml) cannot be read."
            ) from None
        connect = self.upstream.connect_timeout
        if self.upstream.fallback:
            connect = min(connect, _FALLBACK_CONNECT_TIMEOUT_S)
        # Reads are limited by Lines instead.
        timeout = httpx2.Timeout(None, connect=connect, write=60.0)
        # Most servers close an idle connection after 5 s. A request sent at that moment would be lost.
        limits = httpx2.Limits(max_keepalive_connections=8, keepalive_expiry=4.0)
        transport = httpx2.AsyncHTTPTransport(
            verify=trust, limits=limits, trust_env=False, socket_options=keepalive_options()
        )
        count_header_bytes(transport)
        return httpx2.AsyncClient(
            transport=transport, timeout=timeout, trust_env=False, follow_redirects=False
        )

    async def close(self) -> None:
        client, self._client = self._client, None
        if client:
            await client.aclose()


class ResponseLines:
    """The lines of a stream, each as soon as it has arrived.

    Until `use_silence_timeout` is called, at the first part of the answer, one deadline applies to
    everything. After that, a time limit applies to the silence between two chunks.
    """

    def __init__(
        self,
        connection: UpstreamConnection,
        response: httpx2.Response,
        deadline: float,
        max_bytes: int,
    ) -> None:
        self._connection = connection
        self._bytes_left = max_bytes
        self._chunks = response.aiter_raw()
        self._deadline = deadline
        self._silence: float | None = None
        self.are_events = True  # or one JSON object

    def use_silence_timeout(self) -> None:
        self._silence = self._connection.upstream.silence_timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the lines without their ends. The last one may be incomplete.

        Raises:
            UpstreamError, UpstreamTimeout: The stream broke off, is too long, or does not go on.
        """
        buffer = bytearray()
        while chunk := await self._next_chunk():
            self._bytes_left -= len(chunk)
            if self._bytes_left < 0:
                raise self._connection.invalid_response("it is longer than was requested")
            buffer += chunk
            if b"\n" in chunk:
                *lines, remainder = buffer.split(b"\n")
                buffer = bytearray(remainder)
                for line in lines:
                    yield bytes(line).removesuffix(b"\r")
            if len(buffer) > MAX_LINE_BYTES:
                raise self._connection.invalid_response(
                    f"a line has more than {MAX_LINE_BYTES >> 20} MiB"
                )
        if buffer:
            yield bytes(buffer).removesuffix(b"\r")

    async def _next_chunk(self) -> bytes:
        now = time.monotonic()
        remaining = self._silence if self._silence is not None else max(self._deadline - now, 0)
        with self._connection._translated_errors():
            try:
                async with asyncio.timeout(remaining):
                    return await anext(self._chunks, b"")
            except TimeoutError:
                raise self._connection.timeout_error() from None
