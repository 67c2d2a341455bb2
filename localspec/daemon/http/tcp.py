"""The TCP listener, which is off by default: where it may listen, and who may use it.

A web page can send requests to any port of its reader's machine, and its owner can make a domain name
point there (DNS rebinding). So a request must name a host that is certainly this machine, must not come
from a foreign web page, and must carry the token. A person can allow more host names and pages
(`allow_hosts`, `allow_origins`); requests with these need the token too.
"""

from __future__ import annotations

import base64
import errno
import hmac
import ipaddress
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from localspec import files
from localspec.config import Config, host_and_port, split_list
from localspec.daemon.http import errors
from localspec.daemon.http.connection import UNIX_HOST
from localspec.errors import Forbidden, Unauthorized, UnsafePath, UsageError

# Paths without a token. As in llama-server, a program that waits for the daemon may not have it yet.
_PUBLIC_PATHS = frozenset({"/health"})
_TOKEN_BYTES = 32
# Bearer is first, because some clients read one scheme only.
_CHALLENGE = 'Bearer, Basic realm="localspec"'


@dataclass(frozen=True, slots=True)
class TcpAuth:
    """The address and the token for TCP clients, and the `hosts` and `origins` that a person also allows."""

    url: str
    address: str
    token: str
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def check_origin(self, headers: Headers, *, without_host: bool = False) -> str:
        """Return the origin of the web page that sends the request, if it is an allowed foreign one, or "".

        `without_host`: whether the Host header may be missing, as in HTTP/1.0, which no browser speaks.

        Raises:
            Forbidden: The request names another host, or comes from a web page that is not allowed.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        hostless = without_host and "host" not in headers
        if not hostless and not self._is_our_host(host):
            allowed = "other names are allowed by `allow_hosts`."
            names = f"The Host header names {host!r}, which is not this daemon's address"
            raise Forbidden(f"{names}; {allowed}")
        # Through an SSH tunnel the port may differ from ours, but then it does so in both headers.
        foreign = "" if origin in (None, f"http://{host}") else str(origin)
        scheme = foreign.partition("://")[0].lower()
        if foreign and self.origins.isdisjoint({"*", foreign.lower(), f"{scheme}://*"}):
            pages = f"Requests from web pages at {foreign!r}"
            raise Forbidden(f"{pages} are not allowed; they are by `allow_origins`.")
        return foreign

    def check_token(self, headers: Headers) -> None:
        """Check the token of a request. Raises Unauthorized: the token is missing or wrong."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip().encode() if scheme.lower() == "bearer" else b""
        # A browser adds a password that it knows to the requests of foreign pages, too. Only those that have
        # an Origin have been checked.
        site = headers.get("sec-fetch-site", "none")
        if scheme.lower() == "basic" and ("origin" in headers or site in ("none", "same-origin")):
            with suppress(ValueError):  # the password, whatever the user's name
                credentials = base64.b64decode(given.strip(), validate=True)
                token = credentials.partition(b":")[2]
        expected = self.token.encode()
        # Clients may send a placeholder in one of the headers, so any header may hold the token.
        matches = hmac.compare_digest(token, expected)
        for name in ("x-api-key", "api-key"):  # sent by Anthropic's and by Azure's clients
            matches |= hmac.compare_digest(headers.get(name, "").strip().encode(), expected)
        if not matches:
            raise Unauthorized("The bearer token is missing or wrong; `localspec token` prints it.")

    def _is_our_host(self, host: str) -> bool:
        name, colon, port = host.rpartition(":")
        if not colon or not port.isdecimal():
            name = host
        if name.lower() == "localhost" or name.lower() in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        bound = ipaddress.ip_address(self.address)
        # If we listen on all addresses, any numeric address is fine: DNS rebinding needs a name.
        return address.is_loopback or address == bound or bound.is_unspecified


def came_by_tcp(scope: Scope) -> bool:
    """Return whether a request came over TCP and not from the owner's Unix socket."""
    client = scope.get("client")
    return client is None or client[0] != UNIX_HOST


_by_tcp: ContextVar[bool] = ContextVar("by_tcp", default=False)


