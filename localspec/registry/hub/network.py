"""Explain why a request to the hub failed and what to do about it, and make the HTTP client for requests.

A pull is a process of its own with the network variables of the shell that requested it. httpx2 does not read
them itself: it would refuse a proxy that no request needs, and could not say which variable is wrong.

No sentence contains a token or password. Messages of HTTP libraries are not passed on, since they may contain
signed URLs.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from localspec import installation
from localspec.errors import (
    BadToken,
    Gated,
    HubError,
    LocalspecError,
    NetworkSettings,
    NotOnHub,
    ProxyRefused,
    Unreachable,
    Untrusted,
    WebPage,
)
from localspec.registry.hub.offline import HUB_URL, find_endpoint
from localspec.registry.hub.retry import RetryableError

if TYPE_CHECKING:
    import httpx2

_BUSY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses of a storage server whose signed URL has expired, or that does not have the file yet. The next try
# gets a fresh URL from the hub.
_REFUSED_STATUSES = frozenset({401, 403, 404, 410, 416})
_MAX_REFUSED_TRIES = 5
_TOKENS_URL = "https://huggingface.co/settings/tokens"
_MAX_PAUSE_S = 300.0  # a server may ask for more, but nobody waits that long
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy and the variable that names it. `url` may contain a password; `place`, HOST:PORT, does not."""

    variable: str
    url: str = field(repr=False)

    @property
    def place(self) -> str:
        return self.url.rpartition("://")[2].rpartition("@")[2].rstrip("/")

    def __str__(self) -> str:
        return f"the proxy {self.place} ({self.variable})"


def find_proxy(url: httpx2.URL) -> Proxy | None:
    """Return the proxy that leads to a URL, or None. A variable in lower case wins."""
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    spared = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).replace(",", " ").lower()
    if any(_is_spared(entry, url.host, port) for entry in spared.split()):
        return None
    for name in (f"{url.scheme}_proxy", "all_proxy"):
        variable = name if name in os.environ else name.upper()
        if address := os.environ.get(variable, "").strip():
            return Proxy(variable, address if "://" in address else f"http://{address}")
    return None


def _is_spared(entry: str, host: str, port: int | None) -> bool:
    """Return whether an entry of NO_PROXY covers a host. As in curl, a name also covers its subdomains."""
    if entry == "*":
        return True
    entry = entry.partition("://")[2] or entry
    with suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    try:
        parts = urlsplit(f"//{entry}")
        if parts.port not in (None, port):
            return False
    except ValueError:
        return False
    name = (parts.hostname or "").removeprefix("*").removeprefix(".")
    return bool(name) and f".{host.lower()}".endswith(f".{name}")


def make_client() -> httpx2.Client:
    """Return a new HTTP client, which sends each request directly or through the proxy for its address.

    The caller closes it. A request raises NetworkSettings if its proxy or certificates cannot be used.
    """
    import httpx2

    class RoutingTransport(httpx2.BaseTransport):
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._transports: dict[tuple[Proxy | None, bool], httpx2.HTTPTransport] = {}

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            key = (find_proxy(request.url), request.url.scheme == "https")
            with self._lock:
                if key not in self._transports:
                    self._transports[key] = _make_transport(*key)
            return self._transports[key].handle_request(request)

        def close(self) -> None:
            for transport in self._transports.values():
                transport.close()

    return httpx2.Client(transport=RoutingTransport(), trust_env=False)


def _make_transport(proxy: Proxy | None, secure: bool) -> httpx2.HTTPTransport:
    """Return a transport for servers with TLS (`secure`) or without, directly or through a proxy."""
    import httpx2

    # Without TLS no certificate is used, so a missing certificate file does not matter.
    context = _make_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if proxy is None:
        return httpx2.HTTPTransport(verify=context, trust_env=False)
    scheme = proxy.url.partition("://")[0].lower()
    if scheme not in _PROXY_SCHEMES:
        raise NetworkSettings(
            f"{proxy.variable} names a proxy of an unsupported kind ({scheme}); http, https, socks5 and "
            "socks5h are supported."
        )
    try:
        own_context = _make_ssl_context() if scheme == "https" else None
        upstream = httpx2.Proxy(proxy.url, ssl_context=own_context)
        return httpx2.HTTPTransport(verify=context, trust_env=False, proxy=upstream)
    except ImportError:
        raise NetworkSettings(
            f"{proxy.variable} names a SOCKS proxy ({proxy.place}), but the package for SOCKS "
            f"is missing; use an HTTP proxy, or run: {installation.install_packages_command('socksio')}"
        ) from None
    except (ValueError, httpx2.InvalidURL):
        raise NetworkSettings(
            f"{proxy.variable} is not a valid proxy address; it must look like http://HOST:PORT."
        ) from None


