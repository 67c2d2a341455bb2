"""Chat completions: thoughts, text and tool calls, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from localspec.daemon.completion.answer import Choice, OpenAIShape, text_of, with_drafted
from localspec.daemon.completion.reply.calls import Arguments, Call
from localspec.daemon.completion.reply.parser import Piece, Text
from localspec.daemon.worker.process import Event
from localspec.protocol import frames
from localspec.protocol.answers import (
    CalledDelta,
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    Choices,
    ChunkChoice,
    Completion,
    Extra,
    ToolCallDelta,
    TopLogprob,
)


class ChatShape(OpenAIShape):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Started():
                return [self._opening(index)]
            case frames.Delta():
                return self._deltas(index, event, pieces)
            case frames.Done():
                end = ChunkChoice(index, ChatDelta(), self.answer.choices[index].finish)
                deltas = [self.chunk([ChunkChoice(index, _delta(piece))]) for piece in pieces]
                return [*deltas, self.closing([end], event)]

    def _opening(self, index: int) -> Completion:
        chunk = self.chunk([ChunkChoice(index, ChatDelta(role="assistant", content=""))])
        if self.conversation:  # at once: whoever interrupts the answer can still go on with it
            chunk.localspec = Extra(conversation=self.conversation)
        return chunk

    def _deltas(
        self, index: int, event: frames.Delta, pieces: Sequence[Piece]
    ) -> Sequence[Completion]:
        choices = [ChunkChoice(index, _delta(piece)) for piece in pieces]
        if not choices and event.logprobs:
            choices = [ChunkChoice(index, ChatDelta(content=""))]
        if choices:
            choices[0].logprobs = self._logprobs(event.logprobs)
        chunks = [self.chunk([choice]) for choice in choices]
        if len(pieces) == 1 and pieces[0] == Text("content", event.text):
            with_drafted(chunks[0], event)  # its spans count the characters of the whole piece
        return chunks

    def choices(self) -> Choices:
        return [
            ChatChoice(index, _message(each), each.finish, self._logprobs(each.logprobs))
            for index, each in enumerate(self.answer.choices)
        ]

    def _logprobs(self, tokens: list[frames.TokenLogprob]) -> ChatLogprobs | None:
        if not self.answer.wants_logprobs:
            return None
        return ChatLogprobs(
            [
                ChatLogprob(
                    text_of(token.piece),
                    token.logprob,
                    list(token.piece),
                    [TopLogprob(text_of(raw), value, list(raw)) for _, raw, value in token.top],
                )
                for token in tokens
            ]
        )


def _message(choice: Choice) -> ChatAnswer:
    return ChatAnswer(
        choice.content if choice.content or not choice.calls else None,
        reasoning_content=choice.reasoning or UNSET,
        tool_calls=choice.calls or UNSET,
    )


def _delta(piece: Piece) -> ChatDelta:
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
