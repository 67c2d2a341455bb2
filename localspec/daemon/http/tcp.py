"""The TCP listener, off by default: where it may listen, and who may speak there.

A web page can send requests to any port of the machine its reader sits at, and a name of its own can
be made to point there (DNS rebinding). So a request must name the host it means by a name that only
this machine has, come from no foreign page, and carry the token. A person can allow more names and pages
(`allow_hosts`, `allow_origins`), and these need the token, too.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localspec import files
from localspec.config import Config, host_and_port, listed
from localspec.daemon.http import errors
from localspec.daemon.http.connection import UNIX
from localspec.errors import Forbidden, Unauthorized, UnsafePath, UsageError

_OPEN = frozenset({"/health"})  # as llama-server's: whoever waits for the daemon has no token yet
_TOKEN_BYTES = 32
_ASKED_AGAIN = "600"  # seconds that a browser keeps what it was allowed


@dataclass(frozen=True, slots=True)
class TcpAuth:
    """Where TCP clients come in, and by which token; `hosts` and `origins` that a person allows besides."""

    url: str
    address: str
    token: str
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def page(self, headers: Headers, *, without_host: bool = False) -> str:
        """The origin of the web page that asks, one of those that may, or "".

        without_host: there need be no Host header, since HTTP/1.0 has none. No browser sends such a request.

        Raises:
            Forbidden: the request means another host, or comes from another web page.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        hostless = without_host and "host" not in headers
        if not hostless and not self._is_here(host):
            raise Forbidden(
                f"The Host header names {host!r}, which is not this daemon's address; other names are "
                "allowed by `allow_hosts`."
            )
        # The port may differ from ours, through an SSH tunnel; then it does in both.
        foreign = "" if origin in (None, f"http://{host}") else str(origin)
        if foreign and not self._is_allowed(foreign):
            raise Forbidden(
                f"Requests from web pages at {foreign!r} are not allowed; they are by `allow_origins`."
            )
        return foreign

    def check_token(self, headers: Headers) -> None:
        """Raises Unauthorized: a request has not the token."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        ours = self.token.encode()
        # One of the two may be a placeholder.
        right = hmac.compare_digest(bearer.encode(), ours)
        for name in ("x-api-key", "api-key"):  # Anthropic's clients send the one, Azure's the other
            right |= hmac.compare_digest(headers.get(name, "").strip().encode(), ours)
        if not right:
            raise Unauthorized("The bearer token is missing or wrong; `localspec token` prints it.")

    def _is_allowed(self, origin: str) -> bool:
        scheme = origin.partition("://")[0]
        return not self.origins.isdisjoint({"*", origin.lower(), f"{scheme.lower()}://*"})

    def _is_here(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        if not colon or not port.isdigit():
            name = host
        if name.lower() == "localhost" or name.lower() in self.hosts:
            return True
        try:
            named = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        bound = ipaddress.ip_address(self.address)
        # Listening everywhere, any number will do: rebinding needs a name.
        return named.is_loopback or named == bound or bound.is_unspecified


def came_by_tcp(scope: Scope) -> bool:
    """Whether a request came from a holder of the token and not from the owner's own socket."""
    client = scope.get("client")
    return client is None or client[0] != UNIX


_by_tcp: ContextVar[bool] = ContextVar("by_tcp", default=False)


def answers_tcp() -> bool:
    """Whether what runs now, also in a thread, runs for a request that came by TCP."""
    return _by_tcp.get()


