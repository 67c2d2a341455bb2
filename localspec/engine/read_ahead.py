"""Read the next turn of a chat while nobody waits, as far as it is certain.

A chat template leaves out the thoughts of earlier turns and writes calls in its own way, so the answer stands
behind other tokens in the next turn than in the cache, and would be read again after the next question has
come. What comes before that question, or before a tool's result, is known as soon as the answer is, if it is
known how the client will send the answer back: `Generate.form` says that, once it was seen. Until then a turn
is read only if it is the same whether the client sends the thoughts back or not. It is read only in the
answer's own slot, so that no other text has to make room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from localspec.engine.cache.prefixes import common_prefix
from localspec.engine.cache.slot import OPENING_TOKENS, Slot
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.protocol.frames import (
    AnswerForm,
    ChatPrompt,
    Frame,
    Generate,
    Message,
    PromptCost,
    SentBack,
)
from localspec.protocol.pieces import Arguments, Call, Piece, Text

# Fewer tokens are not worth the loss of the answer's own state.
MIN_TOKENS = 16
THOUGHTS, CALLS = "reasoning_content", "tool_calls"
END_OF_THOUGHTS = "</think>"


def is_own(frame: Frame) -> bool:
    """Whether a frame belongs to one of the engine's own requests, of which nobody else knows."""
    return getattr(frame, "id", 0) < 0


