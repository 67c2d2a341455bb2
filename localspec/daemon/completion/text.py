"""Text completions in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.daemon.completion.answer import OpenAIShape, text_of, with_drafted
from localspec.daemon.completion.reply.parser import Piece
from localspec.daemon.worker.process import Event
from localspec.protocol import frames
from localspec.protocol.answers import Choices, TextChoice, TextLogprobs


class TextShape(OpenAIShape):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Delta() if event.text or event.logprobs:
                offset = len(self.answer.choices[index].content) - len(event.text)
                logprobs = self._logprobs(event.logprobs, offset)
                return [
                    with_drafted(self.chunk([TextChoice(index, event.text, None, logprobs)]), event)
                ]
            case frames.Done():
                finish = self.answer.choices[index].finish
                return [self.closing([TextChoice(index, "", finish)], event)]
        return ()

    def choices(self) -> Choices:
        return [
            TextChoice(index, each.content, each.finish, self._logprobs(each.logprobs, 0))
            for index, each in enumerate(self.answer.choices)
        ]

    def _logprobs(self, tokens: list[frames.TokenLogprob], offset: int) -> TextLogprobs | None:
        """`offset`: of the first token, in characters of the choice's text."""
        if not self.answer.wants_logprobs:
            return None
        texts = [text_of(token.piece) for token in tokens]
        offsets = [offset + sum(map(len, texts[:index])) for index in range(len(texts))]
        top = [
            {text_of(piece): value for _, piece, value in reversed(token.top)} for token in tokens
        ]
        return TextLogprobs(texts, [token.logprob for token in tokens], top, offsets)
