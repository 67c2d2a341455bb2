"""The Hugging Face hub: which bytes a name means, and ranges of them; its errors in our words.

huggingface_hub gives addresses and headers and renews a login; it is imported on first use (0.3 s).
Each hub has its own HTTP client, since huggingface_hub's serves one environment.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import msgspec

from localspec.errors import (
    BadToken,
    FileChanged,
    HubError,
    NotOnHub,
    Offline,
)
from localspec.registry.hub import causes
from localspec.registry.hub.network import HUB, Network

if TYPE_CHECKING:
    import httpx2

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONNECT_TIMEOUT = 10.0
_MOST_REDIRECTS = 10
_MOST_PAGES = 20  # of a list, a thousand files each; no repository of models has as many


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file on the hub, pinned to a commit and a hash. Size in bytes."""

    repo: str
    file: str
    commit: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return self.file.rsplit("/", 1)[-1]


class Listed(msgspec.Struct, frozen=True):
    """One file (or folder, by its `type`) in the hub's list of a repository. Size in bytes."""

    file: str = msgspec.field(name="path")
    size: int = 0
    type: str = "file"


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes on their way. `whole`: the server ignores ranges and sends the file from its start."""

    whole: bool
    chunks: Iterator[bytes]


class Hub:
    """One hub, as one pull reaches it. `network` None: this process's own environment.

    `endpoint` None: the network's own. `token` None: the network's, for its own endpoint alone;
    another endpoint gets no token but one that was given for it. No token goes on to a host that the
    endpoint redirects to. `stall`: seconds without a byte after which a connection is given up.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        stall: float = 20.0,
        network: Network | None = None,
    ) -> None:
        self._network = network
        self._endpoint = endpoint
        self._token = token
        self.stall = stall
        self._lock = threading.Lock()
        self._opened: httpx2.Client | None = None

    @property
    def network(self) -> Network:
        return self._network or Network.of(os.environ)

    @property
    def endpoint(self) -> str:
        return (self._endpoint or self.network.endpoint).rstrip("/")

    def check_online(self) -> None:
        """Raises Offline where a variable forbids the network."""
        if self.network.offline:
            raise Offline(
                f"{self.network.offline} is set, so nothing can be pulled; installed pairs still work."
            )

    def _library(self) -> ModuleType:
        """huggingface_hub, without its telemetry: a pull says which file it wants, no more."""
        self.check_online()
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils

        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
        return huggingface_hub

    def _client(self) -> httpx2.Client:
        """This hub's own: huggingface_hub's one session is everybody's."""
        with self._lock:
            if self._opened is None:
                self._opened = self.network.client()
                weakref.finalize(self, self._opened.close)
            return self._opened

    def _url(self, repo: str, file: str, revision: str) -> str:
        library = self._library()
        try:
            url: str = library.hf_hub_url(repo, file, revision=revision, endpoint=self.endpoint)
        except library.errors.HFValidationError:
            raise NotOnHub(f"'{repo}' is not a valid repository name.") from None
        return url

    def _headers(self) -> dict[str, str]:
        library = self._library()
        headers: dict[str, str] = library.utils.build_hf_headers(
            token=False, library_name="localspec"
        )
        if token := self._token or self._own_token(library):
            if not re.fullmatch(r"[!-~]+", token):
                raise BadToken("The hub token contains invalid characters; check HF_TOKEN.")
            headers["authorization"] = f"Bearer {token}"
        return headers | {"Accept-Encoding": "identity"}

    def _own_token(self, library: ModuleType) -> str:
        """What the environment has for its own endpoint.

        A login goes to the endpoint that people log in at, or the daemon was started with; to one
        that a shell names only what it names too.
        """
        network, constants = self.network, library.constants
        if self.endpoint != network.endpoint:
            return ""
        if network.token:
            return network.token
        file = network.token_file
        if file is None and self.endpoint in (HUB, constants.ENDPOINT):
            file = network.login
        if file is None:
            return ""
        same = str(file) == constants.HF_TOKEN_PATH
        if (
            same
            and not {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"} & os.environ.keys()
        ):
            return library.get_token() or ""  # which renews what is about to expire
        return network.token_in(file)

    @contextmanager
    def _asking(self, url: str, repo: str, file: str) -> Iterator[None]:
        """Everything that goes wrong inside is told in our words."""
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            try:
                asked = httpx2.URL(url)
            except httpx2.InvalidURL:
                asked = None
            raise causes.of_failure(error, self.network, asked, repo, file) from None

    def _refused(self, response: httpx2.Response, repo: str, file: str) -> Exception:
        return causes.of_status(response, self.network, self.endpoint, repo, file)

    def _metadata(self, url: str, repo: str, file: str) -> httpx2.Response:
        """The answer to a HEAD that states commit, hash and size, redirects among it.

        Not huggingface_hub's own way, which takes the token along to other hosts of the hub.
        """
        with self._asking(url, repo, file):
            hosts = {*self._library().constants.HF_URL_HOSTS, urlsplit(self.endpoint).hostname}
        headers = self._headers()
        for _ in range(_MOST_REDIRECTS):
            with self._asking(url, repo, file):
                response = self._client().request(
                    "HEAD",
                    url,
                    headers=headers,
                    timeout=min(_CONNECT_TIMEOUT, self.stall),
                    follow_redirects=False,
                )
            if response.status_code >= 400:
                raise self._refused(response, repo, file)
            if not response.has_redirect_location:
                return response
            here = response.request.url
            there = here.join(response.headers["location"])
            if there.origin != here.origin:
                # A storage says nothing about the file; another hub does.
                if there.host not in hosts:
                    return response
                headers.pop("authorization", None)
            url = str(there)
        return response

    def resolve(self, repo: str, file: str, revision: str = "main") -> RemoteFile:
        """What the hub says `file` is at `revision`.

        Raises:
            Offline, Gated, NotOnHub, WebPage, HubError; Interrupted when it may be tried again.
        """
        found = self._metadata(self._url(repo, file, revision), repo, file)
        headers = found.headers
        size = headers.get("x-linked-size", "")
        packed = headers.get("content-encoding", "identity").lower() != "identity"
        if not size and not found.is_redirect and not packed:
            size = headers.get("content-length", "")
        commit = headers.get("x-repo-commit", "")
        if commit and packed and not size:
            raise HubError(
                f"The hub does not state the size of {repo}/{file}: something on the way "
                f"compresses it ({headers['content-encoding'][:40]}); check HF_ENDPOINT and the "
                "proxies."
            )
        if not commit or not size.isdigit():
            raise causes.web_page(self.endpoint, repo)
        etag = headers.get("x-linked-etag") or headers.get("etag") or ""
        etag = _unquoted(etag)
        if not _SHA256.fullmatch(etag):
            raise HubError(
                f"The hub states no SHA-256 for {repo}/{file}, so it cannot be verified."
            )
        return RemoteFile(repo, file, commit, etag, int(size))

    def files(self, repo: str, revision: str = "main") -> tuple[Listed, ...]:
        """Every file of a repository, in all its folders.

        Raises:
            As `resolve`.
        """
        url = f"{self.endpoint}/api/models/{repo}/tree/{quote(revision, safe='')}?recursive=true"
        headers = self._headers()
        found: list[Listed] = []
        try:
            for _ in range(_MOST_PAGES):
                with self._asking(url, repo, ""):
                    response = self._client().get(
                        url,
                        headers=headers,
                        timeout=min(_CONNECT_TIMEOUT, self.stall),
                        follow_redirects=True,
                    )
                if response.status_code != 200:
                    raise self._refused(response, repo, "")
                found += msgspec.json.decode(response.content, type=list[Listed])
                there = response.url.join(response.links.get("next", {}).get("url", ""))
                if "next" not in response.links or there.origin != response.url.origin:
                    break  # the token stays with the host that it is for
                url = str(there)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise causes.web_page(self.endpoint, repo) from None
        return tuple(each for each in found if each.type == "file")

    @contextmanager
    def stream(self, remote: RemoteFile, start: int, end: int) -> Iterator[Answer]:
        """Bytes [start, end) of a file, from the pinned commit.

        Raises:
            FileChanged: it is not the file that was pinned. Else as `resolve`.
        """
        import httpx2

        url = self._url(remote.repo, remote.file, remote.commit)
        headers = self._headers() | {"Range": f"bytes={start}-{end - 1}"}
        timeout = httpx2.Timeout(self.stall, connect=_CONNECT_TIMEOUT)
        with (
            self._asking(url, remote.repo, remote.file),
            self._client().stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=True
            ) as response,
        ):
            if response.status_code not in (200, 206):
                raise self._refused(response, remote.repo, remote.file)
            if "text/html" in response.headers.get("content-type", ""):
                raise causes.web_page(self.endpoint, remote.repo)
            packed = _packing(response, remote)
            whole = _check_answer(response, remote, start)
            chunks = response.iter_bytes() if packed else response.iter_raw()
            yield Answer(whole, self._chunks(chunks, url, remote))

    def _chunks(self, chunks: Iterator[bytes], url: str, remote: RemoteFile) -> Iterator[bytes]:
        with self._asking(url, remote.repo, remote.file):
            yield from chunks


