"""Format answers as Ollama does: lines of JSON, the last one with `done`, or all in one object."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET

from localspec.chat.notations.call_readers import replace_halves
from localspec.chat.token_report import decode_piece
from localspec.daemon.completion.answer import Choice, PendingAnswer, Shape
from localspec.daemon.http.sse import LineStream
from localspec.daemon.worker.process import Event
from localspec.errors import LocalspecError, stream_message
from localspec.extras.ollama.wire import (
    Called,
    Logprob,
    OllamaChatLine,
    OllamaError,
    OllamaGenerateLine,
    OllamaLine,
    OllamaOutputFunction,
    OllamaTokenLogprob,
    Said,
)
from localspec.protocol import frames
from localspec.protocol.answers import Extra, ToolCall
from localspec.protocol.pieces import Call, Piece, Text

_NS_PER_MS = 1_000_000


def format_now() -> str:
    """Return the current time in Ollama's format."""
    return format_time(time.time())


def format_time(seconds: float) -> str:
    """Return a Unix time in Ollama's format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def line(model: str, *, chat: bool, text: str = "", **fields: Any) -> OllamaLine:
    """Return one line of /api/chat if `chat` is true, else of /api/generate."""
    fields.setdefault("done", False)
    thinking = fields.pop("thinking", "")
    if chat:
        said = Said(text, "assistant", thinking, fields.pop("tool_calls", []))
        return OllamaChatLine(model=model, created_at=format_now(), message=said, **fields)
    return OllamaGenerateLine(
        model=model, created_at=format_now(), response=text, thinking=thinking or UNSET, **fields
    )


class OllamaShape(Shape):
    """Formats the one choice of /api/chat or /api/generate; a call is sent once it is complete."""

    events = LineStream

    def __init__(self, answer: PendingAnswer, model: str, *, chat: bool) -> None:
        """Create the shape. `model` is the name that the client used."""
        super().__init__(answer)
        self._model = model
        self._chat = chat
        self._sent_calls = 0
        self._began = time.monotonic_ns()

    @property
    def _choice(self) -> Choice:
        return self.answer.choices[0]

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        lines = [self._piece(piece) for piece in pieces if isinstance(piece, Text)]
        if any(isinstance(piece, Call) for piece in pieces):
            lines += self._calls(self._choice.calls[:-1])
        if isinstance(event, frames.Delta) and event.logprobs and self.answer.wants_logprobs:
            lines = lines or [self._line()]
            lines[0].logprobs = _logprobs(event.logprobs)
        if isinstance(event, frames.Done):
            lines += self._calls(self._choice.calls)
            lines.append(self._line(**self._end(event)))
        return lines

    @classmethod
    def failed_early(cls, error: LocalspecError) -> Sequence[object]:
        return [OllamaError(stream_message(error))]

    def complete(self) -> object:
        choice = self._choice
        assert choice.done is not None
        calls, incomplete_text = _decode_calls(choice.calls)
        fields = {"thinking": choice.reasoning, **self._end(choice.done)}
        if calls:
            fields["tool_calls"] = calls
        if self.answer.wants_logprobs:
            fields["logprobs"] = _logprobs(choice.logprobs)
        return self._line(choice.content + incomplete_text, **fields)

    def _line(self, text: str = "", **fields: Any) -> OllamaLine:
        return line(self._model, chat=self._chat, text=text, **fields)

    def _piece(self, piece: Text) -> OllamaLine:
        if piece.kind == "content":
            return self._line(piece.text)
        return self._line(thinking=piece.text)

    def _calls(self, complete: list[ToolCall]) -> list[OllamaLine]:
        """Return a line for each of the calls that was not sent yet."""
        lines = []
        for call in complete[self._sent_calls :]:
            calls, incomplete_text = _decode_calls([call])
            lines.append(self._line(incomplete_text, **({"tool_calls": calls} if calls else {})))
        self._sent_calls = len(complete)
        return lines

    def _end(self, done: frames.Done) -> dict[str, Any]:
        prompt_ns = round(done.timings.prompt_ms * _NS_PER_MS)
        eval_ns = round(done.timings.predicted_ms * _NS_PER_MS)
        total_ns = time.monotonic_ns() - self._began
        return {
            "done": True,
            "done_reason": "length" if done.finish_reason == "length" else "stop",
            "total_duration": total_ns,
            # Includes the time in the queue.
            "load_duration": max(total_ns - prompt_ns - eval_ns, 0),
            "prompt_eval_count": done.prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": done.completion_tokens,
            "eval_duration": eval_ns,
            "localspec": Extra(
                speculation=done.speculation,
                note=self.answer.note() or UNSET,
                ignored=[*self.answer.notes.ignored()] or UNSET,
            ),
        }


def _decode_calls(calls: list[ToolCall]) -> tuple[list[Called], str]:
    """Return the calls with their arguments as objects, and those that were cut off as text."""
    decoded, incomplete_text = [], ""
    for call in calls:
        name, text = call.function.name, call.function.arguments
        try:
            arguments = json.loads(replace_halves(text or "{}"))
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            decoded.append(Called(call.id, OllamaOutputFunction(name, arguments)))
        else:
            incomplete_text += f'{{"name": {json.dumps(name)}, "arguments": {text}'
    return decoded, incomplete_text


def _logprobs(tokens: list[frames.TokenLogprob]) -> list[Logprob]:
    return [
        Logprob(
            decode_piece(token.piece),
            token.logprob,
            list(token.piece),
            [OllamaTokenLogprob(decode_piece(raw), value, list(raw)) for _, raw, value in token.top]
            or UNSET,
        )
        for token in tokens
    ]
