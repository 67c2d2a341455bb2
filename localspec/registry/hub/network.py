"""How one pull reaches the hub: the variables of one environment, and an HTTP client made of them.

The daemon serves shells whose environments differ, so nothing here is read from or written to the
process's own environment or huggingface_hub's one session; each pull has its own client.
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
_LONGEST_TOKEN = 16 << 10  # bytes; they have some forty
_TRUE = ("1", "ON", "YES", "TRUE")
_BUNDLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_COUNTED = {*_BUNDLES, *_PROXIES, *(name.upper() for name in _PROXIES)} | {
    "HF_ENDPOINT", "HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME",
}  # fmt: skip
_SCHEMES = ("http", "https", "socks5", "socks5h")


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy and the variable that names it. `url` may hold a password; `place` never does."""

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
    """What one environment says about the network.

    `token_file` is named by HF_TOKEN_PATH, `login` is where `hf auth login` leaves its token.
    `certificates`: (variable, path of a file or folder) instead of the system's.
    """

    endpoint: str = HUB
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    login: Path | None = None
    offline: str = ""  # the variable that forbids the network
    proxies: Mapping[str, Proxy] = field(default_factory=dict)  # by scheme, or "all"
    no_proxy: tuple[str, ...] = ()
    certificates: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Network:
        """Read an environment, or what of it came with a request.

        Raises:
            NetworkSettings: a variable that counts holds what nothing can be made of.
        """
        for name in _COUNTED & variables.keys():
            if not variables[name].strip().isprintable():
                raise NetworkSettings(f"{name} contains an unprintable character; correct it.")
        implicit = not _true(variables.get("HF_HUB_DISABLE_IMPLICIT_TOKEN"))
        token = variables.get("HF_TOKEN") or variables.get("HUGGING_FACE_HUB_TOKEN") or ""
        named = variables.get("HF_TOKEN_PATH")
        offline = [n for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _true(variables.get(n))]
        proxies = {}
        for scheme in ("http", "https", "all"):
            variable, value = _either(variables, f"{scheme}_proxy")
            if value:
                proxies[scheme] = Proxy(value if "://" in value else f"http://{value}", variable)
        return cls(
            endpoint=(variables.get("HF_ENDPOINT") or HUB).rstrip("/"),
            token="".join(token.split()) if implicit else "",
            token_file=_path(named) if implicit and named else None,
            login=_home(variables) / "token" if implicit else None,
            offline=offline[0] if offline else "",
            proxies=proxies,
            no_proxy=tuple(_either(variables, "no_proxy")[1].replace(",", " ").lower().split()),
            certificates=tuple((n, variables[n]) for n in _BUNDLES if variables.get(n)),
        )

    def token_in(self, file: Path) -> str:
        """The token in a file; "" where nobody has logged in.

        Raises:
            NetworkSettings: HF_TOKEN_PATH names a file that cannot be read.
        """
        try:
            with os.fdopen(open_file(file, os.O_RDONLY), "rb") as opened:
                return "".join(opened.read(_LONGEST_TOKEN).decode(errors="replace").split())
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
        """Which proxy leads to an address."""
        proxy = self.proxies.get(scheme) or self.proxies.get("all")
        port = port or {"http": 80, "https": 443}.get(scheme)
        if proxy is None or any(_spared(each, host, port) for each in self.no_proxy):
            return None
        return proxy

    def trust(self) -> ssl.SSLContext:
        """Which certificates are trusted: those that are named, else the system's.

        Raises:
            NetworkSettings: a file that is named cannot be read, or holds none.
        """
        if not self.certificates:
            import httpx2

            return httpx2.create_ssl_context(trust_env=False)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for variable, name in self.certificates:
            folders = [each for each in name.split(os.pathsep) if os.path.isdir(each)]  # noqa: PTH112 - raises nothing
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
        """An HTTP client of its own, which reads no environment. The caller closes it."""
        return _client(self)


def _client(network: Network) -> httpx2.Client:
    import httpx2

    class Ways(httpx2.BaseTransport):
        """Each request by its own way: directly, or through the proxy that its address has."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._ways: dict[tuple[Proxy | None, bool], httpx2.HTTPTransport] = {}

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            url = request.url
            proxy = network.proxy_for(url.scheme, url.host, url.port)
            with self._lock:
                key = (proxy, url.scheme == "https")
                way = self._ways.get(key) or self._ways.setdefault(key, _way(network, *key))
            return way.handle_request(request)

        def close(self) -> None:
            for way in self._ways.values():
                way.close()

    return httpx2.Client(transport=Ways(), trust_env=False)


def _way(network: Network, proxy: Proxy | None, secure: bool) -> httpx2.HTTPTransport:
    """Connections to servers that want TLS (`secure`) or none, directly or through a proxy."""
    import httpx2

    def trust(needed: bool) -> ssl.SSLContext:
        # Without TLS nothing is to be trusted, and a file that is missing harms nobody.
        return network.trust() if needed else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    if proxy is None:
        return httpx2.HTTPTransport(verify=trust(secure), trust_env=False)
    if proxy.scheme not in _SCHEMES:
        raise NetworkSettings(
            f"{proxy.variable} names a proxy of an unsupported kind ({proxy.scheme}); http, "
            "https, socks5 and socks5h are supported."
        )
    try:
        behind = httpx2.Proxy(
            proxy.url, ssl_context=trust(True) if proxy.scheme == "https" else None
        )
        return httpx2.HTTPTransport(verify=trust(secure), trust_env=False, proxy=behind)
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
    """Whether it could be a hub's."""
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _true(value: str | None) -> bool:
    return (value or "").upper() in _TRUE


def _either(variables: Mapping[str, str], name: str) -> tuple[str, str]:
    """A variable that is known in both cases, and its value; in lower case it counts first."""
    if name in variables:
        return name, variables[name].strip()
    return name.upper(), variables.get(name.upper(), "").strip()


def _path(name: str) -> Path:
    return Path(os.path.expanduser(os.path.expandvars(name)))  # noqa: PTH111 - raises nothing


def _home(variables: Mapping[str, str]) -> Path:
    """huggingface_hub's folder of that environment."""
    if variables.get("HF_HOME"):
        return _path(variables["HF_HOME"])
    return _path(variables.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def _spared(entry: str, host: str, port: int | None) -> bool:
    """Whether an entry of NO_PROXY means this host; as curl: a name means what lies below it too."""
    if entry == "*":
        return True
    entry = entry.partition("://")[2] or entry
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        pass
    try:
        named = urlsplit(f"//{entry}")
        if named.port not in (None, port):
            return False
    except ValueError:
        return False
    name = (named.hostname or "").removeprefix("*").removeprefix(".")
    host = host.lower()
    return bool(name) and (host == name or host.endswith(f".{name}"))
