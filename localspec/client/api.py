"""A client with one method per endpoint of the daemon that `ask` needs."""

from __future__ import annotations

import contextlib
import json
import os

import localspec
from localspec import errors
from localspec.client import transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

# A daemon of another API version refuses a request that carries this header, before any work.
API_HEADER = "X-Localspec-Api"
VERSION_HEADER = "x-localspec-version"  # in which it answers with the version of its package
ENVIRONMENT_HEADER = "X-Localspec-Environment"
_MAX_ENVIRONMENT_LENGTH = 16_384  # characters; the head of a request is limited


def version_note() -> str:
    """Return a sentence if the daemon that answered last is of another version than this program, or ""."""
    daemon, ours = Client.daemon_version, localspec.__version__
    if daemon in (None, ours):
        return ""
    if daemon:
        return f"The daemon is localspec {daemon}, and this is {ours}: localspec restart"
    return f"The daemon is an older localspec than this one ({ours}): localspec restart"


class Client:
    """A client of this user's daemon. It starts the daemon if none is running and `autostart` is set.

    Every method that sends a request raises:
        NoDaemon: No daemon is running, it did not start, or it ended during the request.
        BadResponse: The response is not one that a daemon of ours sends.
        LocalspecError: The error in the response, as its own class.
    """

    # The version of the daemon that answered last, "" if it is so old that it does not say it.
    daemon_version: str | None = None

    def __init__(self, socket_path: str | None = None, *, autostart: bool = True) -> None:
        self.socket_path = socket_path or transport.socket_path()
        self.autostart = autostart

    def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a complete chat completion."""
        return self._json("POST", "/v1/chat/completions", {**request, "stream": False})

    def stream_chat(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of a chat completion as they arrive. Closing the iterator cancels the request."""
        return self._events("POST", "/v1/chat/completions", {**request, "stream": True})

    def end_thoughts(self, answer: str) -> bool:
        """End the thoughts of the running chat completion with this id. Return whether it was in them."""
        body = {"id": answer, "action": "reasoning_end"}
        response = self._json("POST", "/v1/chat/completions/control", body, timeout=10.0)
        return bool(response["success"])

    def infill(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the completion that an editor would show, in llama-server's shape."""
        return self._json("POST", "/infill", {**request, "stream": False})

    def next_edit(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return how the lines around an editor's cursor should be next."""
        return self._json("POST", "/localspec/next-edit", request)

    def embeddings(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the embedding vectors of texts, in OpenAI's shape."""
        return self._json("POST", "/v1/embeddings", request)

    def health(self) -> dict[str, Any]:
        return self._json("GET", "/health")

    def status(self) -> dict[str, Any]:
        return self._json("GET", "/localspec/status", timeout=10.0)

    def shutdown(self) -> dict[str, Any]:
        """Ask the daemon to finish the running requests and end."""
        return self._json("POST", "/localspec/shutdown", {}, timeout=10.0)

    def forget_private(self) -> None:
        """Have engines forget what they hold of private requests. A failure is no concern of the caller."""
        with contextlib.suppress(errors.LocalspecError):
            self._json("DELETE", "/localspec/conversations/private", timeout=10.0)

    def reset(self) -> dict[str, Any]:
        """Use a pair again that was set aside after crashes, and forget that safe mode was needed."""
        return self._json("POST", "/localspec/reset", {})

    def configure(self) -> dict[str, Any]:
        """Make the daemon read config.toml again. The response is `Configured` in openapi.yaml."""
        return self._json("POST", "/localspec/config", {}, timeout=30.0)

    def connect(self, timeout: float | None = None) -> transport.Connection:
        """Return a connection to the daemon, which is started first if necessary.

        `timeout` limits every single wait on the socket, in seconds.
        """
        try:
            return transport.Connection(self.socket_path, timeout)
        except errors.NoDaemon:
            if not self.autostart:
                raise
        from localspec.client import autostart

        autostart.start(self.socket_path)
        return transport.Connection(self.socket_path, timeout)

    def _json(
        self, method: str, target: str, body: object = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return the JSON body of a response. `timeout` limits every single wait, in seconds."""
        data = b"" if body is None else json.dumps(body).encode()
        connection, response = self._open(method, target, data, timeout)
        try:
            decoded: dict[str, Any] = json.loads(response.read())
            return decoded
        except ValueError as error:
            raise errors.BadResponse("The daemon's answer is not valid JSON.") from error
        finally:
            connection.close()

    def _events(
        self, method: str, target: str, body: object = None
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the JSON of each server-sent event up to [DONE]. An error event is raised."""
        data = b"" if body is None else json.dumps(body).encode()
        return transport.json_events(lambda: self._open(method, target, data))

    def _open(
        self, method: str, target: str, body: bytes, timeout: float | None = None
    ) -> tuple[transport.Connection, transport.Response]:
        """Send a request and return its response, or raise the error that the response carries.

        A daemon of another version is replaced first.
        """
        try:
            return self._send(method, target, body, timeout)
        except errors.VersionMismatch:
            from localspec.client import autostart

            autostart.replace(self.socket_path, allowed=self.autostart)
            return self._send(method, target, body, timeout)

    def _send(
        self, method: str, target: str, body: bytes, timeout: float | None
    ) -> tuple[transport.Connection, transport.Response]:
        connection = self.connect(timeout)
        try:
            headers = {API_HEADER: str(localspec.API_VERSION), **_shell_variables()}
            response = connection.request(method, target, body, headers)
            Client.daemon_version = response.headers.get(VERSION_HEADER, "")
            if response.status >= 400:
                raise _error_from_body(response.status, response.read())
            return connection, response
        except BaseException:
            connection.close()
            raise


def _shell_variables() -> dict[str, str]:
    """Return the header with the LOCALSPEC_* variables of this shell, which only a starting daemon reads."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("LOCALSPEC_")}
    variables.pop("LOCALSPEC_HOME", None)  # this one is read here
    text = json.dumps(variables)
    return {ENVIRONMENT_HEADER: text} if variables and len(text) < _MAX_ENVIRONMENT_LENGTH else {}


def _error_from_body(status: int, body: bytes) -> errors.LocalspecError:
    try:
        return transport.error_from_detail(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode("utf-8", "replace").strip()
        return errors.BadResponse(f"The daemon answered with HTTP {status}: {text or 'nothing'}")
