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
from collections.abc import AsyncIterator
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
from localspec.files import keepalive_options
from localspec.paths import expand_user, read_private_file
from localspec.protocol.settings import Upstream

if TYPE_CHECKING:
    import httpx2


# An HTTP/1.1 server may first send any number of 1xx responses, each with headers of its own. The HTTP
# client drops them without counting, so this module counts the bytes that are read from the network.
MAX_HEADER_BYTES = 1 << 18
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

# What this task may still read from the network before its response begins.
_header_bytes_left: ContextVar[list[int] | None] = ContextVar("header_bytes_left", default=None)


class TooManyHeaders(Exception):
    """A server sent more than MAX_HEADER_BYTES before its response."""


class UpstreamConnection:
    """A connection to the server of one pair."""

    def __init__(self, name: str, upstream: Upstream) -> None:
        self.name = name
        self.upstream = upstream
        parts = urlsplit(upstream.upstream)
        path = parts.path.rstrip("/") or "/v1"
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self._base = f"{self.origin}{path}"
        self._root = f"{self.origin}{path.removesuffix('/v1')}"
        self._who = f"server of '{name}' ({self.origin})"
        self._client: httpx2.AsyncClient | None = None
        self._client_lock = asyncio.Lock()

    async def get(self, path: str, seconds: float, body: dict[str, Any] | None = None) -> bytes:
        """Return the body of a response. Raises UpstreamError, InvalidRequest."""
        # Before the deadline is set, so that the import does not count as the server's time.
        await self._ready()
        method, deadline = "GET" if body is None else "POST", time.monotonic() + seconds
        async with self._open_response(method, path, body, deadline) as response:
            return await self._read(response, deadline, _MAX_BODY_BYTES)

    async def post(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        """Return the JSON response to a small request. Raises UpstreamError, InvalidRequest."""
        return self.decode(await self.get(path, seconds, body))

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
            are_events = media_type == "text/event-stream"
            yield ResponseLines(self, response, deadline, max_bytes, are_events)

    @contextlib.asynccontextmanager
    async def _open_response(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> AsyncIterator[httpx2.Response]:
        client = await self._ready()
        key = await asyncio.to_thread(self._key)
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

        async def send(url: str) -> httpx2.Response:
            request = client.build_request(method, url, headers=headers, content=content)
            limit = _header_bytes_left.set([MAX_HEADER_BYTES])
            try:
                async with self.within(deadline - time.monotonic()):
                    return await client.send(request, stream=True)
            finally:
                _header_bytes_left.reset(limit)

        url = f"{self._root}{path}" if path.startswith("/") else f"{self._base}/{path}"
        response = await send(url)
        try:
            if response.is_redirect:
                url = self._redirect_target(url, response)
                await response.aclose()
                response = await send(url)
            if response.status_code != 200:
                raise await self._read_error(response, key, deadline)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise self.invalid_response("it is compressed, although that was not requested")
            yield response
        finally:
            await response.aclose()

    def _redirect_target(self, url: str, response: httpx2.Response) -> str:
        """Return the target of a redirect. Raises UpstreamError if it leads to another server."""
        try:
            target = urljoin(url, response.headers.get("location", ""))
            parts = urlsplit(target)
        except ValueError:
            raise self.invalid_response("a redirect to an invalid address") from None
        if f"{parts.scheme}://{parts.netloc}" != self.origin:
            host = self.clean(target).partition("//")[2].partition("/")[0][:120]
            raise UpstreamError(
                f"The {self._who} redirects to {host}, which is not "
                "followed: the request and its key are for this server alone. If that is the one you "
                f"mean: localspec add {self.name} --upstream … --replace"
            )
        if response.status_code not in (307, 308):
            raise UpstreamError(
                f"The {self._who} redirects a request in a way that loses it ({response.status_code})."
            )
        return target

    async def _read(self, response: httpx2.Response, deadline: float, max_bytes: int) -> bytes:
        body = bytearray()
        async with self.within(deadline - time.monotonic()):
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > max_bytes:
                    raise self.invalid_response(f"it is longer than {max_bytes >> 10} KiB")
        return bytes(body)

    def invalid_response(self, reason: str) -> UpstreamError:
        """Return the error that the server's response is invalid."""
        return UpstreamError(f"Invalid response from the {self._who}: {reason}.")

    def decode(self, data: bytes) -> Any:
        """Decode JSON. Raises UpstreamError if `data` is not JSON, or has too many values."""
        if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
            raise self.invalid_response("the JSON has too many values")
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise self.invalid_response("it is not JSON") from None

    @contextlib.asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Limit the time, and replace the transport's errors by ours, without the data that they quote."""
        import httpx2

        try:
            async with asyncio.timeout(max(seconds, 0)):
                yield
        except TimeoutError:
            raise UpstreamTimeout(
                f"The {self._who} sent nothing for too long; its time-outs are set in models.toml."
            ) from None
        except TooManyHeaders:
            raise self.invalid_response("it has too many headers") from None
        except (httpx2.ConnectTimeout, httpx2.ConnectError) as error:
            raise self._connect_error(error) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            how = f" ({type(error).__name__})"
            if isinstance(error, httpx2.RemoteProtocolError):
                if not ("disconnect" in str(error) or "closed connection" in str(error)):
                    raise self.invalid_response("it is not HTTP") from None
                how = ""
            raise UpstreamUnreachable(f"The {self._who} broke the connection{how}.") from None

    def _connect_error(self, error: BaseException) -> LocalspecError:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLError):
                reason = getattr(cause, "verify_message", "") or "no secure connection can be made"
                return UpstreamError(
                    f"The {self._who} is not trusted: {reason}. Name the certificate that vouches for it: "
                    f"localspec add {self.name} --upstream … --ca FILE --replace"
                )
            cause = cause.__cause__ or cause.__context__
        in_time = " in time" * ("Timeout" in type(error).__name__)
        reason = f"it cannot be connected{in_time}"
        return UpstreamUnreachable(f"The {self._who} does not answer: {reason}.")

    async def _read_error(
        self, response: httpx2.Response, key: str, deadline: float
    ) -> LocalspecError:
        status, data, error = response.status_code, b"", None
        with contextlib.suppress(LocalspecError):
            data = await self._read(response, min(deadline, time.monotonic() + 5), _MAX_ERROR_BYTES)
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            error = msgspec.json.decode(data)
            error = error.get("error", error) if isinstance(error, dict) else error
        detail: dict[str, Any] = error if isinstance(error, dict) else {}
        text = detail.get("message") or detail.get("detail") or error
        message = self.clean(text, key) or "it gave no reason."
        refusal = f"The {self._who} refuses the request: {message}"
        match status:
            case 401 | 403 if not key:
                return UpstreamError(
                    f"The {self._who} wants a key ({status}), and none is named for it: localspec add "
                    f"{self.name} --upstream … --key-file FILE --replace"
                )
            case 401 | 403:
                return UpstreamError(
                    f"The {self._who} refuses the key ({status}). It is named by `key_env` or "
                    "`key_file` in models.toml."
                )
            case 502 | 503 | 504:
                return UpstreamUnreachable(f"The {self._who} is not ready ({status}): {message}")
            # vLLM uses OpenAI's message for this error, but sends no code.
            case 400 | 404 | 413 | 422 | 429 | 501 if (
                (status == 400 and "maximum context length" in message)
                or str(detail.get("code")) == "context_length_exceeded"
                or str(detail.get("type")) == "exceed_context_size_error"
            ):
                return ContextExceeded(refusal)
            case 400 | 413 | 422:
                field = detail.get("param")
                if not isinstance(field, str) or len(field) >= 200 or (key and key in field):
                    field = None
                return InvalidRequest(refusal, param=field)
        return UpstreamError(f"The {self._who} failed ({status}): {message}")

    def clean(self, text: object, key: str | None = None) -> str:
        """Return a server's text for a person: shortened, without control characters and without the key."""
        if not isinstance(text, str):
            return ""
        if key is None:
            with contextlib.suppress(LocalspecError):
                key = self._key()
        text = text.replace(key, "…") if key else text
        return replace_control_characters(text[:_MAX_SHOWN_CHARACTERS], lines=False)

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
        # Reads are limited by `within` instead.
        timeout = httpx2.Timeout(None, connect=connect, write=60.0)
        # Most servers close an idle connection after 5 s. A request sent at that moment would be lost.
        limits = httpx2.Limits(max_keepalive_connections=8, keepalive_expiry=4.0)
        transport = httpx2.AsyncHTTPTransport(
            verify=trust, limits=limits, trust_env=False, socket_options=keepalive_options()
        )
        _count_header_bytes(transport)
        return httpx2.AsyncClient(
            transport=transport, timeout=timeout, trust_env=False, follow_redirects=False
        )

    async def close(self) -> None:
        client, self._client = self._client, None
        if client:
            await client.aclose()


def _count_header_bytes(transport: httpx2.AsyncHTTPTransport) -> None:
    """Make the connections of a transport count the bytes that are read from them."""
    import httpcore2

    def count(stream: httpcore2.AsyncNetworkStream) -> httpcore2.AsyncNetworkStream:
        read, start_tls = stream.read, stream.start_tls

        async def counted_read(max_bytes: int, timeout: float | None = None) -> bytes:
            data = await read(max_bytes, timeout)
            if left := _header_bytes_left.get():
                left[0] -= len(data)
                if left[0] < 0:
                    raise TooManyHeaders
            return data

        async def counted_tls(*arguments: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
            return count(await start_tls(*arguments, **options))

        stream.read, stream.start_tls = counted_read, counted_tls  # type: ignore[method-assign]
        return stream

    class Backend(httpcore2.AnyIOBackend):
        async def connect_tcp(self, *address: Any, **options: Any) -> Any:
            return count(await super().connect_tcp(*address, **options))

    pool = transport._pool
    assert isinstance(pool, httpcore2.AsyncConnectionPool)
    pool._network_backend = Backend()


class ResponseLines:
    """The lines of a stream, each as soon as it has arrived.

    Until `use_silence_timeout` is called, at the first part of the answer, one deadline applies to
    everything. After that, a time limit applies to the silence between two chunks.

    are_events: whether they are server-sent events, or else one JSON object.
    """

    def __init__(
        self,
        connection: UpstreamConnection,
        response: httpx2.Response,
        deadline: float,
        max_bytes: int,
        are_events: bool,
    ) -> None:
        self._connection = connection
        self._bytes_left = max_bytes
        self._chunks = response.aiter_raw()
        self._deadline = deadline
        self._silence: float | None = None
        self.are_events = are_events

    def use_silence_timeout(self) -> None:
        self._silence = self._connection.upstream.silence_timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the lines without their ends. The last one may be incomplete.

        Raises:
            UpstreamError, UpstreamTimeout: The stream broke off, is too long, or does not go on.
        """
        buffer, invalid = bytearray(), self._connection.invalid_response
        while True:
            seconds = self._silence
            if seconds is None:
                seconds = self._deadline - time.monotonic()
            async with self._connection.within(seconds):
                chunk = await anext(self._chunks, b"")
            if not chunk:
                break
            self._bytes_left -= len(chunk)
            if self._bytes_left < 0:
                raise invalid("it is longer than was requested")
            buffer += chunk
            if b"\n" in chunk:
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    yield bytes(line).removesuffix(b"\r")
            if len(buffer) > MAX_LINE_BYTES:
                raise invalid(f"a line has more than {MAX_LINE_BYTES >> 20} MiB")
        if buffer:
            yield bytes(buffer).removesuffix(b"\r")
