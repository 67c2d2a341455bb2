"""What a server sends of an answer, as the events that an engine gives. Nothing of it is taken on trust:
every value has the type and the size that it must have, or the answer ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from localspec.daemon.upstream.connection import Connection
from localspec.daemon.upstream.dialects.base import Dialect, Spoken, whole
from localspec.daemon.upstream.request import Asked
from localspec.errors import InvalidRequest, LocalspecError, UpstreamError
from localspec.protocol import frames

_ENDS = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}
_MOST_CALLS = 1024
_LONGEST_NAME = 1024  # characters of a call's name, and of its id


class Reply:
    """One answer that comes. `over`: the server has said that it is."""

    def __init__(self, connection: Connection, dialect: Dialect, sent: Asked, began: float) -> None:
        """`began`: when it was asked for (monotonic)."""
        self.over = False
        self.finish = ""
        self._connection = connection
        self._dialect = dialect
        self._sent = sent
        self._began = began
        self._first = 0.0  # when the first of it came
        self._last = 0.0
        self._tokens = 0  # those that came one by one, as ids or with log-probabilities
        self._characters = 0
        self._text_characters = 0  # of the answer's text, without thoughts and calls
        self._calls: dict[int, int] = {}  # the server's number of a call, and ours
        self._prompt = self._written = 0
        self._cached = 0
        self._stop: str | None = None
        self._timings: frames.Timings | None = None
        self._spoken: Spoken | None = None
        self._told: frames.Speculation | None = None

    def take(self, chunk: dict[str, Any]) -> Iterator[frames.Delta]:
        """What an object of the stream adds; an empty one ends it."""
        if not chunk:
            self._ends()
            return
        if "error" in chunk:
            raise self._failed(chunk["error"])
        native = self._sent.api == "native"
        delta = self._native(chunk) if native else self._choice(chunk)
        self._figures(chunk)
        if delta is None or self._sent.only_read:
            return
        self._place(delta)
        delta.timings = self._timings if "timings" in chunk else None
        self._count(delta)
        if delta.text or delta.thought or delta.calls or delta.logprobs or delta.ids:
            self._last = time.monotonic()
            self._first = self._first or self._last
            yield delta

    def _count(self, delta: frames.Delta) -> None:
        """Raise UpstreamError once this is more than the limit of tokens lets an answer be.

        How many tokens a text has is not known here, so that a text gets the length of the longest ones.
        """
        self._tokens += max(len(delta.ids), len(delta.logprobs))
        self._characters += len(delta.text) + len(delta.thought)
        self._characters += sum(len(call.arguments) + len(call.name) for call in delta.calls)
        limit = self._sent.max_tokens
        many = limit is not None and self._tokens > 4 * limit + 64
        if many or self._characters > self._sent.most_characters:
            raise self._connection.nonsense(
                "its answer is longer than the limit of tokens that it was sent"
                if limit is not None
                else "its answer is longer than any"
            )

    def cut(self) -> UpstreamError:
        """That the stream ended before the answer did."""
        return self._connection.nonsense("its answer was cut off")

    def _ends(self) -> None:
        if not self.finish:
            raise self.cut()
        self.over = True

    def _failed(self, error: object) -> LocalspecError:
        text = error.get("message") if isinstance(error, dict) else error
        said = self._connection.clean(text) or "it says nothing more."
        who = f"The server of '{self._connection.name}'"
        if isinstance(error, dict) and error.get("code") == 400:  # vLLM's, of what it has begun
            return InvalidRequest(f"{who} refuses the request: {said}")
        return UpstreamError(f"{who} failed: {said}")

    # ------------------------------------------------------------------ text, thoughts, calls

    def _choice(self, chunk: Mapping[str, Any]) -> frames.Delta | None:
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise self._connection.nonsense("an event has no 'choices'")
        if not choices:
            return None
        choice = choices[0]
        if not isinstance(choice, dict):
            raise self._connection.nonsense("a choice is no object")
        delta = frames.Delta(0, "")
        if self._sent.api == "text":
            delta.text = self._text(choice, "text")
        else:
            said = choice.get("delta") or {}
            if not isinstance(said, dict):
                raise self._connection.nonsense("a delta is no object")
            delta.text = self._text(said, "content")
            delta.thought = self._text(said, "reasoning_content") or self._text(said, "reasoning")
            delta.calls = list(self._called(said.get("tool_calls") or []))
        delta.ids = self._ids(choice.get("token_ids") or [])
        delta.logprobs = self._logprobs(choice.get("logprobs"))
        self._finished(choice.get("finish_reason"))
        stop = choice.get("stop_reason")
        self._stop = stop if isinstance(stop, str) else self._stop
        return delta

    def _native(self, chunk: Mapping[str, Any]) -> frames.Delta:
        """Of llama-server's own paths."""
        delta = frames.Delta(0, self._text(chunk, "content"))
        delta.ids = self._ids(chunk.get("tokens") or [])
        delta.tokens = whole(chunk.get("tokens_predicted")) or 0
        entries = chunk.get("completion_probabilities")
        delta.logprobs = self._logprobs({"content": entries} if entries else None)
        if chunk.get("stop") is True:
            self._finished({"limit": "length"}.get(str(chunk.get("stop_type")), "stop"))
            self._stop = self._text(chunk, "stopping_word") or None
            self.over = True
        return delta

    def _ids(self, said: object) -> list[int]:
        if not isinstance(said, list) or any(whole(each) is None for each in said):
            raise self._connection.nonsense("'tokens' are no token ids")
        return said

    def _text(self, said: Mapping[str, Any], key: str) -> str:
        value = said.get(key)
        if value is not None and not isinstance(value, str):
            raise self._connection.nonsense(f"'{key}' is no text")
        return value or ""

    def _finished(self, reason: object) -> None:
        if reason is None:
            return
        if reason == "content_filter":
            raise UpstreamError(f"The server of '{self._connection.name}' withheld the answer.")
        if not isinstance(reason, str) or reason not in _ENDS:
            raise self._connection.nonsense("its 'finish_reason' is unknown")
        self.finish = _ENDS[reason]

    def _called(self, parts: object) -> Iterator[frames.CallPart]:
        if not isinstance(parts, list):
            raise self._connection.nonsense("'tool_calls' is no list")
        for part in parts:
            function = part.get("function") if isinstance(part, dict) else None
            number = whole(part.get("index", len(self._calls))) if isinstance(part, dict) else None
            if number is None or not isinstance(function, dict | None):
                raise self._connection.nonsense("a call is no object")
            name = self._text(function or {}, "name")
            identity = self._text(part, "id")
            begins = number not in self._calls
            if (begins and not name) or max(len(name), len(identity)) > _LONGEST_NAME:
                raise self._connection.nonsense("a call has no name")
            if begins and len(self._calls) >= _MOST_CALLS:
                raise self._connection.nonsense(f"it has more than {_MOST_CALLS} calls")
            own = self._calls.setdefault(number, len(self._calls))
            arguments = self._text(function or {}, "arguments")
            yield frames.CallPart(own, name if begins else "", identity, arguments)

    # ------------------------------------------------------------------ log-probabilities

    def _logprobs(self, said: object) -> list[frames.TokenLogprob]:
        """In either of OpenAI's two shapes."""
        if not isinstance(said, dict):
            return []
        entries = said.get("content")
        try:
            if isinstance(entries, list):
                found = [_logprob(each) for each in entries]
            else:
                found = list(_old_logprobs(said))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError):
            raise self._connection.nonsense("its log-probabilities are none") from None
        for each in found:
            del each.top[self._sent.tops :]
        return found

    def _place(self, delta: frames.Delta) -> None:
        """Say where each token begins in the answer's text; thoughts, which are none of it, come first."""
        at = self._text_characters - len(delta.thought)
        for token in delta.logprobs:
            token.offset = at if at >= self._text_characters else -1
            at += len(token.piece.decode("utf-8", "replace"))
        self._text_characters += len(delta.text)

    # ------------------------------------------------------------------ figures

    def _figures(self, chunk: Mapping[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._prompt = whole(usage.get("prompt_tokens")) or self._prompt
            written = whole(usage.get("completion_tokens"))
            self._written = written or self._written
            details = usage.get("prompt_tokens_details")
            cached = whole(details.get("cached_tokens")) if isinstance(details, dict) else 0
            self._cached = min(cached or self._cached, self._prompt)
        timings = chunk.get("timings")
        if isinstance(timings, dict):
            known = {
                key: each
                for key, each in timings.items()
                if whole(each) is not None and key in frames.Timings.__struct_fields__
            }
            try:
                self._timings = msgspec.convert(known, frames.Timings, strict=False)
            except msgspec.ValidationError:
                raise self._connection.nonsense("its 'timings' are none") from None
        ours = chunk.get("localspec")
        told = ours.get("speculation") if isinstance(ours, dict) else None
        if told is not None and self._dialect.kind == "localspec":
            try:
                self._told = msgspec.convert(told, frames.Speculation)
            except msgspec.ValidationError:
                raise self._connection.nonsense("its figures are none") from None
        self._spoken = self._dialect.spoken(chunk) or self._spoken

    @property
    def written(self) -> int:
        """Tokens of the answer, as the server says."""
        return self._written or (self._timings.predicted_n if self._timings else 0)

    @property
    def tells(self) -> bool:
        """Whether the answer itself says what its drafts came to."""
        return self._told is not None or self._spoken is not None

    def done(self, counted: Spoken | None = None) -> frames.Done:
        """The end, with what is known of how it came about; `counted`: of its drafts, where the answer does
        not say that.
        """
        timings = self._timings or self._measured()
        if self._timings:
            self._written = self.written
            self._prompt = self._prompt or timings.prompt_n + timings.cache_n
        if self._sent.only_read:
            self._written, timings.predicted_n, timings.predicted_ms = 0, 0, 0.0
        spoken = self._spoken or counted
        if spoken and not (0 <= spoken.accepted <= min(spoken.drafted, self._written)):
            spoken = None  # figures that cannot be
        speculation = self._told or self._speculation(spoken)
        timings.draft_n, timings.draft_n_accepted = speculation.drafted, speculation.accepted
        return frames.Done(
            0,
            self.finish,
            self._prompt,
            self._written,
            timings,
            speculation,
            self._stop,
            accepts=spoken.accepts if spoken else [],
        )

    def _measured(self) -> frames.Timings:
        """As it looked from here, the network and the server's queue included."""
        prompt_ms = 1e3 * max(self._first - self._began, 0.0)
        predicted_ms = 1e3 * (self._last - self._first)
        fresh, written = self._prompt - self._cached, self._written
        return frames.Timings(
            cache_n=self._cached,
            prompt_n=fresh,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / fresh if fresh else 0.0,
            prompt_per_second=1e3 * fresh / prompt_ms if prompt_ms else 0.0,
            predicted_n=written,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / written if written else 0.0,
            predicted_per_second=(
                1e3 * (written - 1) / predicted_ms if predicted_ms and written > 1 else 0.0
            ),
        )

    def _speculation(self, spoken: Spoken | None) -> frames.Speculation:
        if spoken is None or not spoken.drafted:
            name = self._dialect.name
            reason = f"not measured: the {name} says nothing of drafts"
            if spoken is not None:
                reason = f"the {name} drafted nothing"
            return frames.Speculation(reason=reason)
        passes = self._written - spoken.accepted
        return frames.Speculation(
            active=True,
            kind="upstream",
            drafted=spoken.drafted,
            accepted=spoken.accepted,
            rounds=passes,
            mean_tokens_per_pass=self._written / passes if passes else 0.0,
        )


def _logprob(entry: dict[str, Any]) -> frames.TokenLogprob:
    number, piece, value = _token(entry)
    top = [_token(each) for each in entry.get("top_logprobs") or []]
    return frames.TokenLogprob(number, piece, value, top)


def _token(entry: dict[str, Any]) -> tuple[int, bytes, float]:
    """Id (-1 where it is not told), bytes and log-probability."""
    raw = entry.get("bytes")
    piece = bytes(raw) if isinstance(raw, list) else str(entry["token"]).encode(errors="replace")
    number = entry.get("id")
    return (number if isinstance(number, int) else -1), piece, float(entry["logprob"])


def _old_logprobs(said: Mapping[str, Any]) -> Iterator[frames.TokenLogprob]:
    """With the likeliest first, which the order of an object's keys does not tell."""
    tops = said.get("top_logprobs") or []
    for at, (token, value) in enumerate(
        zip(said.get("tokens") or [], said.get("token_logprobs") or [], strict=True)
    ):
        top = tops[at] if at < len(tops) and tops[at] else {}
        named = [
            (-1, str(text).encode(errors="replace"), float(each)) for text, each in top.items()
        ]
        named.sort(key=lambda each: -each[2])
        yield frames.TokenLogprob(-1, str(token).encode(errors="replace"), float(value), named)
