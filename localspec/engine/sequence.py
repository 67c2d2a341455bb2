"""A request on its way through the engine: its tokens, its slot, and the text it has shown."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from localspec.chat.reader import AnswerReader, PlainReader
from localspec.chat.rewriting import Rewriting
from localspec.chat.token_report import TokenReport
from localspec.engine.cache.prefixes import Prefix
from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Context, PictureRows, Vocab
from localspec.engine.sampling import sampler
from localspec.engine.sampling.guide import Guide
from localspec.engine.sampling.loops import LoopGuard
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.speculation.drafters.ngram import NgramIndex
from localspec.engine.speculation.step import Drafting, SequenceStep
from localspec.engine.speculation.verification import Verifier
from localspec.engine.statistics import RequestStatistics, list_counts
from localspec.engine.text_stream import Chunk, LineRules, TextStream
from localspec.protocol.frames import (
    ANONYMOUS_CLIENTS,
    PRIVATE,
    Delta,
    Done,
    Generate,
    SentBack,
    TokenLogprob,
)
from localspec.protocol.pieces import Call, Piece, Text, merge_pieces

# After an interrupted pass a prompt is read in short passes for at least this time: somebody who types has
# sent the next request by then.
MIN_SHORT_PASSES_S = 1.0
# How long a prompt may wait in total for passes that begin again with a request that came just after.
MAX_RESTART_WAIT_S = 0.05

# The expected length of an answer in tokens, unless `max_tokens` is smaller.
MAX_EXPECTED_TOKENS = 256


def awaits_suggestion(request: Generate) -> bool:
    """Whether an editor waits for the text of the request. One that only reads its prompt does not."""
    return request.priority == "editor" and request.max_tokens != 0


def expect_answer_tokens(request: Generate) -> int:
    """Return the expected length of an answer."""
    most = request.max_tokens
    return MAX_EXPECTED_TOKENS if most is None else min(most, MAX_EXPECTED_TOKENS)


def saved_conversation(request: Generate) -> str | None:
    """Return the conversation that a request's text belongs to; None if it belongs to none and is not saved.

    A request without a conversation is saved for anyone unless it is private. An editor's is not, because
    its text changes with each key.
    """
    if request.private:
        return request.conversation or PRIVATE
    if not request.cache_prompt or request.priority == "editor":
        return request.conversation
    return request.conversation or ANONYMOUS_CLIENTS


@dataclass(slots=True, eq=False)
class TokenizedRequest:
    """A request whose prompt is tokenized and whose grammar is compiled, ready for a slot."""

    request: Generate
    tokens: list[int]
    sampler: Sampler
    matcher: Guide | None = None
    lookup: NgramIndex = field(default_factory=NgramIndex)
    shown: frozenset[int] = frozenset()  # control tokens whose text belongs to the answer
    tail: str = ""  # the last characters of a chat's prompt
    saved: Prefix | None = None  # the state of its conversation, read from disk
    note: str = ""  # which wishes of the request cannot be met
    reader: AnswerReader | PlainReader | None = None  # None: all of the answer is content
    guard: LoopGuard | None = None  # None: it may repeat itself without an end
    pictures: tuple[PictureRows, ...] = ()
    exact: bool = False  # the exact lane answers it
    slot: Slot | None = None  # the only one that it may use
    sent_back: SentBack | None = None  # how it sends an earlier answer back

    @property
    def n_tokens(self) -> int:
        """The tokens of the prompt, each row of a picture among them, even where rows share a place."""
        shared = sum(len(part.rows) - part.n_places for part in self.pictures)
        return len(self.tokens) + shared


def _make_tally(tokenized: TokenizedRequest, slot: Slot) -> RequestStatistics:
    """Return the counts of a request that has just got its slot."""
    return RequestStatistics(
        len(tokenized.tokens),
        cached=slot.reused,
        moved=slot.moved,
        exact=slot.reused_exact,
        known=slot.known,
        ahead=slot.reused_ahead,
        loss=slot.loss,
        trace=[] if tokenized.request.timings else None,
    )


class Sequence:
    """A request that has had a slot. `tokens` is the text so far: the prompt, then what was generated.

    While the sequence runs, `tokens` is the same list as its slot's. A preempted sequence keeps its tokens
    and its state here, and goes on in another slot. `step` is its part of the present round.
    """

    step: SequenceStep

    def __init__(
        self,
        tokenized: TokenizedRequest,
        slot: Slot,
        vocab: Vocab,
        *,
        room: int,
        drafting: Drafting,
        verifier: Verifier,
    ) -> None:
        """room: the tokens that fit into the context after the prompt."""
        self.request, self.exact = tokenized.request, tokenized.exact
        self.id = tokenized.request.id
        self.slot = slot
        self.tokens = slot.tokens
        self.drafting = drafting
        self.verifier = verifier
        max_tokens = self.request.max_tokens
        self.limit = room if max_tokens is None else min(max_tokens, room)
        # Whether the context ends the answer where nothing else does.
        self._ends_at_context = max_tokens is None or max_tokens > room
        self.n_prompt = len(tokenized.tokens)
        self.n_prompt_tokens = tokenized.n_tokens
        self._pictures = tokenized.pictures
        self.tally = _make_tally(tokenized, slot)
        self.finished, self.finish_reason = False, "stop"
        self.guard = tokenized.guard
        self.must_close_thoughts = False
        self.pieces: list[Piece] = []  # the answer so far, if its next turn may be read ahead
        self.sent_back = tokenized.sent_back
        self._vocab = vocab
        self._stream = TextStream(
            self.request.stop, tokenized.reader, reveals_draft=self.request.reveal_draft
        )
        self._stop_tokens = frozenset(self.request.stop_token_ids)
        self._cut = False  # whether `_within_lines` has ended the text
        self._shown = tokenized.shown
        self._lines = LineRules(self.request.single_line_indent, self.request.max_predict_ms)
        self._rewriting = Rewriting.of(self.request.rewrite)
        self._report = TokenReport()
        self.n_scored = 0  # prompt tokens whose log-probabilities are known
        self._n_bytes = 0  # bytes of the answer so far
        self._ids: list[int] = []  # ids of tokens whose text was not shown yet
        self.number = 0  # its place in the order of first starts
        self.runs_alone = False  # whether it must have every pass to itself
        self.guide_busy = False  # whether it sits rounds out until its grammar has answered
        # Its prompt is read in short passes until then (perf_counter).
        self._short_until = -math.inf
        self._waited_s = 0.0  # time lost to passes that began again
        self.preempted_at = -1  # how many requests had ended in its lane when it was preempted

    @property
    def reads_in_short_passes(self) -> bool:
        """Whether its prompt is read in short passes, because a long one was interrupted."""
        return time.perf_counter() < self._short_until

    def note_interruption(self, seconds: float) -> None:
        """Read the prompt in short passes for a while, after a pass of `seconds` was interrupted.

        They last at least four times as long as the lost pass, so that interruptions again and again cost
        at most a fifth of the time.
        """
        self._short_until = time.perf_counter() + max(4 * seconds, MIN_SHORT_PASSES_S)

    @property
    def may_restart(self) -> bool:
        """Whether a pass that reads its prompt may begin again with a request that comes just after."""
        return self._waited_s < MAX_RESTART_WAIT_S

    def note_restart(self, seconds: float) -> None:
        """Count the time of a pass that had just begun, and begins again with a new request."""
        self._waited_s += seconds

    @property
    def prefill_order(self) -> tuple[bool, bool, int]:
        """The sort key of prompts to read: editors first, then those that generate, then short ones."""
        return self.request.priority != "editor", self.only_read, len(self.slot.unread)

    @property
    def only_read(self) -> bool:
        """Whether nothing is to be generated after the prompt."""
        return self.request.max_tokens == 0

    def begin_round(self) -> None:
        """Note whether the grammar can answer in the round that begins.

        Raises:
            GrammarRejected: The grammar has failed.
        """
        guide = self.verifier.matcher
        self.guide_busy = guide is not None and not guide.begin_round()

    def await_guide(self, seconds: float) -> None:
        """Wait for the grammar, when there is nothing else to do."""
        guide = self.verifier.matcher
        if guide is not None:
            guide.wait(seconds)

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.request.prompt_logprobs is not None and self.n_scored < self.n_prompt

    def wants_logits(self, position: int) -> bool:
        """Whether the logits at this position of the prompt give the next token's log-probability."""
        return self.scoring and position + 1 < self.n_prompt

    def score_prompt(self, context: Context) -> list[TokenLogprob]:
        """Return the log-probabilities of the prompt tokens that the last pass allows to compute.

        The logits of the pass are still valid, and what it has read is not committed yet. Tokens that were
        scored before, and are read again in another slot, are skipped.

        Raises:
            NotFinite: The logits are NaN or infinite.
        """
        n_top, start = self.request.prompt_logprobs, self.slot.n_past
        if n_top is None or not self.scoring:
            return []
        scores: list[TokenLogprob] = []
        if not self.n_scored:
            scores.append(TokenLogprob(self.tokens[0], self._prompt_piece(self.tokens[0]), 0.0))
            self.n_scored = 1
        for offset in range(len(self.step.read)):
            position = start + offset + 1
            if position == self.n_scored < self.n_prompt:
                row = context.finite_logits(self.step.read_row + offset)
                token = self.tokens[position]
                scores.append(sampler.prompt_logprob(row, token, n_top, self._prompt_piece))
                self.n_scored += 1
        return scores

    def _prompt_piece(self, token: int) -> bytes:
        """Return the bytes of a token. In a prompt, control tokens have text, too."""
        return self._vocab.piece(token, special=True)

    @property
    def has_pictures(self) -> bool:
        return bool(self._pictures)

    def picture_at(self, position: int) -> PictureRows:
        """Return what the target reads of the picture at a position."""
        return next(part for part in self._pictures if part.start <= position < part.end)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def prefilling(self) -> bool:
        """Whether text is left to read besides the last token."""
        return len(self.tokens) - self.slot.n_past > 1

    @property
    def reads_ahead(self) -> bool:
        """Whether it reads a next turn, for which nobody waits."""
        return self.request.priority == "ahead"

    @property
    def has_more_prompt(self) -> bool:
        """Whether the prompt goes on behind what is read in this round."""
        return self.prefilling and len(self.step.read) < len(self.slot.unread)

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        return self.limit - self.generated

    def finish(self, reason: str) -> None:
        """End the answer. reason: "stop", "length" or "cancelled"."""
        self.finished, self.finish_reason = True, reason

    def move_to(self, slot: Slot) -> None:
        """Continue in another slot, which holds this text."""
        self.slot = slot
        slot.tokens = self.tokens

    def append(self, tokens: list[int], began_at: float) -> tuple[int, Delta | None]:
        """Append the tokens that a round kept, up to the end of the answer.

        All but the last came from a draft. began_at: when their pass began. Returns how many were appended,
        and the text to show, if any.
        """
        logprobs = self._answer_logprobs(tokens)
        self.tally.observe_tokens(len(tokens), began_at)
        pieces: list[Piece] = []
        count = 0
        for index, token in enumerate(tokens):
            self.tokens.append(token)
            count += 1
            if self.request.return_tokens:
                self._ids.append(token)
            is_end = self._vocab.is_eog(token) or token in self._stop_tokens
            piece = b"" if is_end else self._vocab.piece(token, special=token in self._shown)
            begin, self._n_bytes = self._n_bytes, self._n_bytes + len(piece)
            if logprobs:
                self._report.add(begin, self._n_bytes, logprobs[index])
            if is_end:
                self.finish("stop")
                break
            is_loop = self.guard is not None and self.guard.push(token)
            chunk = self._within_lines(self._stream.push(piece, index < len(tokens) - 1))
            self._report.show(chunk.chars)
            pieces += chunk.pieces
            if self.guard is not None and any(isinstance(piece, Call) for piece in chunk.pieces):
                self.guard.leave_thoughts()
            if self.finished:
                break
            if self._stream.stopped is not None:
                self.finish("stop")
                break
            if is_loop and self._end_loop():
                break
            if self.generated >= self.limit:
                self.finish("length")
                break
        self.tally.produced += count
        self.tally.produced_last = count
        return count, self._delta(merge_pieces(pieces))

    def _end_loop(self) -> bool:
        """End the text, which is in a loop, and return True; or let its thoughts be closed."""
        if self.guard is not None and self.guard.found == "thoughts":
            self.must_close_thoughts = True
            return False
        self.finish("length")
        return True

    @property
    def is_thinking(self) -> bool:
        """Whether its answer is in its thoughts, which can be ended."""
        return self.guard is not None and self.guard.is_thinking

    def close_thoughts(self) -> None:
        """Let the verifier end the thoughts from the next token on."""
        self.must_close_thoughts = False
        guide = self.guard.close_thoughts() if self.guard is not None else None
        if guide is not None:
            self.verifier.restrict(guide)

    def _answer_logprobs(self, tokens: list[int]) -> list[TokenLogprob]:
        """Return the log-probabilities of the tokens just verified, [] if the request wants none."""
        n_top = self.request.top_logprobs
        if n_top is None:
            return []
        piece = self._vocab.piece
        if not self.request.post_sampling:
            rows = zip(self.verifier.rows, tokens, strict=True)
            return [sampler.logprob(row, token, n_top, piece) for row, token in rows]
        distribution = self.verifier.sampler.distribution
        return [
            sampler.drawn_logprob(distribution(row, position), token, n_top, piece)
            for position, (row, token) in enumerate(
                zip(self.verifier.adjusted, tokens, strict=True), start=self.generated
            )
        ]

    def _within_lines(self, chunk: Chunk) -> Chunk:
        """Return `chunk` up to where the line rules, or the rest of a rewritten text, end the answer."""
        is_ruled = self._lines.active or self._rewriting is not None
        for index, piece in enumerate(chunk.pieces if is_ruled else ()):
            if not isinstance(piece, Text):
                continue
            end, reason = self._lines.cut(piece.text, self.tally.since_first_ms()), "length"
            if end is None and self._rewriting is not None and piece.kind == "content":
                end, reason = self._rewriting.push(piece.text), "stop"
            if end is not None:
                self.finish(reason)
                self._cut = True
                return chunk.cut(index, end)
        return chunk

    def _delta(
        self, pieces: list[Piece], *, final: bool = False, is_whole: bool = False
    ) -> Delta | None:
        """Return the next part of the answer, if there is any. is_whole: it is the last, and was not cut.

        While a reader holds text back, an empty part says how far the answer is.
        An evaluation that scores its prompt expects an entry for each token, also for one that ends the
        answer.
        """
        if self.request.read_ahead:
            self.pieces += pieces
        wants_all = self.finish_reason == "length" or self.request.prompt_logprobs is not None
        logprobs = self._report.take(final=final, everything=is_whole and wants_all)
        is_held = self._stream.may_hide and not final
        if not (pieces or logprobs or is_held or (self.finished and self._ids)):
            return None
        ids, self._ids = self._ids, []
        return Delta(
            self.id,
            pieces,
            logprobs,
            self.generated,
            ids,
            self.tally.timings(self.generated) if self.request.timings else None,
        )

    def flush_text(self) -> Delta | None:
        """Return the text that was held back until the answer was over, if any."""
        if self._cut:
            return None
        chunk = self._within_lines(self._stream.flush())
        self._report.show(chunk.chars)
        if self._stream.stopped is not None and self.finish_reason == "length":
            self.finish("stop")
        is_whole = self._stream.stopped is None and not self._cut
        return self._delta(chunk.pieces, final=True, is_whole=is_whole)

    def make_done(self, exact: bool) -> Done:
        """Return the closing frame."""
        tally = self.tally
        rule = "rejection" if self.verifier.reject else "match"
        return Done(
            self.id,
            self.finish_reason,
            self.n_prompt_tokens,
            self.generated,
            tally.timings(self.generated),
            tally.speculation(
                self.generated,
                self.drafting.reason,
                rule if self.drafting.drafters else None,
                exact,
            ),
            self._stream.stopped,
            truncated=self.finish_reason == "length"
            and self._ends_at_context
            and self.remaining <= 0,
            loop=self.guard.found if self.guard is not None else "",
            depths=list_counts(tally.depths),
            accepts=list_counts(tally.accepts),
            trace=tally.trace or [],
            sent_back=self.sent_back,
        )
