"""One request on its way through the engine: its tokens, its place in a slot, and what it has shown."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from localspec.engine.cache.prefixes import Prefix
from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Context, Vocab
from localspec.engine.output import Chunk, LineRules, TextStream, TokenReport
from localspec.engine.sampling import sampler
from localspec.engine.sampling.guide import Guide
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.speculation.drafters.ngram import NgramIndex
from localspec.engine.speculation.step import Drafting, SequenceStep
from localspec.engine.speculation.verification import Verifier
from localspec.engine.statistics import Tally, listed
from localspec.protocol.frames import ANYONE, Delta, Done, Generate, TokenLogprob
from localspec.protocol.visibility import Regions

SHORT_S = 1.0  # who types has asked again by then
PATIENCE_S = 0.05  # that a prompt waits, all in all, for others that come with it


def suggests(request: Generate) -> bool:
    """Does an editor wait for its text? A prompt that is only to be read keeps nobody waiting."""
    return request.priority == "editor" and request.max_tokens != 0


def owner(request: Generate) -> str | None:
    """Whose text is saved: a conversation's, or that of anyone who does not mind; an editor's changes
    with each key.
    """
    if request.private or not request.cache_prompt or request.priority == "editor":
        return request.conversation
    return request.conversation or ANYONE


@dataclass(slots=True, eq=False)
class TokenizedRequest:
    """A request whose prompt is tokens and whose grammar is compiled: ready for a slot."""

    request: Generate
    tokens: list[int]
    sampler: Sampler
    matcher: Guide | None = None
    lookup: NgramIndex = field(default_factory=NgramIndex)
    shown: frozenset[int] = frozenset()  # control tokens whose text belongs to the answer
    tail: str = ""  # the last characters of a chat's prompt
    saved: Prefix | None = None  # what was saved of its conversation
    note: str = ""  # what of the request cannot be had
    regions: Regions | None = None  # where stop strings hold; None: in all of the text


class Sequence:
    """A request that has had a slot. `tokens` is the text so far: prompt, then what was generated.

    While it runs, its slot's tokens are that very list. It may give its slot up and go on in another:
    what is left of it then is here. `step` is its part of the present round.
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
        """room: tokens that fit into the context after the prompt."""
        self.request = tokenized.request
        self.id = tokenized.request.id
        self.slot = slot
        self.tokens = slot.tokens
        self.drafting = drafting
        self.verifier = verifier
        asked = self.request.max_tokens
        self.limit = room if asked is None else min(asked, room)
        # Does the context end it where nothing else does?
        self._cut_short = asked is None or asked > room
        self.n_prompt = len(tokenized.tokens)
        self.tally = Tally(
            self.n_prompt, cached=slot.reused, moved=slot.moved, exact=slot.reused_exact
        )
        self.tally.trace = [] if tokenized.request.timings else None
        self.finished = False
        self.finish_reason = "stop"
        self._vocab = vocab
        self._stream = TextStream(self.request.stop, tokenized.regions)
        self._stop_tokens = frozenset(self.request.stop_token_ids)
        self._cut = False  # the rules about lines have ended the text
        self._shown = tokenized.shown
        self._lines = LineRules(self.request.single_line_indent, self.request.max_predict_ms)
        self._report = TokenReport(all_tokens=self.request.prompt_logprobs is not None)
        self.n_scored = 0  # tokens of the prompt whose log-probabilities are known
        self._n_bytes = 0  # of the tokens so far
        self._ids: list[int] = []  # of tokens whose text was not shown yet
        self.number = 0  # its place in the order of first starts
        self.alone = False  # it is to run without company
        self.guide_busy = False  # it sits rounds out until its grammar has answered
        self._short_until = -math.inf  # it is read in short passes (perf_counter)
        self._waited_s = 0.0  # for passes that began once more
        self.gave_way = -1  # how many had left its lane when it gave up its slot

    @property
    def yields(self) -> bool:
        """Is it read in short passes, after a long one that was ended for one that came?"""
        return time.perf_counter() < self._short_until

    def has_lost(self, seconds: float) -> None:
        """A pass was ended, after so long, for one that came: short ones for at least four times as long.

        So whoever comes again and again costs it a fifth of its time at most.
        """
        self._short_until = time.perf_counter() + max(4 * seconds, SHORT_S)

    @property
    def patient(self) -> bool:
        """May a pass that reads it begin once more for one that comes?"""
        return self._waited_s < PATIENCE_S

    def has_waited(self, seconds: float) -> None:
        """A pass had just begun, and begins once more with one that came."""
        self._waited_s += seconds

    @property
    def turn(self) -> tuple[bool, bool, int]:
        """When its prompt is read among several: an editor's first, of them one that is only to be read last,
        then the short ones.
        """
        return self.request.priority != "editor", self.only_read, len(self.slot.unread)

    @property
    def only_read(self) -> bool:
        """Is nothing to be written after its prompt?"""
        return self.request.max_tokens == 0

    def begin_round(self) -> None:
        """Note whether its grammar can answer in the round that begins.

        Raises:
            GrammarRejected: the grammar has failed.
        """
        guide = self.verifier.matcher
        self.guide_busy = guide is not None and not guide.begin_round()

    def await_guide(self, seconds: float) -> None:
        """Wait for its grammar, where nothing else is to be done."""
        guide = self.verifier.matcher
        if guide is not None:
            guide.wait(seconds)

    @property
    def scoring(self) -> bool:
        """Are log-probabilities of its prompt still to be computed?"""
        return self.request.prompt_logprobs is not None and self.n_scored < self.n_prompt

    def wants_logits(self, position: int) -> bool:
        """Does a token of the prompt at this position say what the next one's log-probability is?"""
        return self.scoring and position + 1 < self.n_prompt

    def score_prompt(self, context: Context) -> list[TokenLogprob]:
        """Return the log-probabilities of those tokens of the prompt that the last pass has told.

        The pass's logits are still there, and what it has read is not committed yet. What was scored
        before, and is read once more in another slot, is passed over.

        Raises:
            NotFinite: the logits are no numbers.
        """
        most, start = self.request.prompt_logprobs, self.slot.n_past
        if most is None or not self.scoring:
            return []
        found: list[TokenLogprob] = []
        if not self.n_scored:
            found.append(TokenLogprob(self.tokens[0], self._prompt_piece(self.tokens[0]), 0.0))
            self.n_scored = 1
        for at in range(len(self.step.read)):
            place = start + at + 1
            if place == self.n_scored < self.n_prompt:
                row = context.finite(self.step.read_row + at)
                token = self.tokens[place]
                found.append(sampler.prompt_logprob(row, token, most, self._prompt_piece))
                self.n_scored += 1
        return found

    def _prompt_piece(self, token: int) -> bytes:
        """Return a token's bytes; in a prompt control tokens have text, too."""
        return self._vocab.piece(token, special=True)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def prefilling(self) -> bool:
        """Is there text left to read besides the last token?"""
        return len(self.tokens) - self.slot.n_past > 1

    @property
    def reads_on(self) -> bool:
        """Is there more of its prompt than it reads in this round?"""
        return self.prefilling and len(self.step.read) < len(self.slot.unread)

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - self.generated

    def finish(self, reason: str) -> None:
        """Nothing more is generated: "stop", "length", "cancelled"."""
        self.finished, self.finish_reason = True, reason

    def go_on_in(self, slot: Slot) -> None:
        """Take another slot, which was given this text."""
        self.slot = slot
        slot.tokens = self.tokens

    def append(self, tokens: list[int], began: float) -> tuple[int, Delta | None]:
        """Append what a round kept, up to the end of the answer; all but the last came from a draft.

        began: when their pass did. Returns how many were kept and the text to show, if any.
        """
        logprobs = self._scored(tokens)
        self.tally.wrote(len(tokens), began)
        text = ""
        spans: list[tuple[int, int]] = []
        count = 0
        for at, token in enumerate(tokens):
            self.tokens.append(token)
            count += 1
            if self.request.return_tokens:
                self._ids.append(token)
            if logprobs:
                self._report.add(self._n_bytes, logprobs[at])
            if self._vocab.is_eog(token) or token in self._stop_tokens:
                self.finish("stop")
                break
            piece = self._vocab.piece(token, special=token in self._shown)
            self._n_bytes += len(piece)
            chunk = self._within_lines(self._stream.push(piece, at < len(tokens) - 1))
            self._report.show(chunk.ends)
            spans += [(a + len(text), b + len(text)) for a, b in chunk.drafted]
            text += chunk.text
            if self.finished:
                break
            if self._stream.stopped is not None:
                self.finish("stop")
                break
            if self.generated >= self.limit:
                self.finish("length")
                break
        self.tally.produced += count
        return count, self._delta(text, spans)

    def _scored(self, tokens: list[int]) -> list[TokenLogprob]:
        """Log-probabilities of the tokens just verified, where they were asked for."""
        most = self.request.top_logprobs
        if most is None:
            return []
        piece = self._vocab.piece
        if not self.request.post_sampling:
            rows = zip(self.verifier.rows, tokens, strict=True)
            return [sampler.logprob(row, token, most, piece) for row, token in rows]
        drawn = self.verifier.sampler.distribution
        return [
            sampler.drawn_logprob(drawn(row, place), token, most, piece)
            for place, (row, token) in enumerate(
                zip(self.verifier.adjusted, tokens, strict=True), start=self.generated
            )
        ]

    def _within_lines(self, chunk: Chunk) -> Chunk:
        """The part of `chunk` before the rules about lines end the answer."""
        if not self._lines.active or not chunk.text:
            return chunk
        end = self._lines.cut(chunk.text, self.tally.since_first_ms())
        if end is None:
            return chunk
        self.finish("length")
        self._cut = True
        return chunk.cut(end)

    def _delta(
        self, text: str, spans: list[tuple[int, int]], *, complete: bool = False
    ) -> Delta | None:
        """Return the next part of the answer, if there is any. complete: its text ends, and was not cut."""
        logprobs = self._report.take(complete=complete)
        if not text and not logprobs and not (self.finished and self._ids):
            return None
        ids, self._ids = self._ids, []
        return Delta(
            self.id,
            text,
            logprobs,
            spans if self.request.reveal_draft else [],
            self.generated,
            ids,
            self.tally.timings(self.generated) if self.request.timings else None,
        )

    def last_text(self) -> Delta | None:
        """What was held back, once the answer is over."""
        if self._cut:
            return None
        chunk = self._within_lines(self._stream.flush())
        self._report.show(chunk.ends)
        if self._stream.stopped is not None and self.finish_reason == "length":
            self.finish("stop")
        complete = self._stream.stopped is None and not self._cut
        return self._delta(chunk.text, chunk.drafted, complete=complete)

    def done(self, exact: bool) -> Done:
        """The closing frame."""
        tally = self.tally
        rule = "rejection" if self.verifier.reject else "match"
        return Done(
            self.id,
            self.finish_reason,
            self.n_prompt,
            self.generated,
            tally.timings(self.generated),
            tally.speculation(
                self.generated,
                self.drafting.reason,
                rule if self.drafting.drafters else None,
                exact,
            ),
            self._stream.stopped,
            truncated=self.finish_reason == "length" and self._cut_short and self.left <= 0,
            depths=listed(tally.depths),
            accepts=listed(tally.accepts),
            trace=tally.trace or [],
        )
