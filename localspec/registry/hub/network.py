"""The network settings of one environment, and an HTTP client for them.

The daemon serves shells with different environments. So nothing here reads or changes the process's own
environment or huggingface_hub's only session; each pull has its own client.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
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
from localspec.paths import open_file
from localspec.registry.hub.retry import RetryableError

if TYPE_CHECKING:
    import httpx2


# ------------------------------------------------------------------------ causes
# Explain in one sentence why a request to the hub failed, and what to do about it.
#
# The sentence never contains a token or password. Messages of HTTP libraries are not passed on, since they
# may
# contain signed URLs.


_BUSY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
# Statuses of a storage server whose signed URL has expired, or that does not have the file yet. The next try
# gets a fresh URL from the hub.
_REFUSED_STATUSES = frozenset({401, 403, 404, 410, 416})
_MAX_REFUSED_TRIES = 5
_TOKENS_URL = "https://huggingface.co/settings/tokens"
_MAX_PAUSE_S = 300.0  # a server may ask for more, but nobody waits that long


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
        return RetryableError(
            f"the hub answered {status}", retry_after=_parse_retry_after(response.headers)
        )
    if status in _REFUSED_STATUSES and _is_from_storage(response, endpoint):
        return RetryableError(
            f"{url.host} answered {status}",
            f"if it lasts, ask whoever runs the network whether {url.host} is blocked",
            retry_after=_parse_retry_after(response.headers),
            what=f"The hub's storage refuses to send a file of {repo}",
            max_tries=_MAX_REFUSED_TRIES,
        )
    if status in (401, 403):
        return _access_error(response, proxy, repo)
    if code == "RepoNotFound" or (status == 404 and not code):
        if "text/html" in response.headers.get("content-type", "") and endpoint != HUB_URL:
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

    if isinstance(error, LocalspecError | RetryableError):
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
        return RetryableError(
            f"{place} cannot connect to {_format_host(url)}{detail}", _proxy_advice(proxy)
        )
    for cause in _exception_chain(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _certificate_error(cause, network, url, proxy)
        if isinstance(cause, ssl.SSLError):
            return RetryableError(f"{place} does not speak TLS correctly", _proxy_advice(proxy))
        if isinstance(cause, socket.gaierror):
            hostname = proxy.place.rpartition(":")[0] or proxy.place if proxy else url.host
            owner = f" of {place}" if proxy else ""
            return RetryableError(
                f"the name {hostname}{owner} cannot be resolved (DNS)",
                f"check the network{' and ' + proxy.variable if proxy else _endpoint_advice(network)}",
            )
        if isinstance(cause, ConnectionRefusedError):
            return RetryableError(f"{place} refuses connections", _proxy_advice(proxy))
    if isinstance(error, httpx2.ConnectTimeout):
        return RetryableError(
            f"{place} does not respond: the connection timed out", _proxy_advice(proxy)
        )
    if isinstance(error, httpx2.TimeoutException):
        return RetryableError(f"the connection to {place} stalled", _proxy_advice(proxy))
    for cause in _exception_chain(error):
        if isinstance(cause, OSError) and cause.strerror:
            return RetryableError(
                f"the connection to {place} failed ({cause.strerror})", _proxy_advice(proxy)
            )
    return RetryableError(f"the connection failed ({type(error).__name__})")


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
    return " and HF_ENDPOINT" if network.endpoint != HUB_URL else ""


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


# ------------------------------------------------------------------------ network


HUB_URL = "https://huggingface.co"
_MAX_TOKEN_BYTES = 16 << 10  # real tokens have about 40
_TRUE_VALUES = ("1", "ON", "YES", "TRUE")
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
# The variables whose values are checked for unprintable characters.
_CHECKED_VARIABLES = {
    *_CERTIFICATE_VARIABLES,
    *_PROXY_VARIABLES,
    *(name.upper() for name in _PROXY_VARIABLES),
    *("HF_ENDPOINT", "HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME"),
}
_SCHEMES = ("http", "https", "socks5", "socks5h")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy and the variable that names it. `url` may contain a password; `place` never does."""

    url: str = field(repr=False)
    variable: str

    @property
    def place(self) -> str:
        """HOST:PORT, for a sentence."""
        return self.url.partition("://")[2].rpartition("@")[2].rstrip("/")

    @property
    def has_password(self) -> bool:
        return "@" in self.url

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0].lower()


