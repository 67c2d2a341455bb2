"""Send one prompt to a server and time what comes back.

The server is our daemon on its socket, or any other that streams in the form of OpenAI or llama-server.
"""

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
from urllib.parse import urlsplit

from localspec.client import transport
from localspec.client.api import Client
from localspec.errors import BadResponse, LocalspecError, UsageError
from localspec.extras.bench.prompts import Prompt
from localspec.extras.bench.report import Arrival, Round

Event = dict[str, Any]
_MIN_RATE_TOKENS = 4  # the rate of a shorter answer would only show the precision of the clock
_SILENCE_TIMEOUT_S = 120.0  # for another server


@dataclass(frozen=True)
class RequestOptions:
    """How to send a prompt.

    tokens: of the answer at most. room: tokens that the question may have. speculative: the request's field
    of that name; None: the server decides. own: use the pair's own sampling instead of temperature 0. cached:
    a prompt that was prefilled before may come from the cache. until: time (of time.monotonic()) after which
    another server's answer is useless.
    """

    tokens: int
    room: int
    speculative: dict[str, Any] | None = None
    own: bool = False
    cached: bool = False
    until: float | None = None


@dataclass
class TimedAnswer:
    """An answer with its times in seconds; `timings` and `speculation` are as the server reports them."""

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
        """Seconds from the first token to the last."""
        if predicted_ms := self.timings.get("predicted_ms"):
            return predicted_ms / 1e3
        return max(self.total_s - (self.first_s or 0.0), 0.0)

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first token; None if the answer is too short."""
        if self.tokens < _MIN_RATE_TOKENS or self.write_s <= 0:
            return None
        return (self.tokens - 1) / self.write_s

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "replace")).hexdigest()[:16]


class DaemonServer(Client):
    """Our daemon, the one of this user."""

    name = "localspec"

    def __init__(self, model: str = "") -> None:
        super().__init__()
        self.model = model

    def ask(self, prompt: Prompt, how: RequestOptions) -> TimedAnswer:
        """Send a prompt and return the answer.

        Raises:
            LocalspecError: as reported by the daemon.
        """
        return time_answer(self.stream_events(*self._private_request(prompt, how)))

    def _private_request(self, prompt: Prompt, how: RequestOptions) -> tuple[str, Event]:
        path, body = build_request(prompt, how)
        body |= {"localspec": {"private": True}} | ({"model": self.model} if self.model else {})
        return path, body | ({} if how.speculative is None else {"speculative": how.speculative})

    def sampling(self) -> dict[str, Any]:
        """Return the own sampling parameters of the pair that was used last."""
        settings = self._json("GET", "/props")["default_generation_settings"]
        params: dict[str, Any] = settings["params"]
        return params

    def token_lead(self, prompt: Prompt, how: RequestOptions, at: int, other: str) -> float | None:
        """Return the lead in log-probability of the token behind `at` characters of the answer.

        It is measured against the token with which `other` begins. None: the answer is shorter, or that token
        is not among the likeliest. (A grammar may forbid tokens that are likelier than both.)
        """
        path, body = self._private_request(prompt, how)
        body |= {"n_probs": 20} if prompt.is_place else {"logprobs": True, "top_logprobs": 20}
        length = 0
        for event in self.stream_events(path, body):
            logprobs = (_first_choice(event).get("logprobs") or {}).get("content")
            for token in logprobs or event.get("completion_probabilities") or ():
                length += len(token["token"])
                if length > at:
                    return _lead_of(token, token["token"][: at - length] + other)
        return None

    def stream_events(self, path: str, body: Event) -> Iterator[Event]:
        connection, response = self._open("POST", path, json.dumps(body).encode())
        try:
            yield from _parse_events(response.chunks())
        finally:
            connection.close()


class OtherServer:
    """Any server with OpenAI's chat or llama-server's /infill, by its URL or the path of its socket."""

    def __init__(self, address: str) -> None:
        """Parse the address.

        Raises:
            UsageError: it is neither a URL nor a socket.
        """
        self.name = address
        self._connect: Callable[[], http.client.HTTPConnection]
        self._base = self._model = ""
        self._openai_only = False  # the server refuses fields that OpenAI does not have
        if address.startswith(("http://", "https://")):
            with contextlib.suppress(ValueError):
                url = urlsplit(address)
                if url.hostname and url.port != 0:
                    self._base = url.path.rstrip("/").removesuffix("/v1")
                    secure = url.scheme == "https"
                    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
                    self._connect = partial(kind, url.netloc)
                    return
        elif "://" not in address and Path(address).is_socket():
            self._connect = partial(_UnixConnection, address)
            return
        raise UsageError(
            f"--against {address}: neither a URL (http://127.0.0.1:8080) nor a socket."
        )

    def ask(self, prompt: Prompt, how: RequestOptions) -> TimedAnswer:
        """Send a prompt and return the answer.

        Raises:
            Gone: the server cannot be reached, or is silent.
            BadResponse: the server refuses the request, or its answer is invalid.
        """
        path, body = build_request(prompt, how)
        try:
            if not prompt.is_place:
                body["model"] = self._find_model(how)
            if self._openai_only:
                body = {key: value for key, value in body.items() if key in _OPENAI}
            answer = time_answer(_parse_events(self._read_chunks("POST", path, body, how)))
            if not answer.finish:
                raise BadResponse(f"{self.name} ended in the middle of an answer.")
            answer.speculation = {}  # other servers may mean something else by this field
            return answer
        except _Refused as refused:
            if self._openai_only or prompt.is_place or refused.status not in (400, 422):
                raise
        except LocalspecError as error:
            if isinstance(error, BadResponse):
                raise
            raise BadResponse(f"{self.name} refused: {error.message}") from error
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise BadResponse(
                f"The answer of {self.name} has neither OpenAI's form nor llama-server's."
            ) from error
        self._openai_only = True
        return self.ask(prompt, how)

    def _find_model(self, how: RequestOptions) -> str:
        """Return the model that the server serves, the first of several; "default" if it has no list."""
        if not self._model:
            self._model = "default"
            with contextlib.suppress(_Refused):
                listed = json.loads(b"".join(self._read_chunks("GET", "/v1/models", None, how)))
                self._model = str(listed["data"][0]["id"]) if listed.get("data") else "default"
        return self._model

    def _read_chunks(
        self, method: str, path: str, body: Event | None, how: RequestOptions
    ) -> Iterator[bytes]:
        connection = self._connect()
        try:
            connection.timeout = _time_left(how)
            headers = {"Content-Type": "application/json"}
            content = None if body is None else json.dumps(body)
            connection.request(method, self._base + path, content, headers)
            with connection.getresponse() as response:
                if response.status >= 400:
                    raise _Refused(self.name, response)
                while chunk := response.read1(65536):
                    yield chunk
                    timeout = _time_left(how)
                    if connection.sock:
                        connection.sock.settimeout(timeout)
        except TimeoutError as error:
            raise ServerGone(f"{self.name} did not answer in time.") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise ServerGone(f"{self.name} cannot be reached: {reason}.") from error
        finally:
            connection.close()


def _time_left(how: RequestOptions) -> float:
    """Return the seconds to wait at most.

    Raises:
        TimeoutError: there are none left.
    """
    seconds = _SILENCE_TIMEOUT_S
    if how.until is not None:
        seconds = min(how.until - time.monotonic(), seconds)
    if seconds <= 0:
        raise TimeoutError
    return seconds


_OPENAI = (
    *("model", "messages", "max_tokens", "temperature", "stream", "stream_options"),
    "response_format",
)


class ServerGone(BadResponse):
    """Nothing comes from a server, whatever the request is."""


class _Refused(BadResponse):
    def __init__(self, name: str, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        message = response.read(2000).decode("utf-8", "replace").strip()
        try:
            message = str(json.loads(message)["error"]["message"])
        except (ValueError, TypeError, LookupError):
            message = message.partition("\n")[0][:200]
        super().__init__(f"{name} refused: {message or response.reason} (HTTP {response.status})")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def build_request(prompt: Prompt, how: RequestOptions) -> tuple[str, Event]:
    """Return the path and body of a request, with names that llama-server supports, too."""
    body: Event = {"stream": True, "cache_prompt": how.cached, "timings_per_token": True}
    if not how.own:
        body["temperature"] = 0
    if prompt.is_place:
        lines_above, newline, line_before = prompt.prefix.rpartition("\n")
        body |= {"input_prefix": lines_above + newline, "prompt": line_before}
        return "/infill", body | {"input_suffix": prompt.suffix, "n_predict": how.tokens}
    body["messages"] = [{"role": "user", "content": prompt.question(how.room)}]
    body |= {"max_tokens": how.tokens, "stream_options": {"include_usage": True}}
    if prompt.schema:
        schema = {"name": "answer", "schema": json.loads(prompt.schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return "/v1/chat/completions", body


def _parse_events(chunks: Iterator[bytes]) -> Generator[Event, None, None]:
    """Yield the events up to [DONE] or the end, since llama-server's own streams end without it.

    Raises:
        LocalspecError: an event reports it.
    """
    for text in transport.events(chunks):
        if text == "[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError as error:
            raise BadResponse("The server's answer is not valid JSON.") from error
        if not isinstance(event, dict):
            raise BadResponse("The server's answer does not have OpenAI's form.")
        if isinstance(event.get("error"), dict):
            raise transport.error_from_detail(event["error"])
        yield event


def time_answer(events: Iterator[Event]) -> TimedAnswer:
    """Return the answer to a request, with the times of its events.

    The clock starts when this is called, before the request is sent.

    Raises:
        BadResponse: there is no answer.
    """
    start = last = time.perf_counter()
    answer, pieces, reports_passes = TimedAnswer(), 0, False
    before = [0, 0, 0]  # tokens generated, drafted and accepted by the last event
    for event in events:
        now, choice = time.perf_counter(), _first_choice(event)
        delta = choice.get("delta") or {} if choice else event
        if piece := str(delta.get("content") or delta.get("reasoning_content") or ""):
            pieces += 1
            answer.first_s = answer.first_s or now - start
            answer.text += piece
            answer.total_s = now - start
        for key in ("timings", "usage"):
            if isinstance(event.get(key), dict):
                setattr(answer, key, _only_numbers(event[key]))
        extensions = event.get("localspec") or {}
        answer.speculation = extensions.get("speculation") or answer.speculation
        ending = "length" if event.get("stop_type") == "limit" else "stop" * bool(event.get("stop"))
        answer.finish = str(choice.get("finish_reason") or ending * (not choice)) or answer.finish
        # Rounds and arrivals follow from the timings of each event, unless the server reports its passes.
        counts = [int(answer.timings.get(name, 0)) for name in _COUNTS]
        new = [count - earlier for count, earlier in zip(counts, before, strict=True)]
        if "timings" in event and new[0] > 0:
            if before[0]:
                answer.arrivals.append(Arrival(new[0], (now - last) * 1e3))
                answer.rounds += [] if reports_passes else [Round(new[0], new[1], new[2])]
            before, last = counts, now
        if passes := extensions.get("passes"):
            answer.rounds = [
                Round(int(accepted) + 1, int(drafted), int(accepted), str(kind))
                for drafted, accepted, kind in passes
            ]
            reports_passes = True
    if answer.first_s is None and not answer.timings:
        raise BadResponse("The server's answer has no text.")
    reported = answer.timings.get("predicted_n") or answer.usage.get("completion_tokens")
    answer.tokens = int(reported or pieces)
    return answer


_COUNTS = ("predicted_n", "draft_n", "draft_n_accepted")


def _only_numbers(values: Event) -> dict[str, float]:
    """Return the entries that are usable numbers."""
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and 0 <= value < math.inf
    }


def _first_choice(event: Event) -> Event:
    """Return what OpenAI's form has of the answer; nothing of an event in llama-server's own form."""
    choice: Event = (event.get("choices") or [{}])[0]
    return choice


def _lead_of(token: Event, other: str) -> float | None:
    """Return the lead of a token over the likeliest alternative with which `other` may begin."""
    logprobs = [
        alternative["logprob"]
        for alternative in token["top_logprobs"]
        if (text := alternative["token"]) and text != token["token"] and other.startswith(text)
    ]
    return float(token["logprob"] - max(logprobs)) if logprobs else None
