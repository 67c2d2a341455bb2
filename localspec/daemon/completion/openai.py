"""Format answers as OpenAI's chat completions, with reasoning and tool calls, and text completions."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, cast

from msgspec import UNSET, UnsetType

import localspec
from localspec.chat.token_report import decode_piece
from localspec.chat.tools import custom_input
from localspec.daemon.completion.answer import (
    Choice,
    PendingAnswer,
    Shape,
    format_logprob,
)
from localspec.daemon.http.sse import DONE
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
    CustomCall,
    CustomInput,
    Extra,
    Progress,
    PromptLogprob,
    PromptProgress,
    TextChoice,
    TextLogprobs,
    ToolCall,
    ToolCallDelta,
)
from localspec.protocol.pieces import Arguments, Call, Piece, Text
from localspec.protocol.requests import StreamOptions

Kind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]

FINGERPRINT = f"localspec-{localspec.__version__}"


class OpenAIShape(Shape):
    """What chat and text completions have in common."""

    prefix: str
    kind: Kind
    chunk_kind: Kind

    def __init__(
        self,
        answer: PendingAnswer,
        options: StreamOptions | None,
        *,
        conversation: str | None = None,
        functions: bool = False,
        custom: Collection[str] = (),
    ) -> None:
        """Create the shape; `options` are the request's `stream_options`.

        `conversation` is the id of the one in which the answer is stored. With `functions` a call has
        OpenAI's older form. `custom` are the names of custom tools, whose calls have a form of their own.
        """
        super().__init__(answer)
        self.conversation = conversation or UNSET
        self._usage = options is not None and options.include_usage
        self._functions = functions
        self._custom = custom
        # Of the custom call that a choice is writing, its index and the pieces of its arguments.
        self._custom_calls: dict[int, tuple[int, list[str]]] = {}
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @abstractmethod
    def choices(self) -> Choices:
        """Return every choice with its whole text."""

    def chunk(self, choices: Choices) -> Completion:
        return self._completion(self.chunk_kind, choices)

    def with_progress(self, chunk: Completion, index: int, progress: PromptProgress) -> Completion:
        chunk.prompt_progress = progress
        if self.answer.wants_timings:
            chunk.timings = self.answer.choices[index].timings
        return chunk

    def progress(self, status: Progress) -> Completion:
        """Return the chunk that says what the answer is waiting for before its first choice begins."""
        chunk = self.chunk([])
        chunk.localspec = Extra(progress=status)
        return chunk

    @abstractmethod
    def reading(self, index: int, now: PromptProgress) -> Completion:
        """Return the chunk that reports how much of a prompt is read, as in llama-server."""

    def closing(self, choices: Choices, done: frames.Done) -> Completion:
        """Return the last chunk of a choice."""
        # Whether the answer was stored is said after all choices.
        return self._with_summary(self.chunk(choices), [done], not_kept="")

    def end(self) -> Sequence[object]:
        last = self.chunk([])
        if self._usage:
            last.usage = self.answer.usage()
            last.timings = sum_timings([end.timings for end in self.answer.done])
        if reason := self.answer.notes.not_kept():
            last.localspec = Extra(not_kept=reason)
        return [last, DONE] if self._usage or reason else [DONE]

    def complete(self) -> Completion:
        completion = self._completion(self.kind, self.choices())
        completion.usage = self.answer.usage()
        return self._with_summary(completion, self.answer.done)

    def _completion(self, kind: Kind, choices: Choices) -> Completion:
        return Completion(self.id, kind, self._created, self.answer.model, FINGERPRINT, choices)

    def _with_summary(
        self, completion: Completion, done: list[frames.Done], **extra: Any
    ) -> Completion:
        """Add the timings and the key `localspec`; the timings of several choices are summed up."""
        completion.timings = sum_timings([end.timings for end in done])
        completion.localspec = self.answer.extension(
            Extra, done, conversation=self.conversation, **extra
        )
        return completion


def sum_timings(parts: list[frames.Timings]) -> frames.Timings | UnsetType:
    """Return the timings of several choices as one: counts and times are sums, rates follow from them."""
    if not parts:
        return UNSET
    if len(parts) == 1:
        return parts[0]
    result = frames.Timings()
    counts = "cache_n", "cache_shift_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted"
    for name in (*counts, "cache_exact_n", "cache_known_n", "cache_ahead_n"):
        values = [getattr(part, name) for part in parts]
        setattr(result, name, UNSET if UNSET in values else sum(values))
    result.cache_loss = next((part.cache_loss for part in parts if part.cache_loss), UNSET)
    for name in ("prompt", "predicted"):
        count = getattr(result, f"{name}_n")
        milliseconds = sum(getattr(part, f"{name}_ms") for part in parts)
        setattr(result, f"{name}_ms", milliseconds)
        setattr(result, f"{name}_per_token_ms", milliseconds / count if count else 0.0)
        rate = 1000.0 * count / milliseconds if milliseconds else 0.0
        setattr(result, f"{name}_per_second", rate)
    return result


def with_timings(chunks: Sequence[Completion], delta: frames.Delta) -> Sequence[Completion]:
    """Add the choice's timings so far to the last of `chunks`, if the request wants them."""
    if chunks and delta.timings is not None:
        chunks[-1].timings = delta.timings
    return chunks


