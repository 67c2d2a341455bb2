"""Resolve and download files of the Hugging Face hub.

huggingface_hub builds URLs and headers and renews a login. It is imported on first use, which takes 0.3 s.
Each Hub object has its own HTTP client, because huggingface_hub's client serves only one environment.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
from localspec.paths import hf_cache_folder
from localspec.registry.hub import network as causes
from localspec.registry.hub.network import HUB_URL, Network

if TYPE_CHECKING:
    import httpx2


_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONNECT_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 10
_MAX_PAGES = 20  # of a file list, with a thousand files each; no repository of models has that many


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file on the hub, pinned to a commit and a hash. The size is in bytes."""

    repo: str
    file: str
    commit: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return self.file.rsplit("/", 1)[-1]


class ListedFile(msgspec.Struct, frozen=True):
    """One file in the hub's list of a repository, or a folder (see `type`). The size is in bytes.

    oid: the same for files of the same content, empty if unknown.
    """

    file: str = msgspec.field(name="path")
    size: int = 0
    type: str = "file"
    oid: str = ""


@dataclass(frozen=True, slots=True)
class Download:
    """The bytes of a download in progress.

    whole: the server ignores ranges and sends the file from its start.
    """

    whole: bool
    chunks: Iterator[bytes]


class Hub:
    """A hub, as one pull reaches it.

    endpoint: the URL of the hub; None for that of the network. token: None for the network's token, which is
    used only for the network's own endpoint. Another endpoint gets no token except one passed here, and no
    token is sent to a host that the endpoint redirects to. stall: a connection is given up after this many
    seconds without a byte. network: None for this process's own environment.
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
        self._http_client: httpx2.Client | None = None

    @property
    def network(self) -> Network:
        return self._network or Network.from_environment(os.environ)

    @property
    def endpoint(self) -> str:
        return (self._endpoint or self.network.endpoint).rstrip("/")

    def check_online(self) -> None:
        """Raise Offline if a variable forbids the network."""
        if self.network.offline:
            raise Offline(
                f"{self.network.offline} is set, so nothing can be pulled; installed pairs still work."
            )

    def _library(self) -> ModuleType:
        """Import huggingface_hub without its telemetry.

        A pull thus tells the hub which file it needs and nothing more.
        """
        self.check_online()
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils

        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
        return huggingface_hub

    def _client(self) -> httpx2.Client:
        """Return this hub's own HTTP client; the session of huggingface_hub is shared by all hubs."""
        with self._lock:
            if self._http_client is None:
                self._http_client = self.network.make_client()
                weakref.finalize(self, self._http_client.close)
            return self._http_client

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
        if token := self._token or self._environment_token(library):
            if not re.fullmatch(r"[!-~]+", token):
                raise BadToken("The hub token contains invalid characters; check HF_TOKEN.")
            headers["authorization"] = f"Bearer {token}"
        return headers | {"Accept-Encoding": "identity"}

    def _environment_token(self, library: ModuleType) -> str:
        """Return the token that the environment has for its own endpoint, or an empty text.

        A stored login is sent only to the public hub or the endpoint that the daemon was started with. An
        endpoint that a shell names gets only a token that the shell names too.
        """
        network, constants = self.network, library.constants
        if self.endpoint != network.endpoint:
            return ""
        if network.token:
            return network.token
        file = network.token_file
        if file is None and self.endpoint in (HUB_URL, constants.ENDPOINT):
            file = network.login
        if file is None:
            return ""
        is_library_file = str(file) == constants.HF_TOKEN_PATH
        if (
            is_library_file
            and not {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"} & os.environ.keys()
        ):
            return library.get_token() or ""  # it renews a token that is about to expire
        return network.read_token(file)

    @contextmanager
    def _translate_errors(self, url: str, repo: str, file: str) -> Iterator[None]:
        """Convert the HTTP library's exceptions to localspec's errors."""
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            try:
                parsed_url = httpx2.URL(url)
            except httpx2.InvalidURL:
                parsed_url = None
            raise causes.error_from_exception(error, self.network, parsed_url, repo, file) from None

    def _refusal_error(self, response: httpx2.Response, repo: str, file: str) -> Exception:
        return causes.error_from_status(response, self.network, self.endpoint, repo, file)

    def _request_metadata(self, url: str, repo: str, file: str) -> httpx2.Response:
        """Return the response to a HEAD request that states commit, hash and size. It may be a redirect.

        huggingface_hub's own function is not used, because it sends the token to other hosts of the hub too.
        """
        with self._translate_errors(url, repo, file):
            hosts = {*self._library().constants.HF_URL_HOSTS, urlsplit(self.endpoint).hostname}
        headers = self._headers()
        for _ in range(_MAX_REDIRECTS):
            with self._translate_errors(url, repo, file):
                response = self._client().request(
                    "HEAD",
                    url,
                    headers=headers,
                    timeout=min(_CONNECT_TIMEOUT_S, self.stall),
                    follow_redirects=False,
                )
            if response.status_code >= 400:
                raise self._refusal_error(response, repo, file)
            if not response.has_redirect_location:
                return response
            url_before = response.request.url
            url_after = url_before.join(response.headers["location"])
            if url_after.origin != url_before.origin:
                # A storage server states nothing about the file, while another hub does.
                if url_after.host not in hosts:
                    return response
                headers.pop("authorization", None)
            url = str(url_after)
        return response

    def resolve(self, repo: str, file: str, revision: str = "main") -> RemoteFile:
        """Return the commit, hash and size of `file` at `revision`.

        Raises:
            Offline, Gated, NotOnHub, WebPage, HubError: the request failed for good.
            RetryableError: it may be tried again.
        """
        response = self._request_metadata(self._url(repo, file, revision), repo, file)
        headers = response.headers
        size = headers.get("x-linked-size", "")
        is_compressed = headers.get("content-encoding", "identity").lower() != "identity"
        if not size and not response.is_redirect and not is_compressed:
            size = headers.get("content-length", "")
        commit = headers.get("x-repo-commit", "")
        if commit and is_compressed and not size:
            raise HubError(
                f"The hub does not state the size of {repo}/{file}: something on the way "
                f"compresses it ({headers['content-encoding'][:40]}); check HF_ENDPOINT and the "
                "proxies."
            )
        if not commit or not size.isdecimal():
            raise causes.web_page_error(self.endpoint, repo)
        etag = headers.get("x-linked-etag") or headers.get("etag") or ""
        etag = _strip_etag(etag)
        if not _SHA256.fullmatch(etag):
            raise HubError(
                f"The hub states no SHA-256 for {repo}/{file}, so it cannot be verified."
            )
        return RemoteFile(repo, file, commit, etag, int(size))

    def list_files(self, repo: str, revision: str = "main") -> tuple[ListedFile, ...]:
        """Return every file of a repository, in all its folders.

        Raises:
            As `resolve`.
        """
        url = f"{self.endpoint}/api/models/{repo}/tree/{quote(revision, safe='')}?recursive=true"
        headers = self._headers()
        entries: list[ListedFile] = []
        try:
            for _ in range(_MAX_PAGES):
                with self._translate_errors(url, repo, ""):
                    response = self._client().get(
                        url,
                        headers=headers,
                        timeout=min(_CONNECT_TIMEOUT_S, self.stall),
                        follow_redirects=True,
                    )
                if response.status_code != 200:
                    raise self._refusal_error(response, repo, "")
                entries += msgspec.json.decode(response.content, type=list[ListedFile])
                next_url = response.url.join(response.links.get("next", {}).get("url", ""))
                if "next" not in response.links or next_url.origin != response.url.origin:
                    break  # the token must not go to another host
                url = str(next_url)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise causes.web_page_error(self.endpoint, repo) from None
        return tuple(entry for entry in entries if entry.type == "file")

    @contextmanager
    def stream(self, remote: RemoteFile, start: int, end: int) -> Iterator[Download]:
        """Download the bytes [start, end) of a file at its pinned commit.

        Raises:
            FileChanged: the file on the hub is not the pinned one.
            Others: as `resolve`.
        """
        import httpx2

        url = self._url(remote.repo, remote.file, remote.commit)
        headers = self._headers() | {"Range": f"bytes={start}-{end - 1}"}
        timeout = httpx2.Timeout(self.stall, connect=_CONNECT_TIMEOUT_S)
        with (
            self._translate_errors(url, remote.repo, remote.file),
            self._client().stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=True
            ) as response,
        ):
            if response.status_code not in (200, 206):
                raise self._refusal_error(response, remote.repo, remote.file)
            if "text/html" in response.headers.get("content-type", ""):
                raise causes.web_page_error(self.endpoint, remote.repo)
            encoding = _content_encoding(response, remote)
            is_whole = _check_response(response, remote, start)
            chunks = response.iter_bytes() if encoding else response.iter_raw()
            yield Download(is_whole, self._chunks(chunks, url, remote))

    def _chunks(self, chunks: Iterator[bytes], url: str, remote: RemoteFile) -> Iterator[bytes]:
        with self._translate_errors(url, remote.repo, remote.file):
            yield from chunks