@dataclass(slots=True, eq=False)
class NextTurn:
    """The beginning of a next turn. text: what the slot holds as long as nothing else has come."""

    request: Generate
    slot: Slot
    text: list[int]
    tokenized: TokenizedRequest | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it can be read now, because its slot is idle and nothing else has come."""
        is_current = self.slot.tokens is self.text
        return self.tokenized is not None and not self.slot.busy and is_current


@dataclass(slots=True, eq=False)
class LastAnswer:
    """The last answer in a slot. read: the tokens that were read ahead behind it, from `start` on."""

    request: Generate
    message: Message
    read: list[int] = field(default_factory=list)
    start: int = 0

    def find_form(self, messages: list[Message]) -> AnswerForm | None:
        """Return how this answer is sent back in a chat; None if that does not go on behind it."""
        assert isinstance(self.request.prompt, ChatPrompt)
        before = self.request.prompt.messages
        count = len(before)
        if len(messages) <= count or messages[count].role != "assistant":
            return None
        form = find_form(self.message, messages[count], self.request.form)
        # A client may have changed its last message, if the answer leaves no doubt.
        n_same = count if form == "other" else count - 1
        return form if messages[:n_same] == before[:n_same] else None


class ReadAhead:
    """The next turns that are still to be read, at most one for each slot."""

    def __init__(self, prepare: Callable[[Generate], None]) -> None:
        """prepare: has a request tokenized, which then comes to `accept`."""
        self._prepare = prepare
        self._turns: dict[int, NextTurn] = {}  # by the slot's id
        self._answers: dict[int, LastAnswer] = {}  # by the slot's id
        self.running: NextTurn | None = None

    def note_answer(self, sequence: Sequence) -> None:
        """Note an answer that has just ended."""
        request, slot = sequence.request, sequence.slot
        if sequence.reads_ahead:
            return
        self._answers.pop(slot.id, None)
        message = read_message(sequence.pieces)
        if message is None or not isinstance(request.prompt, ChatPrompt):
            return
        if CALLS in message.extra and (request.tools is None or request.tools.format.told):
            return  # the daemon writes such calls into the text of the next prompt
        self._answers[slot.id] = LastAnswer(request, message)
        if (turn := make_next_turn(request, message)) is not None:
            self._turns[slot.id] = NextTurn(turn, slot, slot.tokens)
            self._prepare(turn)

    def observe(self, tokenized: TokenizedRequest, cost: PromptCost) -> SentBack | None:
        """Return how a request sends an earlier answer back; None if it goes on behind none."""
        prompt = tokenized.request.prompt
        if not tokenized.request.read_ahead or not isinstance(prompt, ChatPrompt):
            return None
        for slot, answer in self._answers.items():
            if (form := answer.find_form(prompt.messages)) is not None:
                del self._answers[slot]
                if not (read := answer.read):
                    return SentBack(form)
                n_right = common_prefix(read, tokenized.tokens)
                if n_right >= len(read) - OPENING_TOKENS:
                    return SentBack(form, right=True)
                wasted_s = cost.range_seconds(max(n_right, answer.start), len(read))
                return SentBack(form, right=False, wasted_ms=1e3 * wasted_s)
        return None

    def accept(self, tokenized: TokenizedRequest) -> None:
        """Take a request that `prepare` has got. It is dropped if it is obsolete."""
        for turn in self._turns.values():
            if turn.request.id == tokenized.request.id:
                tokenized.slot, turn.tokenized = turn.slot, tokenized

    @property
    def is_due(self) -> bool:
        return any(turn.is_ready for turn in self._turns.values())

    def begin(self, n_free_cells: int) -> TokenizedRequest | None:
        """Return the next request to run; None if none is worth it, or fits into the free cells."""
        turn = next(turn for turn in self._turns.values() if turn.is_ready)
        del self._turns[turn.slot.id]
        tokenized = turn.tokenized
        assert tokenized is not None
        start = common_prefix(turn.slot.cached, tokenized.tokens)
        if not MIN_TOKENS <= len(tokenized.tokens) - start <= n_free_cells:
            return None
        if (answer := self._answers.get(turn.slot.id)) is not None and not answer.read:
            answer.read, answer.start = list(tokenized.tokens), start
        self.running = turn
        return tokenized

    def put_back(self, turn: NextTurn) -> None:
        """Go on later with a turn that was interrupted."""
        turn.text = turn.slot.tokens
        self._turns[turn.slot.id] = turn

    def forget(self, conversation: str | None) -> None:
        """Drop the turns of a conversation, or of all if it is None."""
        for slot, turn in list(self._turns.items()):
            if conversation in (None, turn.request.conversation):
                del self._turns[slot]
        for slot, answer in list(self._answers.items()):
            if conversation in (None, answer.request.conversation):
                del self._answers[slot]


def read_message(pieces: list[Piece]) -> Message | None:
    """Return an answer as a message with its thoughts and calls; None if it has no text and no whole call."""
    texts = {"content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    arguments: list[str] = []
    for piece in pieces:
        match piece:
            case Text():
                texts[piece.kind] += piece.text
            case Call():
                calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name}})
                arguments.append("")
            case Arguments():
                arguments[piece.index] += piece.text
    try:
        for call, text in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return None
    extra: dict[str, Any] = {CALLS: calls} if calls else {}
    if thoughts := texts["reasoning"]:
        extra[THOUGHTS] = thoughts
    return Message("assistant", texts["content"], extra) if calls or texts["content"] else None


def write_message(answer: Message, form: AnswerForm) -> Message:
    """Return an answer as a client of this form sends it back."""
    content, extra = answer.content or "", dict(answer.extra)
    if form == "cut":
        content = content.rpartition(END_OF_THOUGHTS)[2]
    if form not in ("whole", "bare"):
        content = content.strip()
    if not form.startswith("whole"):
        extra.pop(THOUGHTS, None)
    return Message(answer.role, content, extra)


def find_form(answer: Message, sent: Message, known: AnswerForm = "") -> AnswerForm:
    """Return the form in which an answer came back; "" if an answer without thoughts does not say it.

    known: the form in which earlier answers came back.
    """
    forms: list[AnswerForm] = [
        form
        for form in get_args(AnswerForm)[1:-1]
        if all(
            read(write_message(answer, form)) == read(sent)
            for read in (_content, _thoughts, _calls)
        )
    ]
    if not forms:
        return "other"
    if known in forms:
        return known
    is_told = THOUGHTS in answer.extra or "whole" not in forms or known not in ("", "other")
    return forms[0] if is_told else ""


def _content(message: Message) -> str:
    return message.content or ""


def _thoughts(message: Message) -> str:
    return str(message.extra.get(THOUGHTS) or "").strip()


def _calls(message: Message) -> list[Any]:
    return [call["function"] for call in message.extra.get(CALLS) or ()]


def make_next_turn(request: Generate, answer: Message) -> Generate | None:
    """Return a request that reads the next turn of a chat, up to the next question or a call's result.

    None if the prompt and the answer stay as they are in the cache, or if nobody knows what comes.
    """
    prompt, form = request.prompt, request.form
    if not isinstance(prompt, ChatPrompt) or prompt.continued or prompt.answer_prefix:
        return None
    # Behind the calls of this turn the prompt may have thoughts, too, which go with the next question.
    drops = any(THOUGHTS in message.extra for message in (*prompt.messages, answer))
    calls, content = answer.extra.get(CALLS), answer.content
    answer = write_message(answer, form) if form else answer
    if form == "other" or not (drops or calls or answer.content != content):
        return None
    following = (
        Message("tool", "", {"tool_call_id": calls[0]["id"]}) if calls else Message("user", "")
    )
    if calls and not answer.content:
        answer = msgspec.structs.replace(answer, content=None)
    messages = [*prompt.messages, answer, following]
    return Generate(
        -request.id,
        msgspec.structs.replace(prompt, messages=messages, continued="content"),
        max_tokens=0,
        speculative=request.speculative,
        priority="ahead",
        exact=False,
        conversation=request.conversation,
        form=form,
    )