def _unquoted(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _packing(response: httpx2.Response, remote: RemoteFile) -> str:
    """How the bytes are packed ("": not at all), although we ask for them as they are.

    Raises:
        HubError: they cannot be unpacked. Of a packed file a range is no part of the file.
    """
    packed: str = response.headers.get("content-encoding", "").strip().lower()
    if packed in ("", "identity"):
        return ""
    if packed in ("gzip", "deflate") and response.status_code == 200:
        return packed
    raise HubError(
        f"{response.request.url.host} sends {remote.repo}/{remote.file} compressed "
        f"({packed[:40]}), which was not requested and cannot be downloaded in parts; a "
        "mirror or proxy on the way does that: check HF_ENDPOINT and the proxies, or ask "
        "their administrator."
    )


def _check_answer(response: httpx2.Response, remote: RemoteFile, start: int) -> bool:
    """Whether the whole file comes instead of a range; raises when it is not the pinned file."""
    status = response.status_code
    changed = FileChanged(
        f"{remote.repo}/{remote.file} changed on the hub while it was being downloaded."
    )
    for each in (*response.history, response):
        commit = each.headers.get("x-repo-commit", remote.commit)
        etag: str = each.headers.get("x-linked-etag") or each.headers.get("etag") or ""
        etag = _unquoted(etag)
        if commit != remote.commit or (_SHA256.fullmatch(etag) and etag != remote.sha256):
            raise changed
    if status == 206:
        placed = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+)", response.headers.get("content-range", "").strip()
        )
        if not placed or int(placed[1]) != start or int(placed[2]) != remote.size:
            raise changed
        return False
    length = response.headers.get("content-length")
    packed = response.headers.get("content-encoding")
    if length is not None and not packed and int(length) != remote.size:
        raise changed
    return True
