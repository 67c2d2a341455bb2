"""Parse the events of a stream, and convert the chunks that a server sends to the events of an engine.

Nothing is trusted: a value of a wrong type or size ends the answer with an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localspec.chat.token_report import ScoredText, decode_piece
from localspec.errors import RETRYABLE, InvalidRequest, LocalspecError, UpstreamError
from localspec.extras.upstream.calls import StreamedCalls
from localspec.extras.upstream.connection import MAX_LINE_BYTES, ResponseLines, UpstreamConnection
from localspec.extras.upstream.dialects import DraftCounts, ServerDialect, parse_count
from localspec.extras.upstream.request import UpstreamRequest
from localspec.protocol import frames
from localspec.protocol.pieces import Arguments, Call, Piece, Text

_DONE = b"[DONE]"


async def parse_events(
    connection: UpstreamConnection, lines: ResponseLines
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """Yield the objects of a stream, and None for [DONE]. A response that is one JSON object has one event.

    Raises:
        UpstreamError: An event is not a JSON object. Also the errors of `ResponseLines`.
    """
    parts: list[bytes] = []
    size = 0
    async for line in lines:
        if not lines.are_events or line.startswith(b"data:"):
            parts.append(line.removeprefix(b"data:").removeprefix(b" "))
            size += len(line) + 1
            if size > MAX_LINE_BYTES:
                raise connection.invalid_response(
                    f"an event has more than {MAX_LINE_BYTES >> 20} MiB"
                )
        elif not line and parts:
            event, parts, size = b"\n".join(parts), [], 0
            if event:
                yield _decode_event(connection, event)
            if event.strip() == _DONE:
                return
        elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
            raise connection.invalid_response("a line of the stream does not belong to an event")
    if event := b"\n".join(parts):
        # Some servers leave out the empty line after the last event. An event that was cut off is no JSON.
        with contextlib.suppress(*[UpstreamError] * lines.are_events):
            yield _decode_event(connection, event)


def _decode_event(connection: UpstreamConnection, event: bytes) -> dict[str, Any] | None:
    if event.strip() == _DONE:
        return None
    decoded = connection.decode(event)
    if not isinstance(decoded, dict):
        raise connection.invalid_response("an event of the stream is not an object")
    return decoded


# The finish reasons of OpenAI and of other servers, in lower case, by ours.
_FINISH_REASONS = {
    "stop": {
        *("stop", "tool_calls", "function_call", "tool_call", "tool_use", "function_calls"),
        *("eos", "eos_token", "end_turn", "end", "stop_sequence", "stop_token", "stop_word"),
        *("complete", "completed", "done", "finish", "finished"),
    },
    "length": {
        *("length", "max_tokens", "max_length", "max_new_tokens", "max_output_tokens"),
        *("max_completion_tokens", "model_length", "token_limit"),
    },
    "withheld": {"content_filter", "content_filtered", "safety", "recitation", "refusal"},
    "aborted": {
        *("abort", "aborted", "cancel", "cancelled", "canceled", "error", "timeout"),
        *("insufficient_system_resource", "interrupted"),
    },
}
_HEAD_CHARACTERS = 64  # of the answer, by which its repetition is recognized


@dataclass(slots=True)
class _Part:
    """One chunk's part of an answer. The server may have separated thoughts and calls from the text."""

    text: str = ""
    thought: str = ""
    calls: list[Call | Arguments] = field(default_factory=list)
    logprobs: list[frames.TokenLogprob] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    timings: frames.Timings | None = None


