"""Compile the grammars of requests with llguidance, and cache them.

A compiled grammar yields token masks for the target and forced tokens, which are drafts at no cost.
llama.cpp's grammar parser never sees a user's text, because it ends the process on bad input. llguidance
returns errors, its limits bound the cost of one step, and `process` bounds the cost of compiling.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import msgspec
from llguidance import LLMatcher, LLTokenizer

from localspec.chat.markers import MESSAGE_START
from localspec.engine.llama import Vocab
from localspec.engine.sampling.grammars.gates import (
    Gate,
    GatedMatcher,
    GatePlan,
    PieceIndex,
    Surroundings,
)
from localspec.engine.sampling.grammars.matcher import BoundedNumbers, Numerals, WholeMatcher
from localspec.engine.sampling.grammars.process import GrammarProcess, TooComplex
from localspec.engine.sampling.grammars.sources import (
    NAMES,
    GateSource,
    GrammarJob,
    GrammarSources,
    GrammarTokens,
    build_sources,
    compile_source,
    is_json,
)
from localspec.engine.sampling.guide import Guide
from localspec.errors import GrammarRejected
from localspec.protocol.calls import CallFormat
from localspec.protocol.frames import ChatPrompt, Constraint, Generate

CACHED_GRAMMARS = 8  # Compiled grammars kept, since an agent sends the same tools with every turn.
CACHED_REFUSALS = 256  # Rejected grammars kept, so that a slow one costs its time only once.

# Called now and then while a grammar compiles. Returns whether the client has disconnected.
IsCancelled = Callable[[], bool]
NEVER_CANCELLED: IsCancelled = lambda: False  # noqa: E731


@dataclass(frozen=True)
class Compiled:
    """The compiled grammars of an answer, to be copied for each use. Either `whole` or `plan` is set."""

    whole: LLMatcher | None
    plan: GatePlan | None
    note: str


class Grammars:
    """A compiler of grammars for one vocabulary, with a cache. Any thread may use it.

    isolated: compile first in a separate process, where a hostile grammar can be stopped.
    """

    def __init__(self, vocab: Vocab, *, isolated: bool = False) -> None:
        self._vocab = vocab
        self._process = GrammarProcess(self._vocabulary) if isolated else None
        self._lock = threading.RLock()
        self._compiled: OrderedDict[bytes, Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, GrammarRejected] = OrderedDict()
        self._ended: set[bytes] = set()  # Jobs whose process ended once before they were done.

    def close(self) -> None:
        """End the compiling process."""
        if self._process is not None:
            self._process.close()

    def _vocabulary(self) -> GrammarTokens:
        vocab = self._vocab
        ids = {
            vocab.piece(token, special=True).decode("utf-8", "replace"): token
            for token in vocab.special_tokens
        }
        unusable = sorted(vocab.without_text.union(vocab.ends))
        return GrammarTokens(ids, list(vocab.ends), vocab.size, vocab.bracketed, unusable)

    @cached_property
    def _special(self) -> GrammarTokens:
        return self._vocabulary()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Return llguidance's view of the vocabulary. Building it once takes about 10 µs per token."""
        tokenizer: LLTokenizer = self._vocab.guidance_tokenizer()
        return tokenizer

    @cached_property
    def _texts(self) -> list[bytes]:
        return [self._vocab.piece(token, special=False) for token in range(self._vocab.size)]

    @cached_property
    def _numerals(self) -> Numerals:
        return Numerals(self._texts)

    @cached_property
    def _pieces(self) -> PieceIndex:
        # A marker may consist of control tokens, and one may begin with the rest of a marker.
        marking = frozenset(self._vocab.special_tokens).difference(self._vocab.ends)
        texts = [
            self._vocab.piece(token, special=True) if token in marking else text
            for token, text in enumerate(self._texts)
        ]
        return PieceIndex(texts, self._special)

    def job(
        self, request: Generate, tail: str, form: CallFormat | None = None
    ) -> tuple[GrammarJob | None, str]:
        """Return the grammars to compile for a request, or None, and a note for the user.

        tail: the end of the prompt, which may have opened thoughts. form: how the model of a chat writes
        calls.
        """
        tools, constraint = request.tools, request.constraint
        note = ""
        if tools is not None and tools.format.guessed and not tools.required:
            tools, note = None, _UNKNOWN_NOTATION
        if tools is None and constraint is None:
            return None, note
        in_message = form is not None and form.answer and tail.rstrip().endswith(MESSAGE_START)
        messages = form if in_message and constraint is not None else None
        gated = tools is not None or messages is not None or bool(_closing_marker(request, tail))
        # The job does not depend on the beginning of the answer, so that equal grammars share a cache entry.
        if constraint is not None:
            constraint = msgspec.structs.replace(constraint, begun="")
        thoughts = request.thoughts if gated else []
        return GrammarJob(tools, constraint, thoughts, gated, messages), note

    def ready(self, job: GrammarJob | None) -> bool:
        """Return whether a job needs no compiling, because it was compiled or rejected before."""
        if job is None or self._process is None:
            return True
        key = msgspec.msgpack.encode(job)
        with self._lock:
            return key in self._compiled or key in self._refused

    def answer(
        self,
        request: Generate,
        tail: str,
        shown: frozenset[int],
        is_cancelled: IsCancelled = NEVER_CANCELLED,
        form: CallFormat | None = None,
    ) -> tuple[Guide | None, str]:
        """Return the guide of a request's answer, or None without constraints, and a note for the user.

        tail: the end of the prompt, which may have opened the thoughts. shown: control tokens whose text
        belongs to the answer. form: as in `job`.

        Raises:
            GrammarRejected: the grammar is invalid, too large or too slow; a strict tool schema cannot be
                enforced; or the given beginning of the answer does not fit the grammar.
            Cancelled: `is_cancelled` returned True.
        """
        job, note = self.job(request, tail, form)
        if job is None:
            return None, note
        compiled = self._compile(job, is_cancelled)
        note = " ".join(filter(None, [compiled.note, note]))
        if compiled.plan is not None:
            return self._match_gated(compiled.plan, request, tail, shown), note
        assert request.constraint is not None
        return self._match_whole(compiled, request.constraint), note

    def compile(self, constraint: Constraint) -> WholeMatcher:
        """Return a new matcher for an answer that follows `constraint` from its first token on.

        Raises:
            GrammarRejected: for the same reasons as in `answer`.
        """
        job = GrammarJob(constraint=msgspec.structs.replace(constraint, begun=""))
        return self._match_whole(self._compile(job, NEVER_CANCELLED), constraint)

    def _match_whole(self, compiled: Compiled, constraint: Constraint) -> WholeMatcher:
        """Return a matcher that applies one grammar to the whole answer."""
        assert compiled.whole is not None
        matcher = compiled.whole.deep_copy()
        prefix_tokens = self._tokenizer.greedy_tokenize(constraint.begun)
        if matcher.try_consume_tokens(prefix_tokens) < len(prefix_tokens):
            raise GrammarRejected(
                f"The answer to be continued does not fit the {NAMES[constraint.kind]}; leave "
                "that out, or ask again.",
                param=constraint.param,
            )
        guide = WholeMatcher(matcher, self._vocab.size)
        if not is_json(constraint, None):
            return guide
        return BoundedNumbers(guide, self._numerals, constraint.begun.encode("utf-8", "replace"))

    def _match_gated(
        self, plan: GatePlan, request: Generate, tail: str, shown: frozenset[int]
    ) -> GatedMatcher:
        """Return a matcher that applies the grammars of `plan` from their markers on."""
        vocab = self._vocab
        surroundings = Surroundings(
            self._pieces,
            lambda token: vocab.piece(token, special=token in shown),
            vocab.size,
            vocab.ends,
            self._numerals if is_json(request.constraint, request.tools) else None,
        )
        close = _closing_marker(request, tail).encode()
        matcher = GatedMatcher(plan, surroundings, close, tail.encode("utf-8", "replace"))
        prefix = request.prompt.answer_prefix if isinstance(request.prompt, ChatPrompt) else ""
        if request.constraint is not None:
            prefix = request.constraint.begun
        for token in self._pieces.spell(prefix.encode("utf-8", "replace")):
            if matcher.count_valid([token]) < 1:
                raise GrammarRejected(
                    "The answer to be continued does not fit what is asked of it; leave that out, "
                    "or ask again."
                )
            matcher.consume(token)
        return matcher

    def _compile(self, job: GrammarJob, is_cancelled: IsCancelled) -> Compiled:
        """Return the compiled grammars of a job, from the cache if they are there."""
        key = msgspec.msgpack.encode(job)
        with self._lock:
            if (refusal := self._refused.get(key)) is not None:
                raise GrammarRejected(refusal.message, param=refusal.param)
            if (compiled := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return compiled
        try:
            compiled = self._instantiate(job, self._sources(job, is_cancelled))
        except GrammarRejected as error:
            with self._lock:
                # The system may have ended the process for another reason, so only a second time counts.
                if isinstance(error, TooComplex) and key not in self._ended:
                    if len(self._ended) >= CACHED_REFUSALS:
                        self._ended.clear()
                    self._ended.add(key)
                    raise
                self._refused[key] = error
                while len(self._refused) > CACHED_REFUSALS:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _sources(self, job: GrammarJob, is_cancelled: IsCancelled) -> GrammarSources:
        if self._process is not None:
            return self._process.build(job, is_cancelled)
        return build_sources(job, self._special, self._tokenizer)

    def _instantiate(self, job: GrammarJob, sources: GrammarSources) -> Compiled:
        """Compile the sources in this process, after the child has shown that they are usable."""
        with self._lock:  # Two threads must not build the vocabulary's views twice.
            pieces, tokenizer = self._pieces, self._tokenizer

        def matcher(source: str | None) -> LLMatcher | None:
            if source is None:
                return None
            return compile_source(tokenizer, source, "grammar", job.param)

        def gate(source: GateSource) -> Gate:
            grammar = compile_source(tokenizer, source.source, "grammar", job.param)
            marker = source.marker.encode()
            containing = pieces.where(lambda piece: marker in piece)
            wrong = [token for token in containing if grammar.validate_tokens([token]) < 1]
            return Gate(marker, grammar, wrong, source.last)

        if sources.whole is not None:
            return Compiled(matcher(sources.whole), None, sources.note)
        braces = []
        if sources.gates or sources.bare:
            braces = pieces.where(lambda piece: piece.lstrip().startswith(b"{"))
        plan = GatePlan(
            [(opening.encode(), close.encode()) for opening, close in job.thoughts],
            first=matcher(sources.first),
            may_think=sources.may_think,
            after={source.marker.encode(): gate(source) for source in sources.after},
            gates=[gate(source) for source in sources.gates],
            bare=matcher(sources.bare),
            braces=braces,
            single=sources.single,
        )
        return Compiled(None, plan, sources.note)


_UNKNOWN_NOTATION = (
    "How this model writes calls is not known from its template, so they are not constrained."
)


def _closing_marker(request: Generate, tail: str) -> str:
    """Return the closing marker of the thoughts that the prompt has opened, or ""."""
    tail = tail.rstrip()
    for opening, closing in request.thoughts:
        if tail.endswith(opening.rstrip()):
            return closing
    return ""