def is_tcp_request() -> bool:
    """Return whether the current task or thread works for a request that came over TCP."""
    return _by_tcp.get()


class TcpAuthMiddleware:
    """A middleware that checks requests over TCP. For the Unix socket the kernel has checked the user."""

    def __init__(self, app: ASGIApp, auth: Callable[[], TcpAuth | None]) -> None:
        """Wrap `app`. `auth` returns the current credentials, or None while TCP is not served."""
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        by_tcp = scope["type"] == "http" and came_by_tcp(scope)
        _by_tcp.set(by_tcp)
        app = self._checked(scope) if by_tcp else self._app
        await app(scope, receive, send)

    def _checked(self, scope: Scope) -> ASGIApp:
        """Return the app for a request that may use it, otherwise a refusal."""
        app, headers, origin = self._app, Headers(scope=scope), ""
        try:
            if (auth := self._auth()) is None:
                raise Forbidden("The daemon does not serve TCP.")
            origin = auth.check_origin(headers, without_host=scope.get("http_version") == "1.0")
            # Browsers send preflight requests (OPTIONS) without a token.
            if scope["path"] not in _PUBLIC_PATHS and scope["method"] != "OPTIONS":
                auth.check_token(headers)
        except (Forbidden, Unauthorized) as error:
            app = response = errors.ErrorResponse(error)
            if isinstance(error, Unauthorized):
                response.headers["www-authenticate"] = _CHALLENGE
        if not origin:
            return app
        # Without these headers a browser hides a response from the page. Here the page is already allowed.
        return CORSMiddleware(
            app,
            allow_origins=(origin,),
            allow_methods=("DELETE", "GET", "HEAD", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("Retry-After",),
        )


def bind(config: Config) -> socket.socket:
    """Listen on the address of `config.listen`. Raises UsageError if that is not possible."""
    host, port = host_and_port(config.listen)
    address = ipaddress.ip_address(host)
    # The configuration is checked earlier too.
    if not address.is_loopback and not config.listen_anywhere:
        raise UsageError(f"{config.listen} can be reached from other machines.")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, port))
        # Listen now and not when serving begins, because two programs may bind a port as long as
        # neither listens.
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


def create_auth(listening: socket.socket, token: str) -> TcpAuth:
    """Return the credentials for a bound socket, with the port that it got if the configured one was 0."""
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return TcpAuth(url, host, token)


def with_allowed_names(auth: TcpAuth, config: Config) -> TcpAuth:
    """Return `auth` with the hosts and origins that the configuration allows now."""
    hosts, origins = config.allow_hosts.lower(), config.allow_origins.lower()
    return replace(auth, hosts=frozenset(split_list(hosts)), origins=frozenset(split_list(origins)))


def load_token(file: Path) -> str:
    """Return the bearer token, which is created at the first use in a file that only its owner can read.

    Raises:
        UnsafePath: Other users can read the file, it is a link, or it holds no valid token.
    """
    try:
        if token := _read_token(file):
            return token
    except FileNotFoundError:
        pass
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_atomically(file, f"{os.urandom(_TOKEN_BYTES).hex()}\n".encode())
    except OSError as error:
        raise UnsafePath(
            f"The token file {file} cannot be written ({error.strerror}); free some space "
            "there, or start without `listen`."
        ) from error
    return _read_token(file)


def _read_token(file: Path) -> str:
    """Return the token, or "" if the file is empty, as after a full disk."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnsafePath(f"The token file {file} cannot be read: {error.strerror}.") from error
    with os.fdopen(descriptor, "rb") as stream:
        info = os.fstat(stream.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            raise UnsafePath(
                f"The token file {file} is not a file that you own; remove it and try again."
            )
        if info.st_mode & 0o077:
            raise UnsafePath(
                f"The token file {file} was open to other users; remove it, and a new one will be "
                "created."
            )
        token = stream.read(1024).decode("ascii", "replace").strip()
    if token and len(token) < _TOKEN_BYTES:
        raise UnsafePath(
            f"The token in {file} is too short; remove the file, and a new one will be created."
        )
    return token