class UpstreamReply:
    """One answer while it arrives. `over` is set once the server has marked its end."""

    def __init__(
        self,
        connection: UpstreamConnection,
        dialect: ServerDialect,
        sent: UpstreamRequest,
        began: float,
    ) -> None:
        """Prepare for an answer to `sent`. `began` is the monotonic time of the request."""
        self.over = False
        self.finish = ""
        self._connection = connection
        self._invalid = connection.invalid_response
        self._dialect = dialect
        self._sent = sent
        self._began = began
        self._first_at = 0.0  # monotonic time of the first part
        self._last_at = 0.0  # monotonic time of the last part so far
        self._tokens = 0  # tokens that came as ids or with log-probabilities
        self._characters = 0
        self._text_characters = 0  # of the answer's text, without thoughts and calls
        self._head = ""  # the beginning of the text
        self._text = ScoredText(sent.reader)
        self._calls = StreamedCalls(connection.invalid_response)
        self._choice: object = None  # the server's number of the choice
        self._has_blank_reason = False
        self._prompt_tokens = self._completion_tokens = 0
        self._cached_tokens = 0
        self._stop: str | None = None
        self._timings: frames.Timings | None = None
        self._draft_counts: DraftCounts | None = None
        self._reported: frames.Speculation | None = None  # by another localspec

    def parse_chunk(self, chunk: dict[str, Any]) -> Iterator[frames.Delta]:
        """Yield what a chunk adds to the answer."""
        if chunk.get("error") is not None:
            raise self._server_error(chunk["error"])
        if chunk.get("object") == "error":  # of older vLLM
            raise self._server_error(chunk)
        is_native = self._sent.api == "native"
        part = self._parse_native(chunk) if is_native else self._parse_choice(chunk)
        self._read_usage(chunk)
        if part is None:
            return
        self._text_characters += len(part.text)
        if len(self._head) < _HEAD_CHARACTERS:
            self._head = (self._head + part.text)[:_HEAD_CHARACTERS]
        part.timings = self._timings if "timings" in chunk else None
        yield from self._pass_on(part)

    def end(self, *, marked: bool) -> Iterator[frames.Delta]:
        """Yield the rest of the answer. `marked`: the server has marked the end of the stream.

        Raises:
            UpstreamError: The stream ended before the answer did, or a call is not complete.
        """
        if not self.finish and marked and self._has_blank_reason:
            limit = self._sent.max_tokens
            self.finish = "length" if 0 < (limit or 0) <= self._completion_tokens else "stop"
        if not self.finish:
            raise self._invalid("the answer was cut off")
        part = _Part(calls=[*self._calls.end(cut=self.finish == "length")])
        yield from self._pass_on(part, final=True)

    def _pass_on(self, part: _Part, *, final: bool = False) -> Iterator[frames.Delta]:
        if self._sent.only_read:
            return
        self._tokens += max(len(part.ids), len(part.logprobs))
        self._characters += len(part.text) + len(part.thought)
        for call in part.calls:
            self._characters += len(call.name if isinstance(call, Call) else call.text)
        # The token count of a text is not known here, so the limit assumes the longest tokens.
        limit = self._sent.max_tokens
        has_too_many = limit is not None and self._tokens > 4 * limit + 64
        if has_too_many or self._characters > self._sent.max_characters:
            allowed = "any that is allowed" if limit is None else "its limit of tokens"
            raise self._invalid(f"the answer is longer than {allowed}")
        thought_tokens = self._take_thought_tokens(part)
        pieces: list[Piece] = [Text("reasoning", part.thought)] if part.thought else []
        # The server's calls are numbered after those in its text.
        first_index = self._sent.reader.calls
        for call in part.calls:
            call.index += first_index
        read, logprobs = self._text.feed(part.text, part.logprobs, final=final)
        pieces += [*part.calls, *read]
        has_content = part.text or part.ids or pieces or logprobs or thought_tokens
        if has_content:
            if not final or part.calls:
                self._last_at = time.monotonic()
                self._first_at = self._first_at or self._last_at
            tokens = [*thought_tokens, *logprobs]
            yield frames.Delta(0, pieces, tokens, part.tokens, part.ids, part.timings)

    def _take_thought_tokens(self, part: _Part) -> list[frames.TokenLogprob]:
        """Take the tokens of the thoughts, which come first and are not in the text, out of a part."""
        left, count = len(part.thought), 0
        while left > 0 and count < len(part.logprobs):
            token = part.logprobs[count]
            token.is_content = False
            left -= len(decode_piece(token.piece))
            count += 1
        tokens, part.logprobs = part.logprobs[:count], part.logprobs[count:]
        return tokens

    def _server_error(self, error: object) -> LocalspecError:
        text = error.get("message") if isinstance(error, dict) else error
        message = self._connection.clean(text).removeprefix(RETRYABLE) or "it gave no reason."
        server = f"The server of '{self._connection.name}'"
        # vLLM may refuse a request after the stream has begun.
        if isinstance(error, dict) and error.get("code") == 400:
            return InvalidRequest(f"{server} refuses the request: {message}")
        return UpstreamError(f"{server} failed: {message}")

    def _parse_choice(self, chunk: Mapping[str, Any]) -> _Part | None:
        choices = chunk.get("choices") or []
        if not isinstance(choices, list):
            raise self._invalid("'choices' is not a list")
        if not choices:  # only counts, or nothing, to keep the connection alive
            return None
        choice = choices[0]
        if not isinstance(choice, dict):
            raise self._invalid("a choice is not an object")
        number = choice.get("index") or 0
        self._choice = number if self._choice is None else self._choice
        if len(choices) > 1 or number != self._choice:
            raise self._invalid("it sends several answers at once")
        part = _Part()
        if self._sent.api == "text":
            part.text = self._get_text(choice, "text")
        else:
            message = self._get_message(choice)
            part.text = self._get_text(message, "content") or self._get_text(choice, "text")
            part.thought = self._get_text(message, "reasoning_content") or self._get_text(
                message, "reasoning"
            )
            old_call = message.get("function_call")  # OpenAI's older name, for one call
            self._calls.add(
                message.get("tool_calls") or ([{"function": old_call}] if old_call else [])
            )
            part.calls = [*self._calls.take()]
        part.ids = self._parse_ids(choice.get("token_ids") or [])
        part.logprobs = self._parse_logprobs(choice.get("logprobs"))
        self._set_finish(choice.get("finish_reason"))
        stop = choice.get("stop_reason")
        self._stop = stop if isinstance(stop, str) else self._stop
        return part

    def _get_message(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a message that a choice has, which some servers call `message`."""
        name = "delta" if choice.get("delta") else "message"
        message = choice.get(name) or {}
        if not isinstance(message, dict):
            raise self._invalid(f"a {name} is not an object")
        if name == "message" and self._head:
            # The same name is used for all of the text so far, too.
            text = self._get_text(message, "content")
            if len(text) >= self._text_characters and text.startswith(self._head):
                raise self._invalid("a 'message' repeats the text before it")
        return message

    def _parse_native(self, chunk: Mapping[str, Any]) -> _Part:
        """Parse a chunk of llama-server's own paths."""
        part = _Part(self._get_text(chunk, "content"))
        part.ids = self._parse_ids(chunk.get("tokens") or [])
        part.tokens = parse_count(chunk.get("tokens_predicted")) or 0
        entries = chunk.get("completion_probabilities")
        part.logprobs = self._parse_logprobs({"content": entries} if entries else None)
        if chunk.get("stop") is True:
            self._set_finish({"limit": "length"}.get(str(chunk.get("stop_type")), "stop"))
            self._stop = self._get_text(chunk, "stopping_word") or None
            self.over = True
        return part

    def _parse_ids(self, ids: object) -> list[int]:
        if not isinstance(ids, list) or any(parse_count(token) is None for token in ids):
            raise self._invalid("'tokens' are not token ids")
        return ids

    def _get_text(self, fields: Mapping[str, Any], key: str) -> str:
        value = fields.get(key)
        if value is not None and not isinstance(value, str):
            raise self._invalid(f"'{key}' is not a text")
        return value or ""

    def _set_finish(self, reason: object) -> None:
        if reason is None or reason == "":
            self._has_blank_reason = self._has_blank_reason or reason == ""
            return
        shown, server = (
            self._connection.clean(reason)[:80],
            f"The server of '{self._connection.name}'",
        )
        known = (ours for ours, theirs in _FINISH_REASONS.items() if shown.lower() in theirs)
        match next(known, None):
            case None:
                problem = f"'{shown}' is not known" if shown else "is not a text"
                raise self._invalid(f"its 'finish_reason' {problem}")
            case "withheld":
                raise UpstreamError(f"{server} withheld the answer.")
            case "aborted":
                raise UpstreamError(f"{server} broke the answer off ('{shown}').")
            case finish:
                self.finish = finish

    def _parse_logprobs(self, logprobs: object) -> list[frames.TokenLogprob]:
        """Parse log-probabilities in either of OpenAI's two shapes."""
        if not isinstance(logprobs, dict):
            return []
        entries = logprobs.get("content")
        try:
            if isinstance(entries, list):
                tokens = [_parse_logprob(entry) for entry in entries]
            else:
                tokens = list(_parse_old_logprobs(logprobs))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError):
            raise self._invalid("its log-probabilities are invalid") from None
        for token in tokens:
            del token.top[self._sent.tops :]
        return tokens

    def _read_usage(self, chunk: Mapping[str, Any]) -> None:
        """Store the token counts, timings and draft counts of a chunk."""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._prompt_tokens = parse_count(usage.get("prompt_tokens")) or self._prompt_tokens
            written = parse_count(usage.get("completion_tokens"))
            self._completion_tokens = written or self._completion_tokens
            details = usage.get("prompt_tokens_details")
            cached = parse_count(details.get("cached_tokens")) if isinstance(details, dict) else 0
            self._cached_tokens = min(cached or self._cached_tokens, self._prompt_tokens)
        timings = chunk.get("timings")
        if isinstance(timings, dict):
            fields = {
                key: value
                for key, value in timings.items()
                if parse_count(value) is not None and key in frames.Timings.__struct_fields__
            }
            try:
                self._timings = msgspec.convert(fields, frames.Timings, strict=False)
            except msgspec.ValidationError:
                raise self._invalid("its 'timings' are invalid") from None
        extension = chunk.get("localspec")
        speculation = extension.get("speculation") if isinstance(extension, dict) else None
        if speculation is not None and self._dialect.kind == "localspec":
            try:
                self._reported = msgspec.convert(speculation, frames.Speculation)
            except msgspec.ValidationError:
                raise self._invalid("its 'speculation' is invalid") from None
        self._draft_counts = self._dialect.parse_draft_counts(chunk) or self._draft_counts

    @property
    def completion_tokens(self) -> int:
        """The number of tokens in the answer, as the server reports it."""
        return self._completion_tokens or (self._timings.predicted_n if self._timings else 0)

    @property
    def reports_drafts(self) -> bool:
        """Whether the answer itself reports its drafts."""
        return self._reported is not None or self._draft_counts is not None

    def done(self, counted: DraftCounts | None = None) -> frames.Done:
        """Return the end of the answer with its figures.

        `counted` are its drafts from the server's counters, for an answer that does not report them.
        """
        timings = self._timings or self._measure_timings()
        if self._timings:
            self._completion_tokens = self.completion_tokens
            self._prompt_tokens = self._prompt_tokens or timings.prompt_n + timings.cache_n
        if self._sent.only_read:
            self._completion_tokens, timings.predicted_n, timings.predicted_ms = 0, 0, 0.0
        counts = self._draft_counts or counted
        if counts and not 0 <= counts.accepted <= min(counts.drafted, self._completion_tokens):
            counts = None  # these figures are impossible
        speculation = self._reported or self._to_speculation(counts)
        timings.draft_n, timings.draft_n_accepted = speculation.drafted, speculation.accepted
        return frames.Done(
            0,
            self.finish,
            self._prompt_tokens,
            self._completion_tokens,
            timings,
            speculation,
            self._stop,
            accepts=counts.accepts if counts else [],
        )

    def _measure_timings(self) -> frames.Timings:
        """Return timings as measured by this client, including the network and the server's queue."""
        prompt_ms = 1e3 * max(self._first_at - self._began, 0.0)
        predicted_ms = 1e3 * (self._last_at - self._first_at)
        uncached, completion = self._prompt_tokens - self._cached_tokens, self._completion_tokens
        return frames.Timings(
            cache_n=self._cached_tokens,
            prompt_n=uncached,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / uncached if uncached else 0.0,
            prompt_per_second=1e3 * uncached / prompt_ms if prompt_ms else 0.0,
            predicted_n=completion,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / completion if completion else 0.0,
            predicted_per_second=(
                1e3 * (completion - 1) / predicted_ms if predicted_ms and completion > 1 else 0.0
            ),
        )

    def _to_speculation(self, counts: DraftCounts | None) -> frames.Speculation:
        name, tokens = self._dialect.name, self._completion_tokens
        if counts is None or not counts.drafted:
            nothing = f"not measured: the {name} says nothing of drafts"
            reason = f"the {name} drafted nothing" if counts else nothing
            return frames.Speculation(reason=reason, speed_up_reason=_NOT_COMPARED)
        passes = tokens - counts.accepted
        return frames.Speculation(
            active=True,
            kind="upstream",
            drafted=counts.drafted,
            accepted=counts.accepted,
            rounds=passes,
            mean_tokens_per_pass=tokens / passes if passes else 0.0,
            speed_up_reason=_NOT_COMPARED,
        )