def _strip_etag(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _content_encoding(response: httpx2.Response, remote: RemoteFile) -> str:
    """Return how the response is compressed, "" if it is not. The request asks for uncompressed bytes.

    Raises:
        HubError: it cannot be decompressed. A range of a compressed file is not a part of the file.
    """
    encoding: str = response.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding in ("gzip", "deflate") and response.status_code == 200:
        return encoding
    raise HubError(
        f"{response.request.url.host} sends {remote.repo}/{remote.file} compressed "
        f"({encoding[:40]}), which was not requested and cannot be downloaded in parts; a "
        "mirror or proxy on the way does that: check HF_ENDPOINT and the proxies, or ask "
        "their administrator."
    )


def _check_response(response: httpx2.Response, remote: RemoteFile, start: int) -> bool:
    """Return whether the response contains the whole file instead of the range.

    Raises:
        FileChanged: it is not the pinned file.
    """
    status = response.status_code
    file_changed = FileChanged(
        f"{remote.repo}/{remote.file} changed on the hub while it was being downloaded."
    )
    for redirect in (*response.history, response):
        commit = redirect.headers.get("x-repo-commit", remote.commit)
        etag: str = redirect.headers.get("x-linked-etag") or redirect.headers.get("etag") or ""
        etag = _strip_etag(etag)
        if commit != remote.commit or (_SHA256.fullmatch(etag) and etag != remote.sha256):
            raise file_changed
    if status == 206:
        content_range = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+)", response.headers.get("content-range", "").strip()
        )
        if (
            not content_range
            or int(content_range[1]) != start
            or int(content_range[2]) != remote.size
        ):
            raise file_changed
        return False
    length = response.headers.get("content-length")
    encoding = response.headers.get("content-encoding")
    if length is not None and not encoding and int(length) != remote.size:
        raise file_changed
    return True


