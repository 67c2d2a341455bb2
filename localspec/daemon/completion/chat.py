"""Chat completions: thoughts, text and tool calls, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET

from localspec.daemon.completion.answer import FINGERPRINT, Composer, finish, shown, tinted
from localspec.daemon.completion.reply.json_calls import Arguments, Call
from localspec.daemon.completion.reply.parser import AnswerParser, Piece, Text
from localspec.protocol import frames
from localspec.protocol.http import (
    CalledDelta,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    Choices,
    ChunkChoice,
    Completion,
    Extra,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)


@dataclass(slots=True)
class Said:
    """What one choice has said so far, taken apart."""

    parser: AnswerParser
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    over: bool = False

    def end(self) -> Sequence[Piece]:
        """What was held back; nothing more comes."""
        pieces = () if self.over else self.parser.finish()
        self.over = True
        self.add(pieces)
        return pieces

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text("content"):
                    self.content += piece.text
                case Text():
                    self.reasoning += piece.text
                case Call():
                    self.calls.append(ToolCall(piece.id, CalledFunction(piece.name, "")))
                case Arguments():
                    self.calls[piece.index].function.arguments += piece.text


class ChatComposer(Composer):
    prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        requests: list[frames.Generate],
        *,
        n: int,
        note: Callable[[], str | None],
        parser: Callable[[], AnswerParser] = AnswerParser,
    ) -> None:
        super().__init__(model, requests, n=n, note=note)
        self.said = [Said(parser()) for _ in self.choices]
        self.when_done: Callable[[], None] = lambda: None  # called before the client knows the end

    def feed(self, index: int, event: frames.Started | frames.Delta | frames.Done) -> None:
        super().feed(index, event)
        self._read(index, event)

    def _read(
        self, index: int, event: frames.Started | frames.Delta | frames.Done
    ) -> Sequence[Piece]:
        """What the event adds to what was said."""
        said = self.said[index]
        pieces: Sequence[Piece] = ()
        match event:
            case frames.Started():
                said.parser.begin(event.tail)
            case frames.Delta():
                pieces = said.parser.push(event.text)
                said.add(pieces)
            case frames.Done():
                pieces = said.end()
                if index == 0:
                    self.when_done()
        return pieces

    def chunks(
        self, index: int, event: frames.Started | frames.Delta | frames.Done
    ) -> Sequence[object]:
        super().feed(index, event)
        pieces = self._read(index, event)
        match event:
            case frames.Started():
                return self.opening(index)
            case frames.Delta():
                return self._deltas(index, event, pieces)
            case frames.Done():
                deltas = [self._chunk(index, self._delta(piece)) for piece in pieces]
                return [*deltas, *self.closing(index, event)]

    def opening(self, index: int) -> Sequence[object]:
        chunk = self._chunk(index, ChatDelta(role="assistant", content=""))
        if self.conversation:  # at once: whoever interrupts the answer can still go on with it
            chunk.localspec = Extra(conversation=self.conversation)
        return [chunk]

    def _deltas(
        self, index: int, event: frames.Delta, pieces: Sequence[Piece]
    ) -> Sequence[Completion]:
        logprobs = self._logprobs(event.logprobs)
        deltas = [self._delta(piece) for piece in pieces]
        if not deltas and event.logprobs:
            deltas = [ChatDelta(content="")]
        chunks = [self._chunk(index, delta) for delta in deltas]
        if chunks and isinstance(chunks[0].choices[0], ChunkChoice):
            chunks[0].choices[0].logprobs = logprobs
        if len(pieces) == 1 and pieces[0] == Text("content", event.text):
            tinted(chunks[0], event)  # its spans count the characters of the whole piece
        return chunks

    def _delta(self, piece: Piece) -> ChatDelta:
        match piece:
            case Text("content"):
                return ChatDelta(content=piece.text)
            case Text():
                return ChatDelta(reasoning_content=piece.text)
            case Call():
                call = ToolCallDelta(piece.index, CalledDelta("", piece.name), piece.id, "function")
                return ChatDelta(tool_calls=[call])
            case Arguments():
                return ChatDelta(tool_calls=[ToolCallDelta(piece.index, CalledDelta(piece.text))])

    def closing(self, index: int, done: frames.Done) -> Sequence[object]:
        reason = self._finish(index, done)
        return [self._ended(self._chunk(index, ChatDelta(), None, reason), [done])]

    def whole(self) -> Completion:
        choices = [
            ChatChoice(
                index,
                self._answer(index),
                self._finish(index, choice.done),
                self._logprobs(choice.logprobs),
            )
            for index, choice in enumerate(self.choices)
        ]
        completion = self._completion(choices, streamed=False)
        completion.usage = self.usage()
        return self._ended(completion, self._all_done())

    def _answer(self, index: int) -> ChatAnswer:
        said = self.said[index]
        return ChatAnswer(
            said.content if said.content or not said.calls else None,
            reasoning_content=said.reasoning or UNSET,
            tool_calls=said.calls or UNSET,
        )

    def _finish(self, index: int, done: frames.Done | None) -> str:
        reason = finish(done)
        return "tool_calls" if reason == "stop" and self.said[index].calls else reason

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        reason: str | None = None,
    ) -> Completion:
        return self._completion([ChunkChoice(index, delta, reason, logprobs)], streamed=True)

    def _logprobs(self, tokens: list[frames.TokenLogprob]) -> ChatLogprobs | None:
        if not self.wants_logprobs:
            return None
        return ChatLogprobs(
            [
                ChatLogprob(
                    shown(token.piece),
                    token.logprob,
                    list(token.piece),
                    [TopLogprob(shown(raw), value, list(raw)) for _, raw, value in token.top],
                )
                for token in tokens
            ]
        )

    def _completion(self, choices: Choices, *, streamed: bool) -> Completion:
        kind: Literal["chat.completion", "chat.completion.chunk"]
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return Completion(self.id, kind, self.created, self.model, FINGERPRINT, choices)
