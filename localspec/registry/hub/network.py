"""The network settings of one environment, and an HTTP client for them.

The daemon serves shells with different environments. So nothing here reads or changes the process's own
environment or huggingface_hub's only session; each pull has its own client.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from localspec import installation
from localspec.errors import NetworkSettings
from localspec.paths import open_file

if TYPE_CHECKING:
    import httpx2

HUB = "https://huggingface.co"
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

    endpoint: str = HUB
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    login: Path | None = None
    offline: str = ""
    proxies: Mapping[str, Proxy] = field(default_factory=dict)
    no_proxy: tuple[str, ...] = ()
    certificates: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Network:
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
            endpoint=(variables.get("HF_ENDPOINT") or HUB).rstrip("/"),
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

    def token_in(self, file: Path) -> str:
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

    def trust(self) -> ssl.SSLContext:
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

    def client(self) -> httpx2.Client:
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
        return network.trust() if uses_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

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
            f"is missing; use an HTTP proxy, or run: {installation.add_packages('socksio')}"
        ) from None
    except (ValueError, httpx2.InvalidURL):
        raise NetworkSettings(
            f"{proxy.variable} is not a valid proxy address; it must look like http://HOST:PORT."
        ) from None


def is_address(endpoint: str) -> bool:
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
