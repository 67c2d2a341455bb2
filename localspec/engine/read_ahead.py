"""Read the next turn of a chat while nobody waits, as far as it is certain.

A chat template leaves out the thoughts of earlier turns, so the answer stands behind other tokens in the next
turn than in the cache, and would be read again after the next question has come. What comes before that
question is known as soon as the answer is. It is read only if it is the same whether the client sends the
thoughts back or not, and only in the answer's own slot, so that no other text has to make room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from localspec.engine.cache.prefixes import common_prefix
from localspec.engine.cache.slot import Slot
from localspec.engine.sequence import Sequence, TokenizedRequest
from localspec.protocol.frames import ChatPrompt, Frame, Generate, Message
from localspec.protocol.pieces import Piece, Text

# Fewer tokens are not worth the loss of the answer's own state.
MIN_TOKENS = 16
THOUGHTS = "reasoning_content"


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


class ReadAhead:
    """The next turns that are still to be read, at most one for each slot."""

    def __init__(self, prepare: Callable[[Generate], None]) -> None:
        """prepare: has a request tokenized, which then comes to `accept`."""
        self._prepare = prepare
        self._turns: dict[int, NextTurn] = {}  # by the slot's id
        self.running: NextTurn | None = None

    def note_answer(self, sequence: Sequence) -> None:
        """Note an answer that has just ended."""
        if (request := make_next_turn(sequence.request, sequence.pieces)) is not None:
            self._turns[sequence.slot.id] = NextTurn(request, sequence.slot, sequence.slot.tokens)
            self._prepare(request)

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
        n_unread = len(tokenized.tokens) - common_prefix(turn.slot.cached, tokenized.tokens)
        if not MIN_TOKENS <= n_unread <= n_free_cells:
            return None
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


def make_next_turn(request: Generate, pieces: list[Piece]) -> Generate | None:
    """Return a request that reads the next turn of a chat, up to the next question.

    None if the prompt and the answer stay as they are in the cache.
    """
    prompt, texts = request.prompt, [piece for piece in pieces if isinstance(piece, Text)]
    thoughts = "".join(piece.text for piece in texts if piece.kind == "reasoning")
    content = "".join(piece.text for piece in texts if piece.kind == "content")
    if not isinstance(prompt, ChatPrompt) or prompt.continued or prompt.answer_prefix:
        return None
    # Behind the calls of this turn the prompt may have thoughts, too, which go with the next question.
    drops = thoughts or any(THOUGHTS in message.extra for message in prompt.messages)
    if not drops or not content or len(texts) < len(pieces):
        return None
    answer = Message("assistant", content, {THOUGHTS: thoughts} if thoughts else {})
    messages = [*prompt.messages, answer, Message("user", "")]
    return Generate(
        -request.id,
        msgspec.structs.replace(prompt, messages=messages, continued="content"),
        max_tokens=0,
        speculative=request.speculative,
        priority="ahead",
        exact=False,
        conversation=request.conversation,
    )