# ------------------------------------------------------------------------ cache
# Look up files in the Hugging Face cache on this disk, for when there is no network.


_SHA256 = re.compile(r"[0-9a-f]{64}")


def cached_file(repo: str, file: str, commit: str, sha256: str, size: int) -> Path | None:
    """Return the file in the Hugging Face cache if its size matches.

    Its hash still has to be checked.
    """
    folder = hf_cache_folder() / f"models--{repo.replace('/', '--')}"
    for path in (folder / "snapshots" / commit / file, folder / "blobs" / sha256):
        try:
            if path.resolve().name == sha256 and path.stat().st_size == size:
                return path
        except OSError:
            continue
    return None


def resolve_in_cache(repo: str, file: str, revision: str = "main") -> RemoteFile | None:
    """Return what the Hugging Face cache knows of a file on the hub, if the cache has all of it.

    The cache names large files by their SHA-256, and `refs` has the commit of each revision.
    """
    folder = hf_cache_folder() / f"models--{repo.replace('/', '--')}"
    try:
        ref = folder / "refs" / revision
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        blob = (folder / "snapshots" / commit / file).resolve(strict=True)
        size = blob.stat().st_size
    except (OSError, ValueError, RuntimeError):
        return None
    if blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return RemoteFile(repo, file, commit, blob.name, size)


def list_in_cache(repo: str, revision: str = "main") -> tuple[ListedFile, ...]:
    """Return the models of a repository that are complete in the Hugging Face cache."""
    folder = hf_cache_folder() / f"models--{repo.replace('/', '--')}"
    try:
        ref = folder / "refs" / revision
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        snapshot = folder / "snapshots" / commit
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    except (OSError, ValueError):
        return ()
    resolved = [resolve_in_cache(repo, name, revision) for name in sorted(names)]
    return tuple(
        ListedFile(remote.file, remote.size, oid=remote.sha256) for remote in resolved if remote
    )
