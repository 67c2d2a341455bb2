"""Why the hub could not be asked, in one sentence with what to do. Never with a token or password.

Messages of HTTP libraries are not passed on: they may hold signed addresses.
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

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
# What a storage answers whose signed address has expired, or that does not have the file yet. The next try
# asks the hub for a fresh address.
_REFUSED = frozenset({401, 403, 404, 410, 416})
_REFUSED_TRIES = 5
_TOKENS = "https://huggingface.co/settings/tokens"
_LONGEST_PAUSE = 300.0  # a server may ask for more; nobody waits that long


def web_page(endpoint: str, repo: str) -> WebPage:
    if endpoint.rstrip("/") == HUB:
        return WebPage(
            f"Something between this machine and the hub answered for {repo} with a page of "
            "its own (perhaps the network's login page); open a browser, log in, and try "
            "again."
        )
    return WebPage(
        f"{_address(endpoint)} (HF_ENDPOINT) answered for {repo} with a page of its own "
        "(perhaps the network's login page, or it is not a hub); check HF_ENDPOINT, or "
        "open a browser, log in, and try again."
    )


def of_status(
    response: httpx2.Response, network: Network, endpoint: str, repo: str, file: str
) -> Exception:
    """What an answer that is none of 200 and 206 means. `file` "": the repository was asked for."""
    status, code = response.status_code, response.headers.get("x-error-code", "")
    url = response.request.url
    proxy = network.proxy_for(url.scheme, url.host, url.port)
    if status == 407:
        return _proxy_refused(proxy, status, url.host)
    if status in _BUSY:
        return Interrupted(f"the hub answered {status}", retry_after=_retry_after(response.headers))
    if status in _REFUSED and _is_storage(response, endpoint):
        return Interrupted(
            f"{url.host} answered {status}",
            f"if it lasts, ask whoever runs the network whether {url.host} is blocked",
            retry_after=_retry_after(response.headers),
            what=f"The hub's storage refuses to send a file of {repo}",
            max_tries=_REFUSED_TRIES,
        )
    if status in (401, 403):
        return _no_entry(response, proxy, repo)
    if code == "RepoNotFound" or (status == 404 and not code):
        if "text/html" in response.headers.get("content-type", "") and endpoint != HUB:
            return web_page(endpoint, repo)
        return _no_repository(repo)
    if status == 404:
        what = f"file {file} in {repo} at that revision" if file else f"such revision of {repo}"
        return NotOnHub(f"The hub has no {what}.")
    return HubError(f"The hub answered {status} for {repo}/{file}.")


def _is_storage(response: httpx2.Response, endpoint: str) -> bool:
    """Return whether the answer comes from where the hub has redirected a download to."""
    import httpx2

    return bool(response.history) and response.request.url.host != httpx2.URL(endpoint).host


def _no_entry(response: httpx2.Response, proxy: Proxy | None, repo: str) -> Exception:
    """401 and 403: from the hub for one of several reasons, or from a proxy on the way."""
    status, code = response.status_code, response.headers.get("x-error-code", "")
    request = response.request
    sent = "authorization" in request.headers
    renew = f"create a new one at {_TOKENS}, then run: hf auth login, or set HF_TOKEN"
    if code == "GatedRepo":
        gated = f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then log in"
        if status == 401 and sent:
            return Gated(
                f"{repo} is gated, and the hub does not accept the token that was sent (401: "
                f"perhaps expired or mistyped); accept its terms at https://huggingface.co/{repo} "
                f"and {renew}."
            )
        if sent:
            return Gated(
                f"{gated} with that account (the token that was sent has no access; hf auth login, "
                "or HF_TOKEN)."
            )
        return Gated(f"{gated} (hf auth login) or set HF_TOKEN.")
    if status == 401 and sent:
        return BadToken(
            f"The hub does not accept the token that was sent for {repo} (401: perhaps "
            f"expired or mistyped); {renew}."
        )
    if code == "RepoNotFound" or (status == 401 and not code):
        return _no_repository(repo)
    if proxy and not code and request.url.scheme == "http":
        return _proxy_refused(proxy, status, request.url.host)
    if sent:
        return Gated(
            f"The hub refuses access to {repo} with the token that was sent ({status}): it "
            f"may lack permission to read this repository; check it at {_TOKENS}."
        )
    return HubError(
        f"{request.url.host} refuses access to {repo} ({status}) without a reason; "
        "perhaps a firewall answered instead."
    )


def _no_repository(repo: str) -> NotOnHub:
    return NotOnHub(
        f"The hub has no repository {repo}, or it is private; if so, run: hf auth login"
    )


def of_failure(
    error: Exception, network: Network, url: httpx2.URL | None, repo: str, file: str
) -> Exception:
    """Whatever an HTTP library raised for `url`, as ours; our own as it is."""
    import httpx2

    if isinstance(error, LocalspecError | Interrupted):
        return error
    request = getattr(error, "_request", None)
    url = request.url if request is not None else url
    if isinstance(error, httpx2.InvalidURL | ValueError):
        return HubError(
            f"The hub cannot be reached at {_address(network.endpoint)}: not a valid address; "
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
    return _of_connection(error, network, url)


def _of_connection(error: httpx2.TransportError, network: Network, url: httpx2.URL) -> Exception:
    """Why a connection was not made, or broke."""
    import httpx2

    proxy = network.proxy_for(url.scheme, url.host, url.port)
    where = f"the proxy {proxy.place} ({proxy.variable})" if proxy else _host(url)
    if isinstance(error, httpx2.ProxyError):
        status = re.match(r"\d{3}", str(error))
        if status and status[0] in ("401", "403", "407"):
            return _proxy_refused(proxy, int(status[0]), url.host)
        said = f" (status {status[0]})" if status else ""
        return Interrupted(f"{where} cannot connect to {_host(url)}{said}", _check(proxy))
    for each in _causes(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return _untrusted(each, network, url, proxy)
        if isinstance(each, ssl.SSLError):
            return Interrupted(f"{where} does not speak TLS correctly", _check(proxy))
        if isinstance(each, socket.gaierror):
            name = proxy.place.rpartition(":")[0] or proxy.place if proxy else url.host
            whose = f" of {where}" if proxy else ""
            return Interrupted(
                f"the name {name}{whose} cannot be resolved (DNS)",
                f"check the network{' and ' + proxy.variable if proxy else _endpoint(network)}",
            )
        if isinstance(each, ConnectionRefusedError):
            return Interrupted(f"{where} refuses connections", _check(proxy))
    if isinstance(error, httpx2.ConnectTimeout):
        return Interrupted(f"{where} does not respond: the connection timed out", _check(proxy))
    if isinstance(error, httpx2.TimeoutException):
        return Interrupted(f"the connection to {where} stalled", _check(proxy))
    for each in _causes(error):
        if isinstance(each, OSError) and each.strerror:
            return Interrupted(f"the connection to {where} failed ({each.strerror})", _check(proxy))
    return Interrupted(f"the connection failed ({type(error).__name__})")


def _proxy_refused(proxy: Proxy | None, status: int, host: str) -> ProxyRefused:
    if proxy is None:
        return ProxyRefused(
            f"A proxy on the way to {host} refuses ({status}), and none is set; set HTTPS_PROXY."
        )
    if status == 407:
        what = "asks for a name and a password"
        if proxy.has_password:
            what = "does not accept the name and password it is given"
        return ProxyRefused(
            f"The proxy {proxy.place} {what} (407); correct them in {proxy.variable} "
            "(http://NAME:PASSWORD@HOST:PORT) and try again."
        )
    return ProxyRefused(
        f"The proxy {proxy.place} ({proxy.variable}) refuses to connect to {host} "
        f"({status}); ask its administrator, or add the host to NO_PROXY if it can be "
        "reached directly."
    )


def _untrusted(
    error: ssl.SSLCertVerificationError, network: Network, url: httpx2.URL, proxy: Proxy | None
) -> Untrusted:
    named = [f"{variable} ({path})" for variable, path in network.certificates]
    now = f"; currently set: {' and '.join(named)}" if named else ""
    on_the_way = f", or the one {proxy.place} puts in its place," if proxy else ""
    return Untrusted(
        f"The certificate of {_host(url)}{on_the_way} is not trusted ({error.verify_message}): name "
        "the file of the authority that signed it in SSL_CERT_FILE or REQUESTS_CA_BUNDLE and try "
        f"again{now}."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it came from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _check(proxy: Proxy | None) -> str:
    return f"check {proxy.variable} or unset it" if proxy else ""


def _endpoint(network: Network) -> str:
    return " and HF_ENDPOINT" if network.endpoint != HUB else ""


def _address(endpoint: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _host(url: httpx2.URL) -> str:
    return f"{url.host}:{url.port}" if url.port else url.host


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds a server asked for, at most _LONGEST_PAUSE.

    Retry-After is a number or a date (RFC 9110, 10.2.3). Without it, the hub's own RateLimit header counts.
    """
    value = headers.get("retry-after", "").strip()
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("ratelimit", ""))
    if value.isascii() and value.isdigit():
        seconds = float(value)
    elif (until := _date(value)) is not None:
        # By the server's own clock where it tells the time: this machine's may be wrong.
        now = _date(headers.get("date", "")) or datetime.now(UTC)
        seconds = max((until - now).total_seconds(), 0.0)
    elif limit:
        seconds = float(limit[1])
    else:
        return None
    return min(seconds, _LONGEST_PAUSE)


def _date(value: str) -> datetime | None:
    """Parse an HTTP date; None where it is none."""
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=UTC)
