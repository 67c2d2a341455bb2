"""One prompt to a server and what came back: ours by its socket, or any other that streams as they do."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import math
import socket
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from localspec.cli.bench.prompts.workloads import Prompt
from localspec.cli.bench.report import Arrival, Round
from localspec.client import transport
from localspec.client.api import Client
from localspec.errors import BadResponse, LocalspecError, UsageError

Event = dict[str, Any]
_FEWEST = 4  # tokens; between fewer the time says how exact a clock is
_PATIENCE = 120.0  # seconds that another server may say nothing


@dataclass(frozen=True)
class How:
    """speculative: the field of that name in a request, None: as the server does by itself.

    room: tokens that a question may have. own: the pair's own sampling, not temperature 0. cached: a prompt
    that was read before need not be read again. until: by time.monotonic(), another server's answer is of no
    use later.
    """

    tokens: int
    room: int
    speculative: dict[str, Any] | None = None
    own: bool = False
    cached: bool = False
    until: float | None = None


@dataclass
class Answer:
    """Seconds by this clock; `timings` and `speculation` as the server says them."""

    text: str = ""
    tokens: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    finish: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    usage: dict[str, float] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def write_s(self) -> float:
        """From the first token to the last."""
        said = self.timings.get("predicted_ms")
        return said / 1e3 if said else max(self.total_s - (self.first_s or 0.0), 0.0)

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first; None where there are too few to tell."""
        if self.tokens < _FEWEST or self.write_s <= 0:
            return None
        return (self.tokens - 1) / self.write_s

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "replace")).hexdigest()[:16]


class Ours(Client):
    """The daemon of this user."""

    name = "localspec"

    def __init__(self, model: str = "") -> None:
        super().__init__()
        self.model = model

    def ask(self, prompt: Prompt, how: How) -> Answer:
        """Raises LocalspecError: as the daemon's."""
        path, body = request(prompt, how)
        body |= {"localspec": {"private": True}, **({"model": self.model} if self.model else {})}
        if how.speculative is not None:
            body["speculative"] = how.speculative
        return timed(self.said(path, body))

    def sampling(self) -> dict[str, Any]:
        """How the pair that was asked last samples by itself."""
        found = self._json("GET", "/props")["default_generation_settings"]
        params: dict[str, Any] = found["params"]
        return params

    def lead(self, prompt: Prompt, how: How, at: int, other: str) -> float | None:
        """By how much in log-probability the token in the answer after `at` characters goes before the one
        that `other` begins with there; None where the answer does not come so far, or that is none of the
        likeliest. (A grammar may forbid what is likelier than both.)
        """
        path, body = request(prompt, how)
        body |= {"n_probs": 20} if prompt.is_place else {"logprobs": True, "top_logprobs": 20}
        body |= {"localspec": {"private": True}, "speculative": how.speculative}
        body |= {"model": self.model} if self.model else {}
        written = 0
        for event in self.said(path, body):
            for token in _probabilities(event):
                written += len(token["token"])
                if written > at:
                    return _lead(token, token["token"][: at - written] + other)
        return None

    def said(self, path: str, body: Event) -> Iterator[Event]:
        """The events of a stream."""
        connection, response = self._open("POST", path, json.dumps(body).encode())
        try:
            yield from _events(response.chunks())
        finally:
            connection.close()


