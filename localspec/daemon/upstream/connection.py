"""HTTP to one server: TLS is always verified, its key goes to it alone, and nothing is held back.

The key is read anew for each request, stands in one header of it, and in no text of ours: what a server
says is searched for it before it is told on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import msgspec

import localspec
from localspec.daemon.upstream.headers import TooManyHeaders, limit_headers, limited_headers
from localspec.errors import (
    ContextExceeded,
    InvalidRequest,
    LocalspecError,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
    visible,
)
from localspec.links import noticing_cuts
from localspec.paths import read_private_file
from localspec.protocol.settings import Upstream

if TYPE_CHECKING:
    import httpx2

MAX_LINE = 4 << 20  # bytes of one event; an answer's own text comes in pieces of some characters
MAX_ANSWER_BYTES = 64 << 20  # of a whole stream, its events' own words included
# Lists and objects of one body or event. They cost most: a body of nothing else takes seconds to decode, and
# the event loop stands still for it, in a thread as well.
_MAX_CONTAINERS = 200_000
_MAX_BODY = 8 << 20  # of what is read whole
_MAX_SAID = 1 << 16  # of an error
_SHOWN = 300  # characters of what a server says
# Where another pair stands in for one that does not answer, whoever asked waits no longer.
_PATIENCE = 0.8  # seconds


class Connection:
    """To the server of one pair."""

    def __init__(self, name: str, upstream: Upstream) -> None:
        self.name = name
        self.upstream = upstream
        parts = urlsplit(upstream.upstream)
        path = parts.path.rstrip("/") or "/v1"
        self.root = f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v1')}"
        self.base = f"{parts.scheme}://{parts.netloc}{path}"
        self.place = f"{parts.scheme}://{parts.netloc}"
        self._client: httpx2.AsyncClient | None = None
        self._making = asyncio.Lock()

    # ------------------------------------------------------------------ requests

    async def get(self, path: str, seconds: float) -> bytes:
        """What is there, whole. Raises UpstreamError, InvalidRequest."""
        await self._ready()  # which is no time of the server's
        deadline = time.monotonic() + seconds
        async with self._sent("GET", path, None, deadline) as response:
            return await self._read(response, deadline, _MAX_BODY)

    async def ask(self, path: str, body: dict[str, Any], seconds: float) -> Any:
        """The answer to a small request, as JSON. Raises UpstreamError, InvalidRequest."""
        await self._ready()
        deadline = time.monotonic() + seconds
        async with self._sent("POST", path, body, deadline) as response:
            return self.decoded(await self._read(response, deadline, _MAX_BODY))

    @contextlib.asynccontextmanager
    async def streamed(
        self, path: str, body: dict[str, Any], most: int = MAX_ANSWER_BYTES
    ) -> AsyncIterator[Lines]:
        """A request whose answer comes in lines, of at most so many bytes together. Leaving closes the
        connection, unless all of it came.

        Raises:
            UpstreamUnreachable: nobody answers. UpstreamError, UpstreamTimeout, InvalidRequest: the
            server's refusal.
        """
        await self._ready()
        deadline = time.monotonic() + self.upstream.first_token_timeout
        async with self._sent("POST", path, body, deadline) as response:
            said = response.headers.get("content-type", "")
            if said.partition(";")[0].strip().lower() != "text/event-stream":
                kind = self.clean(said)[:80]
                raise self.nonsense(f"it sent '{kind}' in place of an event stream")
            yield Lines(self, response, deadline, most)

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: dict[str, Any] | None, deadline: float
    ) -> AsyncIterator[httpx2.Response]:
        client = await self._ready()
        key = await asyncio.to_thread(self._key)
        url = f"{self.root}{path}" if path.startswith("/") else f"{self.base}/{path}"
        response = await self._send(client, method, url, key, body, deadline)
        try:
            if response.is_redirect:
                url = self._led_to(url, response)
                await response.aclose()
                response = await self._send(client, method, url, key, body, deadline)
            if response.status_code != 200:
                raise await self._refused(response, key, deadline)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise self.nonsense("it compressed what was asked for as it is")
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
        with self._told(), limited_headers():
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    return await client.send(request, stream=True)
            except TimeoutError:
                raise self.late() from None
            except TooManyHeaders:
                raise self.nonsense("it sent more headers than an answer has") from None

    def _led_to(self, url: str, response: httpx2.Response) -> str:
        """Where a redirect leads, on this very server. Raises UpstreamError: elsewhere."""
        try:
            there = urljoin(url, response.headers.get("location", ""))
            parts = urlsplit(there)
        except ValueError:
            raise self.nonsense("it redirects to what is no address") from None
        same = f"{parts.scheme}://{parts.netloc}" == self.place
        if not same or response.status_code not in (307, 308):
            named = self.clean(there).partition("//")[2].partition("/")[0][:120]
            raise UpstreamError(
                f"{self._who} redirects to {named}, which is not "
                "followed: the request and its key are for this server alone. If that is the one you "
                f"mean: localspec add {self.name} --upstream … --replace"
                if not same
                else f"{self._who} redirects a request in a way that loses it ({response.status_code})."
            )
        return there

    async def _read(self, response: httpx2.Response, deadline: float, most: int) -> bytes:
        found = bytearray()
        with self._told():
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    async for chunk in response.aiter_raw():
                        found += chunk
                        if len(found) > most:
                            raise self.nonsense("it sent more than an answer can be")
            except TimeoutError:
                raise self.late() from None
        return bytes(found)

    # ------------------------------------------------------------------ what is told of it

    @property
    def _who(self) -> str:
        return f"The server of '{self.name}' ({self.place})"

    def nonsense(self, what: str) -> UpstreamError:
        """It sent something that is no answer."""
        return UpstreamError(f"{self._who} sent no valid answer: {what}.")

    def late(self) -> UpstreamTimeout:
        return UpstreamTimeout(
            f"{self._who} sent nothing for too long; its time-outs are set in models.toml."
        )

    def decoded(self, data: bytes) -> Any:
        """Decode JSON. Raises UpstreamError if it is none, or has too many values."""
        if data.count(b"[") + data.count(b"{") > _MAX_CONTAINERS:
            raise self.nonsense("its JSON has too many values")
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise self.nonsense("it is no JSON") from None

    @contextlib.contextmanager
    def _told(self) -> Any:
        """The transport's errors as ours, without what they quote."""
        import httpx2

        try:
            yield
        except (httpx2.ConnectTimeout, httpx2.ConnectError) as error:
            raise self._not_there(error) from None
        except httpx2.RemoteProtocolError as error:
            broken = "disconnect" in str(error) or "closed connection" in str(error)
            if broken:
                raise UpstreamUnreachable(f"{self._who} broke the connection.") from None
            raise self.nonsense("it speaks no HTTP") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise UpstreamUnreachable(
                f"{self._who} broke the connection ({type(error).__name__})."
            ) from None

    def _not_there(self, error: BaseException) -> LocalspecError:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLError):
                why = getattr(cause, "verify_message", "") or "no secure connection can be made"
                return UpstreamError(
                    f"{self._who} is not trusted: {why}. Name the certificate that vouches for it: "
                    f"localspec add {self.name} --upstream … --ca FILE --replace"
                )
            cause = cause.__cause__ or cause.__context__
        late = "Timeout" in type(error).__name__
        why = "it cannot be connected in time" if late else "it cannot be connected"
        return UpstreamUnreachable(f"{self._who} does not answer: {why}.")

    async def _refused(
        self, response: httpx2.Response, key: str, deadline: float
    ) -> LocalspecError:
        status = response.status_code
        data = b""
        with contextlib.suppress(LocalspecError):
            data = await self._read(response, min(deadline, time.monotonic() + 5), _MAX_SAID)
        said, error = self._said(data, key)
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
            return UpstreamUnreachable(f"{self._who} is not ready ({status}): {said}")
        if status in (400, 404, 413, 422, 429, 501):
            code, kind = str(error.get("code")), str(error.get("type"))
            # vLLM has OpenAI's words for it and no code.
            long = status == 400 and "maximum context length" in said
            if long or code == "context_length_exceeded" or kind == "exceed_context_size_error":
                return ContextExceeded(f"{self._who} refuses the request: {said}")
            if status in (400, 413, 422):
                param = error.get("param")
                named = param if isinstance(param, str) and len(param) < 200 else None
                named = None if named is None or (key and key in named) else named
                return InvalidRequest(f"{self._who} refuses the request: {said}", param=named)
        return UpstreamError(f"{self._who} failed ({status}): {said}")

    def _said(self, data: bytes, key: str) -> tuple[str, dict[str, Any]]:
        """What an error's body says, in whichever shape, and the error; never the key."""
        error: Any = None
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            error = msgspec.json.decode(data)
            error = error.get("error", error) if isinstance(error, dict) else error
        found = error if isinstance(error, dict) else {}
        text = found.get("message") or found.get("detail") or error
        return self.clean(text, key) or "it says nothing more.", found

    def clean(self, text: object, key: str | None = None) -> str:
        """What a server says, for a person: short, harmless, and without its key."""
        if not isinstance(text, str):
            return ""
        if key is None:
            with contextlib.suppress(LocalspecError):
                key = self._key()
        text = text.replace(key, "…") if key else text
        return visible(text[:_SHOWN], lines=False)

    # ------------------------------------------------------------------ key and client

    def _key(self) -> str:
        """Raises UpstreamError: it is named and not there."""
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
            # Its path is not repeated: this may go to a client that came by TCP.
            where = f"The key file of '{self.name}' (key_file in models.toml)"
            try:
                key = read_private_file(Path(upstream.key_file).expanduser()).decode("ascii")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is no text"
                more = "; use chmod 600" if "other users" in str(why) else ""
                raise UpstreamError(f"{where} cannot be read: {why}{more}.") from None
            if not (key := key.strip()):
                raise UpstreamError(f"{where} is empty.")
        if not (key.isascii() and key.isprintable()) or len(key) > 1 << 14:
            raise UpstreamError(f"The key for '{self.name}' is not one line of plain characters.")
        return key

    async def _ready(self) -> httpx2.AsyncClient:
        """The client, made when it is first needed: its import takes a moment, and memory."""
        async with self._making:
            if self._client is None:
                self._client = await asyncio.to_thread(self._made)
            return self._client

    def _made(self) -> httpx2.AsyncClient:
        # The last of these would be imported with the first connection, while the clock of a request runs.
        import httpx2
        from anyio import connect_tcp  # noqa: F401
        from anyio._backends import _asyncio  # noqa: F401

        for name in ("httpx2", "httpcore2"):  # every request has a line of theirs
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            trust = httpx2.create_ssl_context(trust_env=False)
            if self.upstream.ca:
                trust = ssl.create_default_context(cafile=Path(self.upstream.ca).expanduser())
        except (OSError, ssl.SSLError):
            raise UpstreamError(
                f"The certificates for '{self.name}' (ca in models.toml) cannot be read."
            ) from None
        connect = self.upstream.connect_timeout
        if self.upstream.fallback:
            connect = min(connect, _PATIENCE)
        # Reads have limits of their own, see Lines.
        times = httpx2.Timeout(None, connect=connect, write=60.0)
        # Most servers close after five seconds, and what crosses that on its way is lost.
        limits = httpx2.Limits(max_keepalive_connections=8, keepalive_expiry=4.0)
        transport = httpx2.AsyncHTTPTransport(
            verify=trust, limits=limits, trust_env=False, socket_options=noticing_cuts()
        )
        limit_headers(transport)
        return httpx2.AsyncClient(
            transport=transport, timeout=times, trust_env=False, follow_redirects=False
        )

    async def close(self) -> None:
        client, self._client = self._client, None
        if client:
            await client.aclose()


