"""OpenAI's two shapes: chat completions, with thoughts and tool calls, and text completions."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import UNSET, UnsetType

import localspec
from localspec.daemon.completion.answer import Answer, Choice, text_of
from localspec.daemon.completion.reply.calls import Arguments, Call
from localspec.daemon.completion.reply.parser import Piece, Text
from localspec.daemon.http.errors import told
from localspec.daemon.http.sse import DONE
from localspec.daemon.worker.process import Event
from localspec.errors import LocalspecError
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
    Progress,
    PromptLogprob,
    PromptProgress,
    TextChoice,
    TextLogprobs,
    ToolCallDelta,
    TopLogprob,
)
from localspec.protocol.requests import StreamOptions

Kind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]

FINGERPRINT = f"localspec-{localspec.__version__}"


class OpenAIShape(ABC):
    """What chat and text completions share."""

    prefix: str
    kind: Kind
    chunk_kind: Kind

    def __init__(
        self,
        answer: Answer,
        options: StreamOptions | None,
        *,
        note: Callable[[], str | None],
        news: Callable[[], str],
        conversation: str | None = None,
        not_kept: Callable[[], str] = str,
        ignored: Sequence[str] = (),
        functions: bool = False,
    ) -> None:
        """`note` and `news`: what a person should know, asked for at the end; `news` is told once.
        `conversation`: where the answer is kept; `not_kept`: why it is not, asked for when it should be.
        `ignored`: what of the request changed nothing. `functions`: a call has OpenAI's older form.
        """
        self.answer = answer
        self.conversation = conversation or UNSET
        self._usage = options is not None and options.include_usage
        self._note = note
        self._news = news
        self._not_kept = not_kept
        self._ignored = list(ignored)
        self._functions = functions
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @abstractmethod
    def chunks(self, index: int, event: Event, pieces: Sequence[Piece]) -> Sequence[object]: ...

    @abstractmethod
    def choices(self) -> Choices:
        """Every choice, whole."""

    def chunk(self, choices: Choices) -> Completion:
        return self._completion(self.chunk_kind, choices)

    def with_progress(self, chunk: Completion, index: int, now: PromptProgress) -> Completion:
        """`chunk`, with how much of a prompt is read, and the time where that is asked for."""
        chunk.prompt_progress = now
        if self.answer.wants_timings:
            chunk.timings = self.answer.choices[index].timings
        return chunk

    def progress(self, now: Progress) -> Completion:
        """Before the first chunk of a choice."""
        chunk = self.chunk([])
        chunk.localspec = Extra(progress=now)
        return chunk

    @abstractmethod
    def reading(self, index: int, now: PromptProgress) -> Completion:
        """While the prompt of a choice is read, as llama-server says it."""

    def closing(self, choices: Choices, done: frames.Done) -> Completion:
        """The last chunk of a choice."""
        return self._ended(self.chunk(choices), [done])

    def end(self) -> Sequence[object]:
        last = self.chunk([])
        if self._usage:
            last.usage = self.answer.usage()
            last.timings = total([end.timings for end in self.answer.done])
        if why := self._not_kept():
            last.localspec = Extra(not_kept=why)
        return [last, DONE] if self._usage or why else [DONE]

    def failed(self, error: LocalspecError) -> Sequence[object]:
        return told(error)

    def whole(self) -> Completion:
        completion = self._completion(self.kind, self.choices())
        completion.usage = self.answer.usage()
        return self._ended(completion, self.answer.done, self._not_kept())

    def _completion(self, kind: Kind, choices: Choices) -> Completion:
        return Completion(self._id, kind, self._created, self.answer.model, FINGERPRINT, choices)

    def _ended(
        self, completion: Completion, done: list[frames.Done], not_kept: str = ""
    ) -> Completion:
        """Add timings and our own key. Of several choices, `timings` adds up."""
        completion.timings = total([end.timings for end in done])
        completion.localspec = Extra(
            speculation=done[0].speculation if len(done) == 1 else UNSET,
            note=self.answer.note(self._note()) or UNSET,
            news=self.answer.news(self._news()) or UNSET,
            conversation=self.conversation,
            not_kept=not_kept or UNSET,
            limit=limit(done),
            ignored=self._ignored or UNSET,
            passes=(done[0].trace if len(done) == 1 else UNSET) or UNSET,
        )
        return completion


def limit(done: list[frames.Done]) -> Literal["tokens", "context"] | UnsetType:
    """What cut an answer off, if anything did."""
    cut = [end for end in done if end.finish_reason == "length"]
    if not cut:
        return UNSET
    return "context" if any(end.truncated for end in cut) else "tokens"


def total(parts: list[frames.Timings]) -> frames.Timings | UnsetType:
    """One `timings` for several choices: counts and times added up, rates from the sums."""
    if not parts:
        return UNSET
    if len(parts) == 1:
        return parts[0]
    result = frames.Timings()
    counts = "cache_n", "cache_shift_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted"
    for name in counts:
        setattr(result, name, sum(getattr(part, name) for part in parts))
    exact = [each for part in parts if isinstance(each := part.cache_exact_n, int)]
    if len(exact) == len(parts):
        result.cache_exact_n = sum(exact)
    for name in ("prompt", "predicted"):
        count = getattr(result, f"{name}_n")
        milliseconds = sum(getattr(part, f"{name}_ms") for part in parts)
        setattr(result, f"{name}_ms", milliseconds)
        setattr(result, f"{name}_per_token_ms", milliseconds / count if count else 0.0)
        rate = 1000.0 * count / milliseconds if milliseconds else 0.0
        setattr(result, f"{name}_per_second", rate)
    return result


def timed(chunks: Sequence[Completion], delta: frames.Delta) -> Sequence[Completion]:
    """`chunks`, the last with how long the choice has taken so far, where that is asked for."""
    if chunks and delta.timings is not None:
        chunks[-1].timings = delta.timings
    return chunks


def with_drafted(chunk: Completion, delta: frames.Delta) -> Completion:
    """`chunk` with the spans of its text that came from the draft."""
    if delta.drafted:
        chunk.localspec = Extra(drafted=delta.drafted)
    return chunk


# ------------------------------------------------------------------------ chat


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
                end = ChunkChoice(index, ChatDelta(), self._finish(self.answer.choices[index]))
                deltas = [self.chunk([ChunkChoice(index, self._of(piece))]) for piece in pieces]
                return [*deltas, self.closing([end], event)]
        return ()

    def reading(self, index: int, now: PromptProgress) -> Completion:
        chunk = self.chunk([ChunkChoice(index, ChatDelta(role="assistant", content=None))])
        return self.with_progress(chunk, index, now)

    def _opening(self, index: int) -> Completion:
        chunk = self.chunk([ChunkChoice(index, ChatDelta(role="assistant", content=""))])
        if self.conversation:  # at once: whoever interrupts the answer can still go on with it
            chunk.localspec = Extra(conversation=self.conversation)
        return chunk

    def _deltas(
        self, index: int, event: frames.Delta, pieces: Sequence[Piece]
    ) -> Sequence[Completion]:
        choices = [ChunkChoice(index, self._of(piece)) for piece in pieces]
        if not choices and event.logprobs:
            choices = [ChunkChoice(index, ChatDelta(content=""))]
        if choices:
            choices[0].logprobs = self._logprobs(event.logprobs)
        chunks = [self.chunk([choice]) for choice in choices]
        if len(pieces) == 1 and pieces[0] == Text("content", event.text):
            with_drafted(chunks[0], event)  # its spans count the characters of the whole piece
        return timed(chunks, event)

    def choices(self) -> Choices:
        return [
            ChatChoice(
                index, self._message(each), self._finish(each), self._logprobs(each.logprobs)
            )
            for index, each in enumerate(self.answer.choices)
        ]

    def _finish(self, choice: Choice) -> str:
        finish = choice.finish
        return "function_call" if self._functions and finish == "tool_calls" else finish

    def _of(self, piece: Piece) -> ChatDelta:
        """Return what a chunk adds for a piece."""
        delta = _delta(piece)
        if self._functions and delta.tool_calls:
            delta.function_call = delta.tool_calls[0].function
            delta.tool_calls = UNSET
        return delta

    def _message(self, choice: Choice) -> ChatAnswer:
        message = _message(choice)
        if self._functions and message.tool_calls:
            message.function_call = message.tool_calls[0].function
            message.tool_calls = UNSET
        return message

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


# ------------------------------------------------------------------------ text


class TextShape(OpenAIShape):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"
    echo: Sequence[str] = ()  # the prompts, where answers begin with them
    # How many likeliest tokens stand beside each, where they were asked for: in `logprobs`, and in
    # `prompt_logprobs`.
    tops: int = 0
    prompt_tops: int | None = None
    _prompts_sent: set[int]  # of streams, by choice

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
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
                return timed([*self._prompt(index), chunk], event)
            case frames.Done():
                finish = self.answer.choices[index].finish
                end = self.closing([TextChoice(index, "", finish)], event)
                return [*self._prompt(index), end]
        return ()

    @property
    def _waits_for_scores(self) -> bool:
        return self._scores_echo or self.prompt_tops is not None

    def _prompt(self, index: int) -> Sequence[Completion]:
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
                self._echoed(index) + each.content,
                each.finish,
                self._joined(index),
                self._as_vllm(index),
            )
            for index, each in enumerate(self.answer.choices)
        ]

    def _echoed(self, index: int) -> str:
        return self.echo[self.answer.choices[index].prompt] if self.echo else ""

    def _joined(self, index: int) -> TextLogprobs | None:
        """Return those of a whole answer: of the prompt, where it is echoed, and of the completion."""
        found = self._logprobs(index, self.answer.choices[index].logprobs)
        if found is None or not self._scores_echo:
            return found
        prompt = self._prompt_logprobs(index)
        return TextLogprobs(
            prompt.tokens + found.tokens,
            prompt.token_logprobs + found.token_logprobs,
            prompt.top_logprobs + found.top_logprobs,
            prompt.text_offset + found.text_offset,
        )

    def _logprobs(self, index: int, tokens: list[frames.TokenLogprob]) -> TextLogprobs | None:
        if not self.answer.wants_logprobs:
            return None
        before = len(self._echoed(index))
        return self._listed(tokens, [before + token.offset for token in tokens])

    def _prompt_logprobs(self, index: int) -> TextLogprobs:
        tokens = self.answer.choices[index].prompt_logprobs
        pieces = [token.piece for token in tokens]
        found = self._listed(tokens, prompt_offsets(self._echoed(index), pieces))
        if tokens:
            found.token_logprobs[0] = found.top_logprobs[0] = None
        return found

    def _listed(self, tokens: list[frames.TokenLogprob], offsets: list[int]) -> TextLogprobs:
        top: list[dict[str, float] | None] = [
            {text_of(piece): value for _, piece, value in reversed(token.top[: self.tops])}
            for token in tokens
        ]
        values: list[float | None] = [token.logprob for token in tokens]
        return TextLogprobs([text_of(token.piece) for token in tokens], values, top, offsets)

    def _as_vllm(self, index: int) -> list[dict[str, PromptLogprob] | None] | UnsetType:
        """Return `prompt_logprobs`: by their ids the likeliest tokens and the prompt's own, of each place."""
        most = self.prompt_tops
        if most is None:
            return UNSET
        found: list[dict[str, PromptLogprob] | None] = [None]
        for token in self.answer.choices[index].prompt_logprobs[1:]:
            entry = {
                str(number): PromptLogprob(value, rank, text_of(piece))
                for rank, (number, piece, value) in enumerate(token.top[:most], start=1)
            }
            own = PromptLogprob(token.logprob, token.rank, text_of(token.piece))
            found.append({**entry, str(token.id): own})
        return found


def prompt_offsets(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Return in which character of the echoed `text` each of the prompt's tokens begins.

    What the tokens have before the text is in none of it: a token that the model's file adds at the
    beginning, and the blank that some vocabularies put before the first word.
    """
    joined = b"".join(pieces).decode("utf-8", "replace")
    lead = max(joined.find(text), 0)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, count = [], 0
    for piece in pieces:
        offsets.append(min(max(count - lead, 0), len(text)))
        count += len(decoder.decode(piece))
    return offsets
