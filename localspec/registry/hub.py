"""The Hugging Face hub: which bytes a name means, and ranges of them; its errors in our words.

huggingface_hub gives endpoint, token, offline mode, proxies, certificates and metadata; it is
imported on first use (0.3 s). Its messages are never passed on: they may hold signed addresses.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from localspec.registry.errors import (
    FileChanged,
    Gated,
    HubError,
    NotOnHub,
    Offline,
    Unreachable,
    WebPage,
)
from localspec.registry.retry import Interrupted, Patience, patiently

if TYPE_CHECKING:
    import httpx2

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECT_TIMEOUT = 10.0
_MOST_REDIRECTS = 10
_MOST_PAGES = 20  # of a list, a thousand files each; no repository of models has as many
_LONGEST_PAUSE = 300.0  # a server may ask for more; nobody waits that long without being told


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


@dataclass(frozen=True, slots=True)
class Listed:
    """One file in the hub's list of a repository. Size in bytes."""

    file: str
    size: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes on their way. `whole`: the server ignores ranges and sends the file from its start."""

    whole: bool
    chunks: Iterator[bytes]


def offline() -> bool:
    """Whether the environment forbids the network; asked before anything is imported or opened."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


class Hub:
    """One hub. `endpoint` None: HF_ENDPOINT or huggingface.co, which is this process's own.

    `token` None: HF_TOKEN or the hub's own login, for its own endpoint alone; another endpoint gets
    no token but one that was given for it. No token goes on to a host that the endpoint redirects
    to. `stall`: seconds without a byte after which a connection is given up.
    """

    def __init__(
        self, endpoint: str | None = None, *, token: str | None = None, stall: float = 20.0
    ) -> None:
        self._endpoint = endpoint
        self._token = token
        self.stall = stall

    def check_online(self) -> None:
        """Raises Offline."""
        if offline():
            raise Offline(
                "HF_HUB_OFFLINE is set, so nothing can be pulled; pairs that are here work as ever."
            )

    def _library(self) -> ModuleType:
        """huggingface_hub, without its telemetry: a pull says which file it wants, no more."""
        self.check_online()
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils

        return huggingface_hub

    def _url(self, repo: str, file: str, revision: str) -> str:
        url: str = self._library().hf_hub_url(
            repo, file, revision=revision, endpoint=self._endpoint
        )
        return url

    def _headers(self) -> dict[str, str]:
        library = self._library()
        own = self._endpoint is None or self._endpoint.rstrip("/") == library.constants.ENDPOINT
        token = self._token or (None if own else False)  # False: none, whoever is logged in
        headers: dict[str, str] = library.utils.build_hf_headers(
            token=token, library_name="localspec"
        )
        return headers | {"Accept-Encoding": "identity"}

    def _metadata(self, url: str) -> httpx2.Response:
        """The answer to a HEAD that states commit, hash and size, redirects among it.

        Not huggingface_hub's own way, which takes the token along to other hosts of the hub.
        """
        library = self._library()
        headers = self._headers()
        for _ in range(_MOST_REDIRECTS):
            response: httpx2.Response = library.get_session().request(
                "HEAD", url, headers=headers, timeout=_CONNECT_TIMEOUT, follow_redirects=False
            )
            library.utils.hf_raise_for_status(response)
            if not response.has_redirect_location:
                return response
            here = response.request.url
            there = here.join(response.headers["location"])
            if there.origin != here.origin:
                # A storage says nothing about the file; another hub does.
                if there.host not in library.constants.HF_URL_HOSTS:
                    return response
                headers.pop("authorization", None)
            url = str(there)
        return response

    def resolve(self, repo: str, file: str, revision: str = "main") -> RemoteFile:
        """What the hub says `file` is at `revision`.

        Raises:
            Offline, Gated, NotOnHub, WebPage, HubError; Interrupted when it may be tried again.
        """
        self.check_online()
        try:
            found = self._metadata(self._url(repo, file, revision))
        except Exception as error:
            raise _translated(error, repo, file) from None
        headers = found.headers
        size = headers.get("x-linked-size", "")
        if not size and not found.is_redirect:
            size = headers.get("content-length", "")
        commit = headers.get("x-repo-commit", "")
        if not commit or not size.isdigit():
            raise WebPage(_WEB_PAGE.format(repo=repo))
        etag = headers.get("x-linked-etag") or headers.get("etag") or ""
        etag = _unquoted(etag)
        if not _SHA256.fullmatch(etag):
            raise HubError(f"The hub states no SHA-256 for {repo}/{file}, so it cannot be checked.")
        return RemoteFile(repo, file, commit, etag, int(size))

    def files(self, repo: str, revision: str = "main") -> tuple[Listed, ...]:
        """Every file of a repository, in all its folders.

        Raises:
            As `resolve`.
        """
        library = self._library()
        endpoint = (self._endpoint or library.constants.ENDPOINT).rstrip("/")
        url = f"{endpoint}/api/models/{repo}/tree/{quote(revision, safe='')}?recursive=true"
        headers, found = self._headers(), []
        try:
            for _ in range(_MOST_PAGES):
                response: httpx2.Response = library.get_session().get(
                    url, headers=headers, timeout=_CONNECT_TIMEOUT, follow_redirects=True
                )
                library.utils.hf_raise_for_status(response)
                found += msgspec.json.decode(response.content, type=list[_Entry])
                there = response.url.join(response.links.get("next", {}).get("url", ""))
                if "next" not in response.links or there.origin != response.url.origin:
                    break  # the token stays with the host that it is for
                url = str(there)
        except msgspec.MsgspecError:
            raise WebPage(_WEB_PAGE.format(repo=repo)) from None
        except Exception as error:
            raise _translated(error, repo, "") from None
        return tuple(Listed(each.path, each.size) for each in found if each.type == "file")

    @contextmanager
    def stream(self, remote: RemoteFile, start: int, end: int) -> Iterator[Answer]:
        """Bytes [start, end) of a file, from the pinned commit.

        Raises:
            FileChanged: it is not the file that was pinned. Else as `resolve`.
        """
        library = self._library()
        import httpx2

        headers = self._headers() | {"Range": f"bytes={start}-{end - 1}"}
        timeout = httpx2.Timeout(self.stall, connect=_CONNECT_TIMEOUT)
        url = self._url(remote.repo, remote.file, remote.commit)
        try:
            with library.get_session().stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=True
            ) as response:
                whole = _check_answer(response, remote, start)
                yield Answer(whole, response.iter_raw())
        except httpx2.HTTPError as error:
            raise _translated(error, remote.repo, remote.file) from None