def with_drafted(chunk: Completion, delta: frames.Delta) -> Completion:
    """Add the spans of a chunk's text that came from the draft."""
    if delta.drafted:
        chunk.localspec = Extra(drafted=delta.drafted)
    return chunk


class ChatShape(OpenAIShape):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Started():
                opening = self.chunk([ChunkChoice(index, ChatDelta(role="assistant", content=""))])
                # Sent at once, so that a client that interrupts the answer can still continue it.
                if self.conversation:
                    opening.localspec = Extra(conversation=self.conversation)
                return [opening]
            case frames.Delta():
                return self._deltas(index, event, pieces)
            case frames.Done():
                end = ChunkChoice(index, ChatDelta(), self._finish(self.answer.choices[index]))
                deltas = [*self._deltas_for(index, pieces), *self._end_custom_call(index)]
                chunks = [self.chunk([ChunkChoice(index, delta)]) for delta in deltas]
                return [*chunks, self.closing([end], event)]
        return ()

    def reading(self, index: int, now: PromptProgress) -> Completion:
        chunk = self.chunk([ChunkChoice(index, ChatDelta(role="assistant", content=None))])
        return self.with_progress(chunk, index, now)

    def _deltas(
        self, index: int, event: frames.Delta, pieces: Sequence[Piece]
    ) -> Sequence[Completion]:
        choices = [ChunkChoice(index, delta) for delta in self._deltas_for(index, pieces)]
        if not choices and event.logprobs:
            choices = [ChunkChoice(index, ChatDelta(content=""))]
        if choices:
            choices[0].logprobs = self._logprobs(event.logprobs)
        chunks = [self.chunk([choice]) for choice in choices]
        if len(chunks) == 1:
            with_drafted(chunks[0], event)
        return with_timings(chunks, event)

    def choices(self) -> Choices:
        return [
            ChatChoice(index, self._message(one), self._finish(one), self._logprobs(one.logprobs))
            for index, one in enumerate(self.answer.choices)
        ]

    def _finish(self, choice: Choice) -> str:
        reason = choice.finish_reason
        return "function_call" if self._functions and reason == "tool_calls" else reason

    def _deltas_for(self, index: int, pieces: Sequence[Piece]) -> Iterator[ChatDelta]:
        """Yield what chunks add for pieces. The input of a custom tool is decoded when it is complete."""
        for piece in pieces:
            if isinstance(piece, Arguments) and index in self._custom_calls:
                self._custom_calls[index][1].append(piece.text)
                continue
            yield from self._end_custom_call(index)
            if isinstance(piece, Call) and piece.name in self._custom:
                self._custom_calls[index] = piece.index, []
                name = CustomInput("", piece.name)
                yield _custom_delta(CustomCall(name, piece.id, "custom", piece.index))
            else:
                yield self._delta_for(piece)

    def _end_custom_call(self, index: int) -> Iterator[ChatDelta]:
        if call := self._custom_calls.pop(index, None):
            text = CustomInput(custom_input("".join(call[1])))
            yield _custom_delta(CustomCall(text, index=call[0]))

    def _delta_for(self, piece: Piece) -> ChatDelta:
        if isinstance(piece, Text):
            is_content = piece.kind == "content"
            return (
                ChatDelta(content=piece.text)
                if is_content
                else ChatDelta(reasoning_content=piece.text)
            )
        if isinstance(piece, Call):
            function = CalledDelta("", piece.name)
            call = ToolCallDelta(piece.index, function, piece.id, "function")
        else:
            function = CalledDelta(piece.text)
            call = ToolCallDelta(piece.index, function)
        return (
            ChatDelta(function_call=function) if self._functions else ChatDelta(tool_calls=[call])
        )

    def _message(self, choice: Choice) -> ChatAnswer:
        content = choice.content if choice.content or not choice.calls else None
        message = ChatAnswer(content, reasoning_content=choice.reasoning or UNSET)
        if self._functions and choice.calls:
            message.function_call = choice.calls[0].function
        elif choice.calls:
            message.tool_calls = [*map(self._named_call, choice.calls)]
        return message

    def _named_call(self, call: ToolCall) -> ToolCall:
        name = call.function.name
        if name not in self._custom:
            return call
        custom = CustomInput(custom_input(call.function.arguments), name)
        return cast(ToolCall, CustomCall(custom, call.id, "custom"))

    def _logprobs(self, tokens: list[frames.TokenLogprob]) -> ChatLogprobs | None:
        if not self.answer.wants_logprobs:
            return None
        return ChatLogprobs([format_logprob(token, ChatLogprob) for token in tokens])


def _custom_delta(call: CustomCall) -> ChatDelta:
    return ChatDelta(tool_calls=[cast(ToolCallDelta, call)])


