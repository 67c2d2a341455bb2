"""Answers as Ollama gives them: lines of JSON, the last with `done`, or all in one object."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET

from localspec.daemon.completion.answer import Answer, Choice, text_of
from localspec.daemon.completion.reply.calls import Call
from localspec.daemon.completion.reply.parser import Piece, Text
from localspec.daemon.worker.process import Event
from localspec.errors import LocalspecError, known_words
from localspec.protocol import frames
from localspec.protocol.answers import Extra, OllamaError, ToolCall
from localspec.protocol.clients.ollama import (
    Called,
    CalledFunction,
    Line,
    Logprob,
    OllamaChatLine,
    OllamaGenerateLine,
    Said,
    TokenLogprob,
)

_MILLISECOND = 1_000_000  # ns


def now() -> str:
    return moment(time.time())


def moment(seconds: float) -> str:
    """A Unix time as Ollama writes one."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def line(model: str, *, chat: bool, text: str = "", **more: Any) -> Line:
    """One line with nothing else than this text; `chat`: it is /api/chat's."""
    more.setdefault("done", False)
    thinking = more.pop("thinking", "")
    if chat:
        said = Said(text, "assistant", thinking, more.pop("tool_calls", []))
        return OllamaChatLine(model=model, created_at=now(), message=said, **more)
    return OllamaGenerateLine(
        model=model, created_at=now(), response=text, thinking=thinking or UNSET, **more
    )


class OllamaShape:
    """One choice, of /api/chat or /api/generate. A call is told when it is whole."""

    def __init__(
        self,
        answer: Answer,
        model: str,
        *,
        chat: bool,
        note: Callable[[], str | None],
        ignored: Callable[[], list[str]],
    ) -> None:
        """`model`: as the client calls it. `note`, and what was `ignored`, are asked for at the end."""
        self.answer = answer
        self._model = model
        self._chat = chat
        self._note = note
        self._ignored = ignored
        self._told = 0  # calls
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

    def end(self) -> Sequence[object]:
        return ()

    def failed(self, error: LocalspecError) -> Sequence[object]:
        return [OllamaError(known_words(error))]

    def whole(self) -> object:
        choice = self._choice
        assert choice.done is not None
        calls, rest = _read(choice.calls)
        more = {"thinking": choice.reasoning, **self._end(choice.done)}
        if calls:
            more["tool_calls"] = calls
        if self.answer.wants_logprobs:
            more["logprobs"] = _logprobs(choice.logprobs)
        return self._line(choice.content + rest, **more)

    def _line(self, text: str = "", **more: Any) -> Line:
        return line(self._model, chat=self._chat, text=text, **more)

    def _piece(self, piece: Text) -> Line:
        if piece.kind == "content":
            return self._line(piece.text)
        return self._line(thinking=piece.text)

    def _calls(self, whole: list[ToolCall]) -> list[Line]:
        """A line for each of these that has had none."""
        found = []
        for each in whole[self._told :]:
            calls, rest = _read([each])
            found.append(self._line(rest, **({"tool_calls": calls} if calls else {})))
        self._told = len(whole)
        return found

    def _end(self, done: frames.Done) -> dict[str, Any]:
        prompt = round(done.timings.prompt_ms * _MILLISECOND)
        written = round(done.timings.predicted_ms * _MILLISECOND)
        total = time.monotonic_ns() - self._began
        return {
            "done": True,
            "done_reason": "length" if done.finish_reason == "length" else "stop",
            "total_duration": total,
            "load_duration": max(total - prompt - written, 0),  # the queue too
            "prompt_eval_count": done.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": done.completion_tokens,
            "eval_duration": written,
            "localspec": Extra(
                speculation=done.speculation,
                note=self.answer.news(self.answer.note(self._note())) or UNSET,
                ignored=self._ignored() or UNSET,
            ),
        }


def _read(calls: list[ToolCall]) -> tuple[list[Called], str]:
    """Calls with their arguments as objects; one that was cut off in the middle is text."""
    found, rest = [], ""
    for each in calls:
        name, written = each.function.name, each.function.arguments
        try:
            arguments = json.loads(written or "{}")
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            found.append(Called(each.id, CalledFunction(name, arguments)))
        else:
            rest += f'{{"name": {json.dumps(name)}, "arguments": {written}'
    return found, rest


def _logprobs(tokens: list[frames.TokenLogprob]) -> list[Logprob]:
    return [
        Logprob(
            text_of(each.piece),
            each.logprob,
            list(each.piece),
            [TokenLogprob(text_of(raw), value, list(raw)) for _, raw, value in each.top] or UNSET,
        )
        for each in tokens
    ]
