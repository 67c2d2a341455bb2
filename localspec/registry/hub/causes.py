"""Explain in one sentence why a request to the hub failed, and what to do about it.

The sentence never contains a token or password. Messages of HTTP libraries are not passed on, since they may
contain signed URLs.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from localspec.errors import (
    BadToken,
    Gated,
    HubError,
    LocalspecError,
    NotOnHub,
    ProxyRefused,
    Unreachable,
    Untrusted,
    WebPage,
)
from localspec.registry.hub.network import HUB, Network, Proxy
from localspec.registry.hub.retry import Interrupted

if TYPE_CHECKING:
    import httpx2

_BUSY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses of a storage server whose signed URL has expired, or that does not have the file yet. The next try
# gets a fresh URL from the hub.
_REFUSED_STATUSES = frozenset({401, 403, 404, 410, 416})
_MAX_REFUSED_TRIES = 5
_TOKENS_URL = "https://huggingface.co/settings/tokens"
_MAX_PAUSE_S = 300.0  # a server may ask for more, but nobody waits that long


def web_page_error(endpoint: str, repo: str) -> WebPage:
    """Return the error for a web page in place of the hub's response."""
    if endpoint.rstrip("/") == HUB:
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


def error_from_status(
    response: httpx2.Response, network: Network, endpoint: str, repo: str, file: str
) -> Exception:
    """Return the error for a response whose status is neither 200 nor 206.

    file: the requested file; empty if the request was for the repository.
    """
    status, code = response.status_code, response.headers.get("x-error-code", "")
    url = response.request.url
    proxy = network.proxy_for(url.scheme, url.host, url.port)
    if status == 407:
        return _proxy_error(proxy, status, url.host)
    if status in _BUSY_STATUSES:
        return Interrupted(
            f"the hub answered {status}", retry_after=_parse_retry_after(response.headers)
        )
    if status in _REFUSED_STATUSES and _is_from_storage(response, endpoint):
        return Interrupted(
            f"{url.host} answered {status}",
            f"if it lasts, ask whoever runs the network whether {url.host} is blocked",
            retry_after=_parse_retry_after(response.headers),
            what=f"The hub's storage refuses to send a file of {repo}",
            max_tries=_MAX_REFUSED_TRIES,
        )
    if status in (401, 403):
        return _access_error(response, proxy, repo)
    if code == "RepoNotFound" or (status == 404 and not code):
        if "text/html" in response.headers.get("content-type", "") and endpoint != HUB:
            return web_page_error(endpoint, repo)
        return _no_repository_error(repo)
    if status == 404:
        missing = f"file {file} in {repo} at that revision" if file else f"such revision of {repo}"
        return NotOnHub(f"The hub has no {missing}.")
    return HubError(f"The hub answered {status} for {repo}/{file}.")


def _is_from_storage(response: httpx2.Response, endpoint: str) -> bool:
    """Return whether the response comes from the server to which the hub redirected a download."""
    import httpx2

    return bool(response.history) and response.request.url.host != httpx2.URL(endpoint).host