def _make_ssl_context() -> ssl.SSLContext:
    """Return a TLS context with the certificates that the variables name, or the system's."""
    import httpx2

    named = _list_certificates()
    if not named:
        return httpx2.create_ssl_context(trust_env=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for variable, name in named.items():
        folders = [folder for folder in name.split(os.pathsep) if os.path.isdir(folder)]  # noqa: PTH112 - raises nothing
        for folder in folders:
            context.load_verify_locations(capath=folder)
        if folders or variable == "SSL_CERT_DIR":
            continue
        try:
            context.load_verify_locations(cafile=name)
            continue
        except ssl.SSLError:
            problem = "contains no certificates"
        except FileNotFoundError:
            problem = "does not exist"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        raise NetworkSettings(
            f"{variable} names {name}, which {problem}; correct or unset it, and try again."
        )
    return context


def _list_certificates() -> dict[str, str]:
    """Return the files or folders that replace the system's certificates, by variable."""
    return {name: os.environ[name] for name in _CERTIFICATE_VARIABLES if os.environ.get(name)}


def web_page_error(endpoint: str, repo: str) -> WebPage:
    """Return the error for a web page in place of the hub's response."""
    if endpoint.rstrip("/") == HUB_URL:
        return WebPage(
            f"Something between this machine and the hub answered for {repo} with a page of "
            "its own (perhaps the network's login page); open a browser, log in, and try "
            "again."
        )
    return WebPage(
        f"{_without_credentials(endpoint)} (HF_ENDPOINT) answered for {repo} with a page of its own "
        "(perhaps the network's login page, or it is not a hub); check HF_ENDPOINT, or "
        "open a browser, log in, and try again."
    )


def error_from_status(response: httpx2.Response, endpoint: str, repo: str, file: str) -> Exception:
    """Return the error for a response whose status is neither 200 nor 206.

    file: the requested file; empty if the request was for the repository.
    """
    import httpx2

    status, code = response.status_code, response.headers.get("x-error-code", "")
    url = response.request.url
    retry_after = _parse_retry_after(response.headers)
    if status == 407:
        return _proxy_error(find_proxy(url), status, url.host)
    if status in _BUSY_STATUSES:
        return RetryableError(f"the hub answered {status}", retry_after=retry_after)
    is_from_storage = bool(response.history) and url.host != httpx2.URL(endpoint).host
    if status in _REFUSED_STATUSES and is_from_storage:
        return RetryableError(
            f"{url.host} answered {status}",
            f"if it lasts, ask whoever runs the network whether {url.host} is blocked",
            retry_after=retry_after,
            what=f"The hub's storage refuses to send a file of {repo}",
            max_tries=_MAX_REFUSED_TRIES,
        )
    if status in (401, 403):
        return _access_error(response, repo)
    if code == "RepoNotFound" or (status == 404 and not code):
        if "text/html" in response.headers.get("content-type", "") and endpoint != HUB_URL:
            return web_page_error(endpoint, repo)
        return _no_repository_error(repo)
    if status == 404:
        missing = f"file {file} in {repo} at that revision" if file else f"such revision of {repo}"
        return NotOnHub(f"The hub has no {missing}.")
    return HubError(f"The hub answered {status} for {repo}/{file}.")


def _access_error(response: httpx2.Response, repo: str) -> Exception:
    """Return the error for a 401 or 403.

    The hub sends these for several reasons, and a proxy on the way may send them too.
    """
    status, code = response.status_code, response.headers.get("x-error-code", "")
    request = response.request
    sent_token = "authorization" in request.headers
    terms = f"accept its terms at https://huggingface.co/{repo}"
    renewal = f"create a new one at {_TOKENS_URL}, then run: hf auth login, or set HF_TOKEN"
    if code == "GatedRepo" and not sent_token:
        return Gated(f"{repo} is gated: {terms}, then log in (hf auth login) or set HF_TOKEN.")
    if code == "GatedRepo" and status == 401:
        return Gated(
            f"{repo} is gated, and the hub does not accept the token that was sent (401: perhaps "
            f"expired or mistyped); {terms} and {renewal}."
        )
    if code == "GatedRepo":
        return Gated(
            f"{repo} is gated: {terms}, then log in with that account (the token that was sent has no "
            "access; hf auth login, or HF_TOKEN)."
        )
    if status == 401 and sent_token:
        return BadToken(
            f"The hub does not accept the token that was sent for {repo} (401: perhaps "
            f"expired or mistyped); {renewal}."
        )
    if code == "RepoNotFound" or (status == 401 and not code):
        return _no_repository_error(repo)
    proxy = find_proxy(request.url)
    if proxy and not code and request.url.scheme == "http":
        return _proxy_error(proxy, status, request.url.host)
    if sent_token:
        return Gated(
            f"The hub refuses access to {repo} with the token that was sent ({status}): it "
            f"may lack permission to read this repository; check it at {_TOKENS_URL}."
        )
    return HubError(
        f"{request.url.host} refuses access to {repo} ({status}) without a reason; "
        "perhaps a firewall answered instead."
    )


def _no_repository_error(repo: str) -> NotOnHub:
    return NotOnHub(
        f"The hub has no repository {repo}, or it is private; if so, run: hf auth login"
    )


def error_from_exception(
    error: Exception, url: httpx2.URL | None, repo: str, file: str
) -> Exception:
    """Return the localspec error for an exception of the HTTP library; our own errors stay as they are."""
    import httpx2

    if isinstance(error, LocalspecError | RetryableError):
        return error
    request = getattr(error, "_request", None)
    url = request.url if request is not None else url
    if isinstance(error, httpx2.InvalidURL | ValueError):
        return HubError(
            f"The hub cannot be reached at {_without_credentials(find_endpoint())}: not a valid "
            "address; correct HF_ENDPOINT, and the proxies if any are set."
        )
    if isinstance(error, httpx2.TooManyRedirects):
        return HubError(f"The hub redirects requests for {repo}/{file} in a loop; try again.")
    if isinstance(error, httpx2.DecodingError):
        return HubError(
            f"The response for {repo}/{file} cannot be decompressed; check the proxies."
        )
    if not isinstance(error, httpx2.TransportError) or url is None:
        return Unreachable(
            f"The request to the hub for {repo}/{file} failed ({type(error).__name__})."
        )
    return _error_from_connection(error, url)


def _error_from_connection(error: httpx2.TransportError, url: httpx2.URL) -> Exception:
    import httpx2

    proxy = find_proxy(url)
    host = f"{url.host}:{url.port}" if url.port else url.host
    place = str(proxy or host)
    advice = f"check {proxy.variable} or unset it" if proxy else ""
    if isinstance(error, httpx2.ProxyError):
        status = re.match(r"\d{3}", str(error))
        if status and status[0] in ("401", "403", "407"):
            return _proxy_error(proxy, int(status[0]), url.host)
        detail = f" (status {status[0]})" if status else ""
        return RetryableError(f"{place} cannot connect to {host}{detail}", advice)
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _certificate_error(cause, host, proxy)
        if isinstance(cause, ssl.SSLError):
            return RetryableError(f"{place} does not speak TLS correctly", advice)
        if isinstance(cause, socket.gaierror):
            name, owner = url.host, ""
            checked = " and HF_ENDPOINT" if find_endpoint() != HUB_URL else ""
            if proxy:
                name, owner = proxy.place.rpartition(":")[0] or proxy.place, f" of {place}"
                checked = f" and {proxy.variable}"
            return RetryableError(
                f"the name {name}{owner} cannot be resolved (DNS)", f"check the network{checked}"
            )
        if isinstance(cause, ConnectionRefusedError):
            return RetryableError(f"{place} refuses connections", advice)
    if isinstance(error, httpx2.ConnectTimeout):
        return RetryableError(f"{place} does not respond: the connection timed out", advice)
    if isinstance(error, httpx2.TimeoutException):
        return RetryableError(f"the connection to {place} stalled", advice)
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return RetryableError(f"the connection to {place} failed ({cause.strerror})", advice)
    return RetryableError(f"the connection failed ({type(error).__name__})")


def _proxy_error(proxy: Proxy | None, status: int, host: str) -> ProxyRefused:
    if proxy is None:
        return ProxyRefused(
            f"A proxy on the way to {host} refuses ({status}), and none is set; set HTTPS_PROXY."
        )
    if status == 407:
        problem = "asks for a name and a password"
        if "@" in proxy.url:
            problem = "does not accept the name and password it is given"
        return ProxyRefused(
            f"The proxy {proxy.place} {problem} (407); correct them in {proxy.variable} "
            "(http://NAME:PASSWORD@HOST:PORT) and try again."
        )
    return ProxyRefused(
        f"The proxy {proxy.place} ({proxy.variable}) refuses to connect to {host} "
        f"({status}); ask its administrator, or add the host to NO_PROXY if it can be "
        "reached directly."
    )


def _certificate_error(
    error: ssl.SSLCertVerificationError, host: str, proxy: Proxy | None
) -> Untrusted:
    named = [f"{variable} ({path})" for variable, path in _list_certificates().items()]
    hint = f"; currently set: {' and '.join(named)}" if named else ""
    via_proxy = f", or the one {proxy.place} puts in its place," if proxy else ""
    return Untrusted(
        f"The certificate of {host}{via_proxy} is not trusted ({error.verify_message}): name "
        "the file of the authority that signed it in SSL_CERT_FILE or REQUESTS_CA_BUNDLE and try "
        f"again{hint}."
    )


def _without_credentials(endpoint: str) -> str:
    scheme, _, location = endpoint.partition("://")
    return f"{scheme}://{location.rpartition('@')[2]}"


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asked to wait, at most _MAX_PAUSE_S, or None.

    Retry-After is a number or a date (RFC 9110, 10.2.3). Without it, the hub's own RateLimit header counts.
    """
    value = headers.get("retry-after", "").strip()
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("ratelimit", ""))
    if value.isascii() and value.isdigit():
        seconds = float(value)
    elif (until := _parse_date(value)) is not None:
        # Compare with the server's own clock if it sends the time, since this machine's may be wrong.
        now = _parse_date(headers.get("date", "")) or datetime.now(UTC)
        seconds = max((until - now).total_seconds(), 0.0)
    elif limit:
        seconds = float(limit[1])
    else:
        return None
    return min(seconds, _MAX_PAUSE_S)


def _parse_date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)