class TcpAuthMiddleware:
    """Checks requests that did not come over the Unix socket, where the kernel has done so."""

    def __init__(self, app: ASGIApp, auth: Callable[[], TcpAuth | None]) -> None:
        """`auth`: what there is at the time of the request."""
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and came_by_tcp(scope):
            try:
                if (auth := self._auth()) is None:
                    raise Forbidden("The daemon does not serve TCP.")
                headers = Headers(scope=scope)
                hostless = scope.get("http_version") == "1.0"
                if origin := auth.page(headers, without_host=hostless):
                    send = _for_a_page(origin, headers, send)
                # What is allowed is asked without a token: browsers have no other way.
                if scope["path"] not in _OPEN and scope["method"] != "OPTIONS":
                    auth.check_token(headers)
            except (Forbidden, Unauthorized) as error:
                answer = errors.Refusal(error)
                if isinstance(error, Unauthorized):
                    answer.headers["www-authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
        _by_tcp.set(scope["type"] == "http" and came_by_tcp(scope))
        await self._app(scope, receive, send)


def _for_a_page(origin: str, asked: Headers, send: Send) -> Send:
    """Adds what a browser must read before a page of that origin may see the answer (CORS)."""
    more = {"access-control-allow-origin": origin, "vary": "Origin"}
    if "access-control-request-method" in asked:  # it asks before it asks
        more["access-control-allow-methods"] = "GET, POST, DELETE"
        more["access-control-max-age"] = _ASKED_AGAIN
        if headers := asked.get("access-control-request-headers"):
            more["access-control-allow-headers"] = headers
        if "access-control-request-private-network" in asked:
            more["access-control-allow-private-network"] = "true"
    else:
        more["access-control-expose-headers"] = "Retry-After"

    async def allowing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            headers.update(more)
            message = {**message, "headers": headers.raw}
        await send(message)

    return allowing


def bind(config: Config) -> socket.socket:
    """Listen where `config.listen` says.

    Raises:
        UsageError: the port is taken or not allowed, or the address is not of this machine.
    """
    host, port = host_and_port(config.listen)
    address = ipaddress.ip_address(host)
    if not address.is_loopback and not config.listen_anywhere:  # a configuration sees to it before
        raise UsageError(f"{config.listen} can be reached from other machines.")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        # Here and not when serving begins: two may be bound to a port that nobody listens on.
        listening.listen(128)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} of {host} is in use by another program; choose another one "
                "(`listen` in config.toml, or --listen)."
            ) from error
        raise UsageError(f"Cannot listen on {config.listen}: {error.strerror}.") from error
    return listening


def auth_of(listening: socket.socket, token: str) -> TcpAuth:
    """That of a bound socket; its port is the one that 0 stood for."""
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return TcpAuth(url, host, token)


def allowing(auth: TcpAuth, config: Config) -> TcpAuth:
    """The same with the hosts and origins that the configuration allows now."""
    hosts, origins = (
        frozenset(listed(each.lower())) for each in (config.allow_hosts, config.allow_origins)
    )
    return replace(auth, hosts=hosts, origins=origins)


def kept_token(file: Path) -> str:
    """The bearer token, made at the first use and kept, readable by its owner only.

    Raises:
        UnsafePath: others may read the file, it is a link, or it holds no token.
    """
    try:
        if found := _read(file):
            return found
    except FileNotFoundError:
        pass
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_whole(file, f"{os.urandom(_TOKEN_BYTES).hex()}\n".encode())
    except OSError as error:
        raise UnsafePath(
            f"The token file {file} cannot be written ({error.strerror}); free some space "
            "there, or start without `listen`."
        ) from error
    return _read(file)


def _read(file: Path) -> str:
    """The token; "" of an empty file, which a full disk has left."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnsafePath(f"The token file {file} cannot be read: {error.strerror}.") from error
    with os.fdopen(handle, "rb") as opened:
        info = os.fstat(opened.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            raise UnsafePath(
                f"The token file {file} is not a file that you own; remove it and try again."
            )
        if info.st_mode & 0o077:
            raise UnsafePath(
                f"The token file {file} was open to other users; remove it, and a new one will be "
                "created."
            )
        found = opened.read(1024).decode("ascii", "replace").strip()
    if found and len(found) < _TOKEN_BYTES:
        raise UnsafePath(
            f"The token in {file} is too short; remove the file, and a new one will be created."
        )
    return found