class Lines:
    """The lines of a stream, each as soon as it is there.

    `heard` is called by whoever has seen the first of an answer: until then there is one time for all of
    it, and from then on one between two lines.
    """

    def __init__(
        self, connection: Connection, response: httpx2.Response, deadline: float, most: int
    ) -> None:
        self._connection = connection
        self._bytes_left = most
        self._chunks = response.aiter_raw()
        self._deadline = deadline
        self._silence: float | None = None

    def heard(self) -> None:
        self._silence = self._connection.upstream.silence_timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Without their ends; one that was not ended is the last.

        Raises:
            UpstreamError, UpstreamTimeout: it is cut, too long, or does not go on.
        """
        rest = bytearray()
        while chunk := await self._chunk():
            self._bytes_left -= len(chunk)
            if self._bytes_left < 0:
                raise self._connection.nonsense("it sent more than was asked for")
            rest += chunk
            if b"\n" in chunk:
                *lines, last = rest.split(b"\n")
                rest = bytearray(last)
                for line in lines:
                    yield bytes(line).removesuffix(b"\r")
            if len(rest) > MAX_LINE:
                raise self._connection.nonsense(f"a line has more than {MAX_LINE >> 20} MiB")
        if rest:
            yield bytes(rest)

    async def _chunk(self) -> bytes:
        now = time.monotonic()
        left = self._silence if self._silence is not None else max(self._deadline - now, 0)
        with self._connection._told():
            try:
                async with asyncio.timeout(left):
                    return await anext(self._chunks, b"")
            except TimeoutError:
                raise self._connection.late() from None