def _access_error(response: httpx2.Response, proxy: Proxy | None, repo: str) -> Exception:
    """Return the error for a 401 or 403.

    The hub sends these for several reasons, and a proxy on the way may send them too.
    """
    status, code = response.status_code, response.headers.get("x-error-code", "")
    request = response.request
    sent_token = "authorization" in request.headers
    renewal = f"create a new one at {_TOKENS_URL}, then run: hf auth login, or set HF_TOKEN"
    if code == "GatedRepo":
        gated = f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then log in"
        if status == 401 and sent_token:
            return Gated(
                f"{repo} is gated, and the hub does not accept the token that was sent (401: "
                f"perhaps expired or mistyped); accept its terms at https://huggingface.co/{repo} "
                f"and {renewal}."
            )
        if sent_token:
            return Gated(
                f"{gated} with that account (the token that was sent has no access; hf auth login, "
                "or HF_TOKEN)."
            )
        return Gated(f"{gated} (hf auth login) or set HF_TOKEN.")
    if status == 401 and sent_token:
        return BadToken(
            f"The hub does not accept the token that was sent for {repo} (401: perhaps "
            f"expired or mistyped); {renewal}."
        )
    if code == "RepoNotFound" or (status == 401 and not code):
        return _no_repository_error(repo)
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
    error: Exception, network: Network, url: httpx2.URL | None, repo: str, file: str
) -> Exception:
    """Return the localspec error for an exception of the HTTP library; our own errors stay as they are."""
    import httpx2

    if isinstance(error, LocalspecError | Interrupted):
        return error
    request = getattr(error, "_request", None)
    url = request.url if request is not None else url
    if isinstance(error, httpx2.InvalidURL | ValueError):
        return HubError(
            f"The hub cannot be reached at {_without_credentials(network.endpoint)}: not a valid address; "
            "correct HF_ENDPOINT, and the proxies if any are set."
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
    return _error_from_connection(error, network, url)


def _error_from_connection(
    error: httpx2.TransportError, network: Network, url: httpx2.URL
) -> Exception:
    """Return the error for a connection that failed or broke."""
    import httpx2

    proxy = network.proxy_for(url.scheme, url.host, url.port)
    place = f"the proxy {proxy.place} ({proxy.variable})" if proxy else _format_host(url)
    if isinstance(error, httpx2.ProxyError):
        status = re.match(r"\d{3}", str(error))
        if status and status[0] in ("401", "403", "407"):
            return _proxy_error(proxy, int(status[0]), url.host)
        detail = f" (status {status[0]})" if status else ""
        return Interrupted(
            f"{place} cannot connect to {_format_host(url)}{detail}", _proxy_advice(proxy)
        )
    for cause in _exception_chain(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _certificate_error(cause, network, url, proxy)
        if isinstance(cause, ssl.SSLError):
            return Interrupted(f"{place} does not speak TLS correctly", _proxy_advice(proxy))
        if isinstance(cause, socket.gaierror):
            hostname = proxy.place.rpartition(":")[0] or proxy.place if proxy else url.host
            owner = f" of {place}" if proxy else ""
            return Interrupted(
                f"the name {hostname}{owner} cannot be resolved (DNS)",
                f"check the network{' and ' + proxy.variable if proxy else _endpoint_advice(network)}",
            )
        if isinstance(cause, ConnectionRefusedError):
            return Interrupted(f"{place} refuses connections", _proxy_advice(proxy))
    if isinstance(error, httpx2.ConnectTimeout):
        return Interrupted(
            f"{place} does not respond: the connection timed out", _proxy_advice(proxy)
        )
    if isinstance(error, httpx2.TimeoutException):
        return Interrupted(f"the connection to {place} stalled", _proxy_advice(proxy))
    for cause in _exception_chain(error):
        if isinstance(cause, OSError) and cause.strerror:
            return Interrupted(
                f"the connection to {place} failed ({cause.strerror})", _proxy_advice(proxy)
            )
    return Interrupted(f"the connection failed ({type(error).__name__})")


def _proxy_error(proxy: Proxy | None, status: int, host: str) -> ProxyRefused:
    if proxy is None:
        return ProxyRefused(
            f"A proxy on the way to {host} refuses ({status}), and none is set; set HTTPS_PROXY."
        )
    if status == 407:
        problem = "asks for a name and a password"
        if proxy.has_password:
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
    error: ssl.SSLCertVerificationError, network: Network, url: httpx2.URL, proxy: Proxy | None
) -> Untrusted:
    settings = [f"{variable} ({path})" for variable, path in network.certificates]
    hint = f"; currently set: {' and '.join(settings)}" if settings else ""
    via_proxy = f", or the one {proxy.place} puts in its place," if proxy else ""
    return Untrusted(
        f"The certificate of {_format_host(url)}{via_proxy} is not trusted ({error.verify_message}): name "
        "the file of the authority that signed it in SSL_CERT_FILE or REQUESTS_CA_BUNDLE and try "
        f"again{hint}."
    )


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that caused it."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _proxy_advice(proxy: Proxy | None) -> str:
    return f"check {proxy.variable} or unset it" if proxy else ""


def _endpoint_advice(network: Network) -> str:
    return " and HF_ENDPOINT" if network.endpoint != HUB else ""


def _without_credentials(endpoint: str) -> str:
    scheme, _, location = endpoint.partition("://")
    return f"{scheme}://{location.rpartition('@')[2]}"


def _format_host(url: httpx2.URL) -> str:
    return f"{url.host}:{url.port}" if url.port else url.host


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
    """Parse an HTTP date; return None if it is not one."""
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)