@dataclass(frozen=True, slots=True)
class Network:
    """The network settings of one environment.

    token_file: the file that HF_TOKEN_PATH names. login: where `hf auth login` stores its token. offline:
    the variable that forbids the network, or "". proxies: by scheme, or "all". certificates: variables and
    the paths of files or folders that replace the system's certificates.
    """

    endpoint: str = HUB_URL
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    login: Path | None = None
    offline: str = ""
    proxies: Mapping[str, Proxy] = field(default_factory=dict)
    no_proxy: tuple[str, ...] = ()
    certificates: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Network:
        """Read the settings from environment variables, or from those that came with a request.

        Raises:
            NetworkSettings: a variable has an unusable value.
        """
        for name in _CHECKED_VARIABLES & variables.keys():
            if not variables[name].strip().isprintable():
                raise NetworkSettings(f"{name} contains an unprintable character; correct it.")
        sends_token = not _is_true(variables.get("HF_HUB_DISABLE_IMPLICIT_TOKEN"))
        token = variables.get("HF_TOKEN") or variables.get("HUGGING_FACE_HUB_TOKEN") or ""
        token_path = variables.get("HF_TOKEN_PATH")
        offline = [
            variable
            for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
            if _is_true(variables.get(variable))
        ]
        proxies = {}
        for scheme in ("http", "https", "all"):
            variable, value = _read_either_case(variables, f"{scheme}_proxy")
            if value:
                proxies[scheme] = Proxy(value if "://" in value else f"http://{value}", variable)
        return cls(
            endpoint=(variables.get("HF_ENDPOINT") or HUB_URL).rstrip("/"),
            token="".join(token.split()) if sends_token else "",
            token_file=_expand_path(token_path) if sends_token and token_path else None,
            login=_hf_home(variables) / "token" if sends_token else None,
            offline=offline[0] if offline else "",
            proxies=proxies,
            no_proxy=tuple(
                _read_either_case(variables, "no_proxy")[1].replace(",", " ").lower().split()
            ),
            certificates=tuple(
                (variable, variables[variable])
                for variable in _CERTIFICATE_VARIABLES
                if variables.get(variable)
            ),
        )

    def read_token(self, file: Path) -> str:
        """Return the token in a file, or "" if nobody has logged in.

        Raises:
            NetworkSettings: HF_TOKEN_PATH names a file that cannot be read.
        """
        try:
            with os.fdopen(open_file(file, os.O_RDONLY), "rb") as opened:
                return "".join(opened.read(_MAX_TOKEN_BYTES).decode(errors="replace").split())
        except FileNotFoundError:
            if file == self.login:
                return ""
            problem = "does not exist"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        raise NetworkSettings(
            f"HF_TOKEN_PATH names {file}, which {problem}; correct or unset it, and try again."
        )

    def proxy_for(self, scheme: str, host: str, port: int | None) -> Proxy | None:
        """Return the proxy that leads to an address, or None."""
        proxy = self.proxies.get(scheme) or self.proxies.get("all")
        port = port or {"http": 80, "https": 443}.get(scheme)
        if proxy is None or any(_bypasses_proxy(entry, host, port) for entry in self.no_proxy):
            return None
        return proxy

    def make_ssl_context(self) -> ssl.SSLContext:
        """Return a TLS context with the certificates that the variables name, or the system's.

        Raises:
            NetworkSettings: a named file cannot be read or contains no certificates.
        """
        if not self.certificates:
            import httpx2

            return httpx2.create_ssl_context(trust_env=False)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for variable, name in self.certificates:
            folders = [folder for folder in name.split(os.pathsep) if os.path.isdir(folder)]  # noqa: PTH112 - raises nothing
            if folders or variable == "SSL_CERT_DIR":
                for folder in folders:
                    context.load_verify_locations(capath=folder)
                continue
            try:
                context.load_verify_locations(cafile=name)
            except ssl.SSLError:
                problem = "contains no certificates"
            except FileNotFoundError:
                problem = "does not exist"
            except OSError as error:
                problem = f"cannot be read ({error.strerror})"
            else:
                continue
            raise NetworkSettings(
                f"{variable} names {name}, which {problem}; correct or unset it, and try again."
            )
        return context

    def make_client(self) -> httpx2.Client:
        """Return a new HTTP client that reads no environment. The caller closes it."""
        return _build_client(self)


