"""Resolve and download files of the Hugging Face hub.

huggingface_hub builds URLs and headers and knows the login. It is imported on first use, which takes 0.3 s.
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

from localspec.errors import BadToken, FileChanged, HubError, NetworkSettings, NotOnHub
from localspec.registry.hub import network as causes
from localspec.registry.hub.offline import (
    HUB_URL,
    SHA256,
    ListedFile,
    RemoteFile,
    check_online,
    find_endpoint,
)

if TYPE_CHECKING:
    import httpx2

_CONNECT_TIMEOUT_S = 10.0
_MAX_REDIRECTS = 10
_MAX_PAGES = 20  # of a file list, with a thousand files each; no repository of models has that many


@dataclass(frozen=True, slots=True)
class Download:
    """The bytes of a download in progress.

    whole: the server ignores ranges and sends the file from its start.
    """

    whole: bool
    chunks: Iterator[bytes]


class Hub:
    """A hub, as one pull reaches it.

    endpoint: the URL of the hub; empty for that of the environment. token: empty for the environment's token,
    which is used only for the environment's own endpoint. Another endpoint gets no token except one passed
    here, and no token is sent to a host that the endpoint redirects to. login_endpoint: one that gets a
    stored login, as the public hub does. stall: seconds without a byte after which a connection is given up.
    """

    def __init__(
        self, endpoint: str = "", *, token: str = "", login_endpoint: str = "", stall: float = 20.0
    ) -> None:
        self.endpoint = (endpoint or find_endpoint()).rstrip("/")
        self._token = token
        self._login_endpoint = login_endpoint
        self._stall = stall
        self._lock = threading.Lock()
        self._http_client: httpx2.Client | None = None

    def _library(self) -> ModuleType:
        """Import huggingface_hub without its telemetry.

        A pull thus tells the hub which file it needs and nothing more.
        """
        check_online()
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils

        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
        return huggingface_hub

    def _client(self) -> httpx2.Client:
        with self._lock:
            if self._http_client is None:
                self._http_client = causes.make_client()
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
        constants = library.constants
        is_stored = not (os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"))
        if self.endpoint != find_endpoint() or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return ""
        if is_stored and os.environ.get("HF_TOKEN_PATH"):
            _check_token_file(Path(constants.HF_TOKEN_PATH))
        elif is_stored and self.endpoint not in (HUB_URL, self._login_endpoint):
            return ""
        return library.get_token() or ""  # it renews a token that is about to expire

    @contextmanager
    def _translate_errors(self, url: str, repo: str, file: str) -> Iterator[None]:
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            try:
                parsed_url = httpx2.URL(url)
            except httpx2.InvalidURL:
                parsed_url = None
            raise causes.error_from_exception(error, parsed_url, repo, file) from None

    def _refusal_error(self, response: httpx2.Response, repo: str, file: str) -> Exception:
        return causes.error_from_status(response, self.endpoint, repo, file)

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
                    timeout=min(_CONNECT_TIMEOUT_S, self._stall),
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
        if not (sha256 := _read_etag(response)):
            raise HubError(
                f"The hub states no SHA-256 for {repo}/{file}, so it cannot be verified."
            )
        return RemoteFile(repo, file, commit, sha256, int(size))

    def list_files(self, repo: str, revision: str = "main") -> tuple[ListedFile, ...]:
        """Return every file of a repository, in all its folders. Raises what `resolve` does."""
        url = f"{self.endpoint}/api/models/{repo}/tree/{quote(revision, safe='')}?recursive=true"
        headers = self._headers()
        entries: list[ListedFile] = []
        try:
            for _ in range(_MAX_PAGES):
                with self._translate_errors(url, repo, ""):
                    response = self._client().get(
                        url,
                        headers=headers,
                        timeout=min(_CONNECT_TIMEOUT_S, self._stall),
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
        timeout = httpx2.Timeout(self._stall, connect=_CONNECT_TIMEOUT_S)
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


def _check_token_file(path: Path) -> None:
    """Raise NetworkSettings if HF_TOKEN_PATH names a file that huggingface_hub would ignore or wait for."""
    problem = ""
    if not path.exists():
        problem = "does not exist"
    elif not path.is_file():
        problem = "cannot be read (not a file)"
    elif not os.access(path, os.R_OK):
        problem = "cannot be read (Permission denied)"
    if problem:
        raise NetworkSettings(
            f"HF_TOKEN_PATH names {path}, which {problem}; correct or unset it, and try again."
        )


def _read_etag(response: httpx2.Response) -> str:
    """Return the SHA-256 of a file, if that is its entity tag; of small files it is another one."""
    etag: str = response.headers.get("x-linked-etag") or response.headers.get("etag") or ""
    etag = etag.removeprefix("W/").strip('"')
    return etag if SHA256.fullmatch(etag) else ""


def _content_encoding(response: httpx2.Response, remote: RemoteFile) -> str:
    """Return how the response is compressed, "" if it is not. The request asks for uncompressed bytes."""
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
    """Return whether the response contains the whole file instead of the range."""
    status = response.status_code
    file_changed = FileChanged(
        f"{remote.repo}/{remote.file} changed on the hub while it was being downloaded."
    )
    for redirect in (*response.history, response):
        commit = redirect.headers.get("x-repo-commit", remote.commit)
        if commit != remote.commit or _read_etag(redirect) not in ("", remote.sha256):
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
