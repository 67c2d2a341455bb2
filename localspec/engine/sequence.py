"""One running request: its tokens, its place in a slot, what it has shown and what speculation did."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from localspec.engine.cache.prefixes import Prefix
from localspec.engine.cache.slot import Slot
from localspec.engine.llama import Vocab
from localspec.engine.output.lines import LineRules
from localspec.engine.output.text import Chunk, TextStream
from localspec.engine.prompt.grammar import Matcher
from localspec.engine.sampling.sampler import Sampler
from localspec.engine.speculation.depth import Belief, DepthPolicy
from localspec.engine.speculation.drafters.ngram import Lookup
from localspec.protocol.frames import (
    Delta,
    Done,
    Generate,
    Speculation,
    Timings,
    TokenLogprob,
)


@dataclass(slots=True, eq=False)
class TokenizedRequest:
    """A request whose prompt is tokens and whose grammar is compiled: ready for a slot."""

    request: Generate
    tokens: list[int]
    sampler: Sampler
    matcher: Matcher | None = None
    lookup: Lookup = field(default_factory=Lookup)
    shown: frozenset[int] = frozenset()  # control tokens whose text belongs to the answer
    tail: str = ""  # the last characters of a chat's prompt
    saved: Prefix | None = None  # what was saved of its conversation


@dataclass(slots=True)
class Tally:
    """Counts and times of one request. Milliseconds.

    plain_ms: what the same tokens would have cost by plain decoding beside the same company.
    """

    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    produced: int = 0
    produced_timed: int = 0  # of `produced`, already looked at by the accounting
    timed: int = 0  # tokens that came from timed rounds
    rounds: int = 0
    round_ms: float = 0.0
    plain_ms: float = 0.0
    predicted_accepted: int = 0
    predicted_rejected: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    depths: Counter[int] = field(default_factory=Counter)
    accepts: Counter[int] = field(default_factory=Counter)


class Sequence:
    """A request that has had a slot. `tokens` is the text so far: prompt, then what was generated.

    While it runs, its slot's tokens are that very list. It may give its slot up and go on in another:
    what is left of it then is here.
    """

    def __init__(
        self,
        prepared: TokenizedRequest,
        slot: Slot,
        vocab: Vocab,
        *,
        room: int,
        policy: DepthPolicy,
        beliefs: dict[str, Belief],
        reject: bool,
        reason: str | None,
    ) -> None:
        """room: tokens that fit into the context after the prompt."""
        self.request = prepared.request
        self.id = prepared.request.id
        self.slot = slot
        self.tokens = slot.tokens
        self.sampler = prepared.sampler
        self.matcher = prepared.matcher
        self.policy = policy
        self.beliefs = beliefs
        self.lookup = prepared.lookup
        self.chosen_on_device = False  # the pass itself gives the tokens, and no logits
        self.reject = reject  # verify by the rejection rule, not by match
        self.reason = reason  # why no drafts are possible at all
        asked = self.request.max_tokens
        self.limit = room if asked is None else min(asked, room)
        self._cut_short = (
            asked is None or asked > room
        )  # the context ends it where nothing else does
        self.n_prompt = len(prepared.tokens)
        self.tally = Tally(cached=slot.n_past)
        self.finish: str | None = None
        self.plain_since_probe = 0  # tokens written since drafts were last tried or looked at
        self._vocab = vocab
        self._stream = TextStream(prepared.request.stop)
        self._cut = False  # the rules about lines have ended the text
        self._shown = prepared.shown
        self._lines = LineRules(self.request.single_line_indent, self.request.max_predict_ms)
        self._logprobs: list[TokenLogprob] = []
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._last_token = 0.0
        self.number = 0  # its place in the order of first starts
        self.alone = False  # it is to run without company
        self.gave_way = -1  # how many had left its lane when it gave up its slot
        self._matched = 0  # generated tokens the grammar has consumed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def reading(self) -> bool:
        """Is there text left to read besides the last token?"""
        return len(self.tokens) - self.slot.n_past > 1

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - self.generated

    def go_on_in(self, slot: Slot) -> None:
        """Take another slot, which was given this text."""
        self.slot = slot
        slot.tokens = self.tokens

    def wrote(self, count: int, began: float) -> None:
        """A pass that began at `began` (perf_counter) has just brought so many tokens, or 0: none."""
        now = self._last_token = time.perf_counter()
        if self._first_token is None:
            # The first of several tokens of a pass has come when its share of the pass was over.
            self._first_token = now - (now - began) * (1 - 1 / max(count, 1))

    def no_draft_model(self, reason: str) -> None:
        """The draft model cannot serve this request any more."""
        self.beliefs.pop("draft", None)
        self.reason = reason

    def keep(
        self, tokens: list[int], drafted: int, logprobs: list[TokenLogprob], began: float
    ) -> tuple[int, Delta | None]:
        """Append what a round kept, up to the end of the answer; `drafted` of them came from a draft.

        began: when their pass did. Returns how many were kept and the text to show, if any.
        """
        self.wrote(len(tokens), began)
        text = ""
        spans: list[tuple[int, int]] = []
        count = 0
        for at, token in enumerate(tokens):
            self.tokens.append(token)
            count += 1
            if self._vocab.is_eog(token):
                self.finish = "stop"
                break
            piece = self._vocab.piece(token, special=token in self._shown)
            chunk = self._within_lines(self._stream.push(piece, at < drafted))
            spans += [(a + len(text), b + len(text)) for a, b in chunk.drafted]
            text += chunk.text
            if logprobs:
                self._logprobs.append(logprobs[at])
            if self.finish is not None:
                break
            if self._stream.stopped is not None:
                self.finish = "stop"
                break
            if self.generated >= self.limit:
                self.finish = "length"
                break
        return count, self._delta(text, spans)

    def _within_lines(self, chunk: Chunk) -> Chunk:
        """The part of `chunk` before the rules about lines end the answer."""
        if not self._lines.active or not chunk.text:
            return chunk
        spent = time.perf_counter() - (self._first_token or self._started)
        end = self._lines.cut(chunk.text, spent * 1e3)
        if end is None:
            return chunk
        self.finish, self._cut = "length", True
        spans = [(a, min(b, end)) for a, b in chunk.drafted if a < end]
        return Chunk(chunk.text[:end], spans)

    def _delta(self, text: str, spans: list[tuple[int, int]]) -> Delta | None:
        if not text:
            return None
        logprobs, self._logprobs = self._logprobs, []
        return Delta(
            self.id,
            text,
            logprobs,
            spans if self.request.reveal_draft else [],
            self.generated,
        )

    def last_text(self) -> Delta | None:
        """What was held back, once the answer is over."""
        if self._cut:
            return None
        chunk = self._within_lines(self._stream.flush())
        if self._stream.stopped is not None and self.finish == "length":
            self.finish = "stop"
        return self._delta(chunk.text, chunk.drafted)

    def consume(self, kept: list[int]) -> None:
        """Tell the grammar of tokens kept in this round that it has not seen."""
        if self.matcher is None:
            return
        for token in kept[self._matched :]:
            self.matcher.consume(token)
        self._matched = len(kept)

    def take_back(self) -> None:
        """This round is not kept: the grammar is where it was before."""
        if self.matcher is not None and self._matched:
            self.matcher.take_back(self._matched)
        self._matched = 0

    def round_over(self) -> None:
        self._matched = 0

    def done(self, verification: str | None, exact: bool) -> Done:
        """The closing frame: timings in llama-server's names, and what speculation did."""
        now = time.perf_counter()
        first = self._first_token or now
        prompt_ms = (first - self._started) * 1e3
        # As llama-server counts: from the first token to the last, which is one token less.
        predicted_ms = max(self._last_token - first, 0.0) * 1e3
        steps = max(self.generated - 1, 0) if predicted_ms > 0 else 0
        tally = self.tally
        read = self.n_prompt - tally.cached
        timings = Timings(
            cache_n=tally.cached,
            prompt_n=read,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / max(read, 1),
            prompt_per_second=1e3 * read / max(prompt_ms, 1e-6),
            predicted_n=self.generated,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / steps if steps else 0.0,
            predicted_per_second=1e3 * steps / predicted_ms if steps else 0.0,
            draft_n=tally.drafted,
            draft_n_accepted=tally.accepted,
        )
        return Done(
            self.id,
            self.finish or "stop",
            self.n_prompt,
            self.generated,
            timings,
            self._speculation(verification, exact),
            self._stream.stopped,
            truncated=self.finish == "length" and self._cut_short and self.left <= 0,
            depths=_listed(tally.depths),
            accepts=_listed(tally.accepts),
        )

    def _speculation(self, verification: str | None, exact: bool) -> Speculation:
        tally = self.tally
        active = tally.drafted > 0
        kind = max(tally.kinds, key=lambda k: tally.kinds[k]) if tally.kinds else None
        reason = self.reason
        if not active and reason is None:
            short = self.generated <= 2
            reason = "the answer was too short" if short else "drafts would not have paid"
        measured = tally.rounds > 0 and tally.plain_ms > 0 and tally.round_ms > 0
        return Speculation(
            active=active,
            kind=kind,
            reason=None if active else reason,
            drafted=tally.drafted,
            accepted=tally.accepted,
            rounds=tally.rounds,
            mean_tokens_per_pass=tally.timed / tally.rounds if tally.rounds else 0.0,
            plain_tokens_per_second=1e3 * tally.timed / tally.plain_ms if measured else None,
            speed_up=tally.plain_ms / tally.round_ms if measured else None,
            verification=verification,
            exact=exact,
            predicted_accepted=tally.predicted_accepted,
            predicted_rejected=tally.predicted_rejected,
        )


def _listed(counts: Counter[int]) -> list[int]:
    """Counts of 0, 1, … up to the largest there is."""
    return [counts[at] for at in range(max(counts, default=-1) + 1)]