class _Entry(msgspec.Struct):
    """A file or folder as the hub's own API lists it."""

    type: str
    path: str
    size: int = 0


class RemoteSource:
    """The start of a file on the hub, as a gguf.Source.

    `prefix` holds the bytes that are known, from an earlier pull or read here: a header read once
    is not fetched again with the rest. `fetched` counts the bytes that came over the network.
    """

    def __init__(
        self,
        hub: Hub,
        remote: RemoteFile,
        prefix: bytes = b"",
        patience: Patience | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        self._hub, self._remote = hub, remote
        self._patience, self._cancel = patience, cancel
        self.prefix = bytearray(prefix)
        self.name = remote.name
        self.size = remote.size
        self.fetched = 0

    def read(self, offset: int, size: int) -> bytes:
        """One range; a server that ignores ranges is read from the start up to the end of it."""
        end = min(offset + size, self.size)
        start = max(offset, min(end, len(self.prefix)))
        data = bytes(self.prefix[offset:start])
        if start < end:
            data += patiently(lambda: self._read(start, end), self._patience, self._cancel)
        if offset <= len(self.prefix) < end:
            self.prefix[offset:] = data
        return data

    def _read(self, start: int, end: int) -> bytes:
        data = bytearray()
        with self._hub.stream(self._remote, start, end) as answer:
            skip = start if answer.whole else 0
            for chunk in answer.chunks:
                data += chunk
                self.fetched += len(chunk)
                if len(data) >= skip + end - start:
                    break
        if len(data) < skip + end - start:
            raise Interrupted("the connection closed early")
        return bytes(data[skip : skip + end - start])


_WEB_PAGE = (
    "Something between here and the hub answered for {repo} with a page of its own (a login page "
    "of the network, perhaps); open a browser, log in, and try again."
)


def _unquoted(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _check_answer(response: httpx2.Response, remote: RemoteFile, start: int) -> bool:
    """Whether the whole file comes instead of a range; raises when it is not the pinned file."""
    status = response.status_code
    if status not in (200, 206):
        raise _from_status(status, dict(response.headers), remote.repo, remote.file)
    if "text/html" in response.headers.get("content-type", ""):
        raise WebPage(_WEB_PAGE.format(repo=remote.repo))
    changed = FileChanged(f"{remote.repo}/{remote.file} changed on the hub while it was fetched.")
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
    if length is not None and int(length) != remote.size:
        raise changed
    return True


def _from_status(status: int, headers: dict[str, str], repo: str, file: str) -> Exception:
    """An HTTP status as our error."""
    lowered = {key.lower(): value for key, value in headers.items()}
    code = lowered.get("x-error-code", "")
    if status in _BUSY:
        return Interrupted(f"the hub answered {status}", _retry_after(lowered))
    if code == "RepoNotFound" or (status == 404 and not code):
        return NotOnHub(
            f"The hub has no repository {repo}, or it is private; if so, run: hf auth login"
        )
    if status == 404 and not file:
        return NotOnHub(f"The hub has no such revision of {repo}.")
    if status == 404:
        return NotOnHub(f"The hub has no file {file} in {repo} at that revision.")
    if status in (401, 403):
        return Gated(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then log in "
            "(hf auth login) or set HF_TOKEN."
        )
    return HubError(f"The hub answered {status} for {repo}/{file}.")


def _retry_after(headers: dict[str, str]) -> float | None:
    """Seconds a server asked for: Retry-After as a number, or the hub's own RateLimit header."""
    value = headers.get("retry-after", "").strip()
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("ratelimit", ""))
    seconds = value if value.isdigit() else (limit[1] if limit else "")
    return min(float(seconds), _LONGEST_PAUSE) if seconds else None


def _translated(error: Exception, repo: str, file: str) -> Exception:
    """Whatever huggingface_hub and its HTTP library raise, as ours."""
    import httpx2
    from huggingface_hub import errors as theirs

    response = getattr(error, "response", None)
    if isinstance(error, theirs.OfflineModeIsEnabled):
        return Offline("HF_HUB_OFFLINE is set, so nothing can be pulled.")
    if isinstance(error, theirs.GatedRepoError):
        return _from_status(403, {}, repo, file)
    if isinstance(error, theirs.RepositoryNotFoundError):
        return _from_status(404, {"x-error-code": "RepoNotFound"}, repo, file)
    if isinstance(error, theirs.HfHubHTTPError) and response is not None:
        return _from_status(response.status_code, dict(response.headers), repo, file)
    if isinstance(error, theirs.HFValidationError):
        return NotOnHub(f"'{repo}' is not a possible repository name.")
    if isinstance(error, httpx2.TimeoutException):
        return Interrupted("the connection stalled")
    if isinstance(error, httpx2.TransportError):
        return Interrupted(f"the connection failed ({type(error).__name__})")
    return Unreachable(f"The hub could not be asked for {repo}/{file} ({type(error).__name__}).")