class Other:
    """Any server with OpenAI's chat or llama-server's /infill, by URL or by the path of a socket."""

    def __init__(self, address: str) -> None:
        """Raises UsageError: it is neither."""
        self.name = address
        self._connect: Callable[[], http.client.HTTPConnection]
        self._base = ""
        self._model = ""
        self._plain = False  # it refuses what OpenAI has not
        if address.startswith(("http://", "https://")) and (url := _split(address)):
            self._base = url.path.rstrip("/").removesuffix("/v1")
            self._connect = partial(_connected, url.netloc, secure=url.scheme == "https")
        elif "://" not in address and Path(address).is_socket():
            self._connect = partial(_Unix, address)
        else:
            raise UsageError(
                f"--against {address}: neither a URL (http://127.0.0.1:8080) nor a socket."
            )

    def ask(self, prompt: Prompt, how: How) -> Answer:
        """Raises Gone: nothing comes from it. BadResponse: it refuses, or answers with something else."""
        path, body = request(prompt, how)
        try:
            if not prompt.is_place:
                body["model"] = self._named(how)
            if self._plain:
                body = {key: value for key, value in body.items() if key in _OPENAI}
            answer = timed(_events(self._read("POST", path, body, how)))
            if not answer.finish:
                raise BadResponse(f"{self.name} ended in the middle of an answer.")
            answer.speculation = {}  # who knows what that is elsewhere
            return answer
        except _Refused as refused:
            if self._plain or prompt.is_place or refused.status not in (400, 422):
                raise
        except LocalspecError as error:
            if isinstance(error, BadResponse):
                raise
            raise BadResponse(f"{self.name} refused: {error.message}") from error
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise BadResponse(
                f"{self.name} answers in another shape than OpenAI's or llama-server's."
            ) from error
        self._plain = True
        return self.ask(prompt, how)

    def _named(self, how: How) -> str:
        """The model it serves, the first of several; any, where it has no list of them."""
        if not self._model:
            self._model = "default"
            with contextlib.suppress(_Refused):
                listed = json.loads(b"".join(self._read("GET", "/v1/models", None, how)))
                self._model = str(listed["data"][0]["id"]) if listed.get("data") else "default"
        return self._model

    def _read(self, method: str, path: str, body: Event | None, how: How) -> Iterator[bytes]:
        connection = self._connect()
        try:
            connection.timeout = _left(how)
            headers = {"Content-Type": "application/json"}
            data = None if body is None else json.dumps(body)
            connection.request(method, self._base + path, data, headers)
            with connection.getresponse() as response:
                if response.status >= 400:
                    raise _Refused(self.name, response)
                while data_ := response.read1(65536):
                    yield data_
                    left = _left(how)
                    if connection.sock:
                        connection.sock.settimeout(left)
        except TimeoutError as error:
            raise Gone(f"{self.name} did not answer in time.") from error
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise Gone(f"{self.name} cannot be asked: {why}.") from error
        finally:
            connection.close()


def _split(address: str) -> SplitResult | None:
    """None where no host can be asked there."""
    try:
        url = urlsplit(address)
        return url if url.hostname and url.port != 0 else None
    except ValueError:
        return None


def _left(how: How) -> float:
    """Seconds for a wait. Raises TimeoutError: there are none."""
    left = _PATIENCE if how.until is None else min(how.until - time.monotonic(), _PATIENCE)
    if left <= 0:
        raise TimeoutError
    return left


_OPENAI = (
    "model",
    "messages",
    "max_tokens",
    "temperature",
    "stream",
    "stream_options",
    "response_format",
)


class Gone(BadResponse):
    """Nothing comes from a server, whatever it is asked."""