_NOT_COMPARED = "another server answered, and nothing measured its target alone"


def _parse_logprob(entry: dict[str, Any]) -> frames.TokenLogprob:
    token_id, piece, value = _parse_token(entry)
    top = [_parse_token(alternative) for alternative in entry.get("top_logprobs") or []]
    return frames.TokenLogprob(token_id, piece, value, top)


def _parse_token(entry: dict[str, Any]) -> tuple[int, bytes, float]:
    """Return the id (-1 if it is missing), bytes and log-probability of a token."""
    raw = entry.get("bytes")
    piece = bytes(raw) if isinstance(raw, list) else str(entry["token"]).encode(errors="replace")
    token_id = entry.get("id")
    return (token_id if isinstance(token_id, int) else -1), piece, float(entry["logprob"])


def _parse_old_logprobs(logprobs: Mapping[str, Any]) -> Iterator[frames.TokenLogprob]:
    """Yield the tokens of OpenAI's older shape, with the alternatives sorted by probability."""
    alternatives = logprobs.get("top_logprobs") or []
    for index, (token, value) in enumerate(
        zip(logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], strict=True)
    ):
        top = alternatives[index] if index < len(alternatives) and alternatives[index] else {}
        ranked = [
            (-1, str(text).encode(errors="replace"), float(number)) for text, number in top.items()
        ]
        ranked.sort(key=lambda entry: -entry[2])
        yield frames.TokenLogprob(-1, str(token).encode(errors="replace"), float(value), ranked)
