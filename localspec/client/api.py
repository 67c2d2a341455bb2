"""One method per endpoint of the daemon."""

from __future__ import annotations

import json

import localspec
from localspec import errors
from localspec.client import transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

# A daemon of another API version refuses a request that carries this header, before any work.
API_HEADER = "X-Localspec-Api"


class Client:
    """Talks to this user's daemon, and starts it when it is not running and `autostart` is set.

    Raises (every method that asks the daemon):
        NoDaemon: there is none, it did not start, or it went away.
        BadResponse: what came is no answer of ours.
        LocalspecError: the error it answered with, as its own class.
    """

    def __init__(self, socket_path: str | None = None, *, autostart: bool = True) -> None:
        self.socket_path = socket_path or transport.socket_path()
        self.autostart = autostart

    # ------------------------------------------------------------------ endpoints

    def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """A whole chat completion."""
        return self._json("POST", "/v1/chat/completions", {**request, "stream": False})

    def stream_chat(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a chat completion, as they arrive. Closing the iterator cancels it."""
        return self._events("POST", "/v1/chat/completions", {**request, "stream": True})

    def infill(self, request: dict[str, Any]) -> dict[str, Any]:
        """What an editor would show, in llama-server's shape."""
        return self._json("POST", "/infill", {**request, "stream": False})

    def embeddings(self, request: dict[str, Any]) -> dict[str, Any]:
        """Vectors of texts, in OpenAI's shape."""
        return self._json("POST", "/v1/embeddings", request)

    def health(self) -> dict[str, Any]:
        return self._json("GET", "/health")

    def status(self) -> dict[str, Any]:
        return self._json("GET", "/localspec/status", timeout=10.0)

    def shutdown(self) -> dict[str, Any]:
        """Ask the daemon to finish what it is doing and end."""
        return self._json("POST", "/localspec/shutdown", {}, timeout=10.0)

    def reset(self) -> dict[str, Any]:
        """Use again a pair that was set aside after crashes; forget that safe mode was needed."""
        return self._json("POST", "/localspec/reset", {})

    def configure(self) -> dict[str, Any]:
        """Have the daemon read config.toml again; see Configured in openapi.yaml."""
        return self._json("POST", "/localspec/config", {}, timeout=30.0)

    def connect(self, timeout: float | None = None) -> transport.Connection:
        """A connection, with a daemon started for it if need be; `timeout` for every wait, in s."""
        try:
            return transport.Connection(self.socket_path, timeout)
        except errors.NoDaemon:
            if not self.autostart:
                raise
        from localspec.client import autostart

        autostart.start(self.socket_path)
        return transport.Connection(self.socket_path, timeout)

    # ------------------------------------------------------------------ underneath

    def _json(
        self, method: str, target: str, body: object = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """The answer's JSON; `timeout` in seconds for every wait."""
        data = b"" if body is None else json.dumps(body).encode()
        connection, response = self._open(method, target, data, timeout)
        try:
            value: dict[str, Any] = json.loads(response.read())
            return value
        except ValueError as error:
            raise errors.BadResponse("The daemon's answer is not valid JSON.") from error
        finally:
            connection.close()

    def _events(
        self, method: str, target: str, body: object = None
    ) -> Generator[dict[str, Any], None, None]:
        """The JSON of each server-sent event up to [DONE]; an error among them is raised."""
        data = b"" if body is None else json.dumps(body).encode()
        return transport.answers(lambda: self._open(method, target, data))

    def _open(
        self, method: str, target: str, body: bytes, timeout: float | None = None
    ) -> tuple[transport.Connection, transport.Response]:
        """Send a request; a response that is not an error, or the error it carries."""
        try:
            return self._try(method, target, body, timeout)
        except errors.VersionMismatch:
            from localspec.client import autostart

            autostart.replace(self.socket_path, allowed=self.autostart)
            return self._try(method, target, body, timeout)

    def _try(
        self, method: str, target: str, body: bytes, timeout: float | None
    ) -> tuple[transport.Connection, transport.Response]:
        connection = self.connect(timeout)
        try:
            headers = {API_HEADER: str(localspec.API_VERSION)}
            response = connection.request(method, target, body, headers)
            if response.status >= 400:
                raise _from_body(response.status, response.read())
            return connection, response
        except BaseException:
            connection.close()
            raise


def _from_body(status: int, body: bytes) -> errors.LocalspecError:
    try:
        return transport.error_of(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode("utf-8", "replace").strip()
        return errors.BadResponse(f"The daemon answered with HTTP {status}: {text or 'nothing'}")