def _build_client(network: Network) -> httpx2.Client:
    import httpx2

    class RoutingTransport(httpx2.BaseTransport):
        """Send each request directly or through the proxy for its address."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._transports: dict[tuple[Proxy | None, bool], httpx2.HTTPTransport] = {}

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            url = request.url
            proxy = network.proxy_for(url.scheme, url.host, url.port)
            with self._lock:
                key = (proxy, url.scheme == "https")
                transport = self._transports.get(key) or self._transports.setdefault(
                    key, _build_transport(network, *key)
                )
            return transport.handle_request(request)

        def close(self) -> None:
            for transport in self._transports.values():
                transport.close()

    return httpx2.Client(transport=RoutingTransport(), trust_env=False)


def _build_transport(network: Network, proxy: Proxy | None, secure: bool) -> httpx2.HTTPTransport:
    """Return a transport for servers with TLS (`secure`) or without, directly or through a proxy.

    Raises:
        NetworkSettings: the proxy's address is invalid or its kind is not supported.
    """
    import httpx2

    def make_context(uses_tls: bool) -> ssl.SSLContext:
        # Without TLS no certificate is used, so a missing certificate file does not matter.
        return network.make_ssl_context() if uses_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    if proxy is None:
        return httpx2.HTTPTransport(verify=make_context(secure), trust_env=False)
    if proxy.scheme not in _SCHEMES:
        raise NetworkSettings(
            f"{proxy.variable} names a proxy of an unsupported kind ({proxy.scheme}); http, "
            "https, socks5 and socks5h are supported."
        )
    try:
        upstream_proxy = httpx2.Proxy(
            proxy.url, ssl_context=make_context(True) if proxy.scheme == "https" else None
        )
        return httpx2.HTTPTransport(
            verify=make_context(secure), trust_env=False, proxy=upstream_proxy
        )
    except ImportError:
        raise NetworkSettings(
            f"{proxy.variable} names a SOCKS proxy ({proxy.place}), but the package for SOCKS "
            f"is missing; use an HTTP proxy, or run: {installation.install_packages_command('socksio')}"
        ) from None
    except (ValueError, httpx2.InvalidURL):
        raise NetworkSettings(
            f"{proxy.variable} is not a valid proxy address; it must look like http://HOST:PORT."
        ) from None


def is_hub_url(endpoint: str) -> bool:
    """Return whether the text has the form of a hub's address."""
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_true(value: str | None) -> bool:
    return (value or "").upper() in _TRUE_VALUES


def _read_either_case(variables: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return the name and value of a variable that may be in lower or upper case; lower case wins."""
    if name in variables:
        return name, variables[name].strip()
    return name.upper(), variables.get(name.upper(), "").strip()


def _expand_path(name: str) -> Path:
    return Path(os.path.expanduser(os.path.expandvars(name)))  # noqa: PTH111 - raises nothing


def _hf_home(variables: Mapping[str, str]) -> Path:
    """Return huggingface_hub's folder in that environment."""
    if variables.get("HF_HOME"):
        return _expand_path(variables["HF_HOME"])
    return _expand_path(variables.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def _bypasses_proxy(entry: str, host: str, port: int | None) -> bool:
    """Return whether an entry of NO_PROXY covers this host.

    As in curl, a name also covers its subdomains.
    """
    if entry == "*":
        return True
    entry = entry.partition("://")[2] or entry
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        pass
    try:
        parts = urlsplit(f"//{entry}")
        if parts.port not in (None, port):
            return False
    except ValueError:
        return False
    name = (parts.hostname or "").removeprefix("*").removeprefix(".")
    host = host.lower()
    return bool(name) and (host == name or host.endswith(f".{name}"))