class TextShape(OpenAIShape):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"
    echo: Sequence[str] = ()  # the prompts, if answers have to begin with them
    # The number of likeliest tokens to report beside each token, in `logprobs` and in `prompt_logprobs`.
    tops: int = 0
    prompt_tops: int | None = None
    _prompts_sent: set[int]  # choices whose prompt was sent already in a stream

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._prompts_sent = set()

    @property
    def _scores_echo(self) -> bool:
        return bool(self.echo) and self.answer.wants_logprobs

    def reading(self, index: int, now: PromptProgress) -> Completion:
        chunk = self.chunk([TextChoice(index, "")])
        return self.with_progress(chunk, index, now)

    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]:
        match event:
            case frames.Started() if self.echo and not self._waits_for_scores:
                return [self.chunk([TextChoice(index, self._echoed(index))])]
            case frames.Delta() if event.text or event.logprobs:
                choice = TextChoice(index, event.text, None, self._logprobs(index, event.logprobs))
                chunk = with_drafted(self.chunk([choice]), event)
                return with_timings([*self._prompt_chunk(index), chunk], event)
            case frames.Done():
                finish = self.answer.choices[index].finish_reason
                end = self.closing([TextChoice(index, "", finish)], event)
                return [*self._prompt_chunk(index), end]
        return ()

    @property
    def _waits_for_scores(self) -> bool:
        return self._scores_echo or self.prompt_tops is not None

    def _prompt_chunk(self, index: int) -> Sequence[Completion]:
        """Return the chunk with the prompt's log-probabilities, once, before the answer."""
        if not self._waits_for_scores or index in self._prompts_sent:
            return []
        self._prompts_sent.add(index)
        choice = TextChoice(index, self._echoed(index))
        if self._scores_echo:
            choice.logprobs = self._prompt_logprobs(index)
        choice.prompt_logprobs = self._as_vllm(index)
        return [self.chunk([choice])]

    def choices(self) -> Choices:
        return [
            TextChoice(
                index,
                self._echoed(index) + choice.content,
                choice.finish_reason,
                self._all_logprobs(index),
                self._as_vllm(index),
            )
            for index, choice in enumerate(self.answer.choices)
        ]

    def _echoed(self, index: int) -> str:
        return self.echo[self.answer.choices[index].prompt] if self.echo else ""

    def _all_logprobs(self, index: int) -> TextLogprobs | None:
        """Return the log-probabilities of a whole choice, with those of the prompt if it is echoed."""
        completion = self._logprobs(index, self.answer.choices[index].logprobs)
        if completion is None or not self._scores_echo:
            return completion
        prompt = self._prompt_logprobs(index)
        return TextLogprobs(
            prompt.tokens + completion.tokens,
            prompt.token_logprobs + completion.token_logprobs,
            prompt.top_logprobs + completion.top_logprobs,
            prompt.text_offset + completion.text_offset,
        )

    def _logprobs(self, index: int, tokens: list[frames.TokenLogprob]) -> TextLogprobs | None:
        if not self.answer.wants_logprobs:
            return None
        prompt_length = len(self._echoed(index))
        return self._as_openai(tokens, [prompt_length + token.offset for token in tokens])

    def _prompt_logprobs(self, index: int) -> TextLogprobs:
        tokens = self.answer.choices[index].prompt_logprobs
        pieces = [token.piece for token in tokens]
        logprobs = self._as_openai(tokens, prompt_offsets(self._echoed(index), pieces))
        if tokens:  # Nothing precedes the first token, so it has no probability.
            logprobs.token_logprobs[0] = logprobs.top_logprobs[0] = None
        return logprobs

    def _as_openai(self, tokens: list[frames.TokenLogprob], offsets: list[int]) -> TextLogprobs:
        tops: list[dict[str, float] | None] = [
            {decode_piece(piece): value for _, piece, value in reversed(token.top[: self.tops])}
            for token in tokens
        ]
        values: list[float | None] = [token.logprob for token in tokens]
        return TextLogprobs([decode_piece(token.piece) for token in tokens], values, tops, offsets)

    def _as_vllm(self, index: int) -> list[dict[str, PromptLogprob] | None] | UnsetType:
        """Return `prompt_logprobs`: for each position the likeliest tokens and the prompt's own, by id."""
        max_tops = self.prompt_tops
        if max_tops is None:
            return UNSET
        positions: list[dict[str, PromptLogprob] | None] = [None]
        for token in self.answer.choices[index].prompt_logprobs[1:]:
            entry = {
                str(token_id): PromptLogprob(value, rank, decode_piece(piece))
                for rank, (token_id, piece, value) in enumerate(token.top[:max_tops], start=1)
            }
            actual = PromptLogprob(token.logprob, token.rank, decode_piece(token.piece))
            positions.append({**entry, str(token.id): actual})
        return positions


def prompt_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Return the index in the echoed `text` at which each of the prompt's tokens begins.

    Text before `text` counts as position 0: a token that the model adds at the beginning, and the blank
    that some vocabularies put before the first word.
    """
    joined = b"".join(pieces).decode("utf-8", "replace")
    lead = max(joined.find(text), 0)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, count = [], 0
    for piece in pieces:
        offsets.append(min(max(count - lead, 0), len(text)))
        count += len(decoder.decode(piece))
    return offsets