class _Refused(BadResponse):
    def __init__(self, name: str, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        said = response.read(2000).decode("utf-8", "replace").strip()
        try:
            said = str(json.loads(said)["error"]["message"])
        except (ValueError, TypeError, LookupError):
            said = said.partition("\n")[0][:200]
        super().__init__(f"{name} refused: {said or response.reason} (HTTP {response.status})")


def _connected(host: str, *, secure: bool) -> http.client.HTTPConnection:
    return (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(host)


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def request(prompt: Prompt, how: How) -> tuple[str, Event]:
    """Path and body, in names that llama-server knows, too."""
    body: Event = {"stream": True, "cache_prompt": how.cached, "timings_per_token": True}
    if not how.own:
        body["temperature"] = 0
    if prompt.is_place:
        above, newline, line = prompt.prefix.rpartition("\n")
        place = {"input_prefix": above + newline, "prompt": line, "input_suffix": prompt.suffix}
        return "/infill", {**body, **place, "n_predict": how.tokens}
    body["messages"] = [{"role": "user", "content": prompt.question(how.room)}]
    body |= {"max_tokens": how.tokens, "stream_options": {"include_usage": True}}
    if prompt.schema:
        schema = {"name": "answer", "schema": json.loads(prompt.schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return "/v1/chat/completions", body


def _events(chunks: Iterator[bytes]) -> Generator[Event, None, None]:
    """Up to [DONE] or the end: llama-server's own streams end without.

    Raises:
        LocalspecError: the error among them.
    """
    for text in transport.events(chunks):
        if text == "[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError as error:
            raise BadResponse("The server's answer is not valid JSON.") from error
        if not isinstance(event, dict):
            raise BadResponse("The server's answer has another shape than OpenAI's.")
        if isinstance(event.get("error"), dict):
            raise transport.error_of(event["error"])
        yield event


def timed(events: Iterator[Event]) -> Answer:
    """What came, with the times at which it came. The clock starts now, before the request is sent.

    Raises:
        BadResponse: nothing came.
    """
    start = time.perf_counter()
    found, count, seen = Answer(), 0, _Seen()
    for event in events:
        now = time.perf_counter()
        if piece := _piece(event):
            count += 1
            found.first_s = found.first_s or now - start
            found.text += piece
            found.total_s = now - start
        for key in ("timings", "usage"):
            if isinstance(event.get(key), dict):
                setattr(found, key, _numbers(event[key]))
        ours = event.get("localspec") or {}
        found.speculation = ours.get("speculation") or found.speculation
        found.finish = _finish(event) or found.finish
        if "timings" in event:
            seen.note(found.timings, now)
        if passes := ours.get("passes"):
            seen.rounds = [
                Round(int(kept) + 1, int(tried), int(kept), str(kind))
                for tried, kept, kind in passes
            ]
            seen.exact = True
    if found.first_s is None and not found.timings:
        raise BadResponse("The server's answer has no text.")
    said = found.timings.get("predicted_n") or found.usage.get("completion_tokens")
    found.tokens = int(said or count)
    found.rounds, found.arrivals = seen.rounds, seen.arrivals
    return found


def _numbers(found: Event) -> dict[str, float]:
    """What of it can be counted with."""
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, int | float) and 0 <= value < math.inf
    }


@dataclass
class _Seen:
    """What the timings of each event tell."""

    rounds: list[Round] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    before: tuple[int, int, int] = (0, 0, 0)
    last: float = 0.0
    exact: bool = False  # the server has told its passes

    def note(self, timings: dict[str, float], now: float) -> None:
        if not timings.get("predicted_n"):
            return
        counts = _counts(timings)
        tokens, drafted, accepted = (a - b for a, b in zip(counts, self.before, strict=True))
        if tokens <= 0:
            return
        if self.before[0]:
            self.arrivals.append(Arrival(tokens, (now - self.last) * 1e3))
            if not self.exact:
                self.rounds.append(Round(tokens, drafted, accepted))
        self.before, self.last = counts, now


def _piece(event: Event) -> str:
    choices = event.get("choices")
    if choices:
        delta = choices[0].get("delta") or {}
        return str(delta.get("content") or delta.get("reasoning_content") or "")
    return str(event.get("content") or "")


def _probabilities(event: Event) -> list[Event]:
    """Of each token of an event, with the likeliest ones."""
    choices = event.get("choices")
    found = (choices[0].get("logprobs") or {}).get("content") if choices else None
    return list(found or event.get("completion_probabilities") or ())


def _lead(token: Event, other: str) -> float | None:
    """How far a token goes before the likeliest of the others that `other` may begin with."""
    found = [
        each["logprob"]
        for each in token["top_logprobs"]
        if each["token"] != token["token"] and each["token"] and other.startswith(each["token"])
    ]
    return float(token["logprob"] - max(found)) if found else None


def _finish(event: Event) -> str:
    choices = event.get("choices")
    if choices:
        return str(choices[0].get("finish_reason") or "")
    return "length" if event.get("stop_type") == "limit" else "stop" if event.get("stop") else ""


def _counts(timings: dict[str, float]) -> tuple[int, int, int]:
    """Tokens written, drafted and accepted so far."""
    names = ("predicted_n", "draft_n", "draft_n_accepted")
    written, drafted, accepted = (int(timings.get(name, 0)) for name in names)
    return written, drafted, accepted
