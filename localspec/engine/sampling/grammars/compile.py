"""Structured output through llguidance: token masks for the target, forced tokens as free drafts.

llama.cpp's own grammar parser is never given a user's text: it ends the process on bad input. llguidance
returns errors, its limits bound what one step may cost, and `process` bounds what compiling may.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import msgspec
from llguidance import LLMatcher, LLTokenizer

from localspec.engine.llama import Vocab
from localspec.engine.sampling.grammars.child import LIMITS, Vocabulary
from localspec.engine.sampling.grammars.gates import (
    Gate,
    GatedMatcher,
    Pieces,
    Plan,
    Surroundings,
)
from localspec.engine.sampling.grammars.matcher import WholeMatcher, reason
from localspec.engine.sampling.grammars.numbers import BoundedNumbers, Numerals
from localspec.engine.sampling.grammars.process import GrammarProcess, TooComplex
from localspec.engine.sampling.grammars.sources import (
    NAMES,
    GateSource,
    GrammarJob,
    GrammarSources,
    SpecialTokens,
    build_sources,
    is_json,
)
from localspec.engine.sampling.guide import Guide
from localspec.errors import GrammarRejected
from localspec.protocol.frames import ChatPrompt, Constraint, Generate

CACHED_GRAMMARS = 8  # compiled ones: an agent sends the same tools with every turn
CACHED_REFUSALS = 256  # of grammars that took too long, so that each does so once

# Asked now and then while a grammar compiles: whether nobody waits for it any more.
Left = Callable[[], bool]
NOBODY_LEFT: Left = lambda: False  # noqa: E731


@dataclass(frozen=True)
class Compiled:
    """The grammars of an answer, ready to be copied. One of the two is there."""

    whole: LLMatcher | None
    plan: Plan | None
    note: str


class Grammars:
    """Compiles the grammars of answers for one vocabulary. Any thread may ask.

    isolated: compile in a process of its own first, where a hostile grammar can be stopped.
    """

    def __init__(self, vocab: Vocab, *, isolated: bool = False) -> None:
        self._vocab = vocab
        self._process = GrammarProcess(self._vocabulary) if isolated else None
        self._lock = threading.RLock()
        self._compiled: OrderedDict[bytes, Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, GrammarRejected] = OrderedDict()
        self._ended: set[bytes] = set()  # jobs whose process has ended once before they were done

    def close(self) -> None:
        """End the process that compiles."""
        if self._process is not None:
            self._process.close()

    @cached_property
    def _special(self) -> SpecialTokens:
        return self._vocabulary().special()

    def _vocabulary(self) -> Vocabulary:
        vocab = self._vocab
        ids = {
            vocab.piece(token, special=True).decode("utf-8", "replace"): token
            for token in vocab.special_tokens
        }
        unusable = sorted(vocab.without_text.union(vocab.ends))
        return Vocabulary(vocab.size, ids, list(vocab.ends), vocab.bracketed, unusable)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """llguidance's view of the vocabulary. Building it takes about 10 µs per token, once."""
        tokenizer: LLTokenizer = self._vocab.guidance_tokenizer()
        return tokenizer

    @cached_property
    def _texts(self) -> list[bytes]:
        return [self._vocab.piece(token, special=False) for token in range(self._vocab.size)]

    @cached_property
    def _numerals(self) -> Numerals:
        return Numerals(self._texts)

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self._texts, self._special)

    # ------------------------------------------------------------------------ of a request

    def job(self, request: Generate, tail: str) -> tuple[GrammarJob | None, str]:
        """Return what must be compiled for a request, None for nothing, and a note for the user.

        tail: the end of the prompt, which may have opened thoughts.
        """
        tools, constraint = request.tools, request.constraint
        note = ""
        if tools is not None and tools.format.guessed and not tools.required:
            tools, note = None, _UNKNOWN_NOTATION
        if tools is None and constraint is None:
            return None, note
        gated = tools is not None or bool(_opened(request, tail))
        begun = msgspec.structs.replace(constraint, begun="") if constraint is not None else None
        thoughts = request.thoughts if gated else []
        return GrammarJob(tools, begun, thoughts, gated), note

    def ready(self, job: GrammarJob | None) -> bool:
        """Return whether a job needs no compiling: it has been compiled or refused before."""
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
        left: Left = NOBODY_LEFT,
    ) -> tuple[Guide | None, str]:
        """Return what holds in a request's answer, None for nothing, and a note for the user.

        tail: the end of the prompt, which may have opened the thoughts. shown: control tokens whose text
        belongs to the answer.

        Raises:
            GrammarRejected: not a grammar, too large or too slow, with the reason in one line; a tool's
                schema that must hold cannot; or the beginning of the answer is not in the language.
            Cancelled: `left` says that nobody waits any more.
        """
        job, note = self.job(request, tail)
        if job is None:
            return None, note
        compiled = self._compile(job, left)
        guide: Guide
        if compiled.plan is None:
            assert request.constraint is not None
            guide = self._whole(compiled, request.constraint)
        else:
            guide = self._gated(compiled.plan, request, tail, shown)
        return guide, " ".join(filter(None, [compiled.note, note]))

    def compile(self, constraint: Constraint) -> WholeMatcher | BoundedNumbers:
        """Return a fresh matcher of an answer that is in its language from the first token on.

        Raises:
            GrammarRejected: as `answer`.
        """
        job = GrammarJob(constraint=msgspec.structs.replace(constraint, begun=""))
        return self._whole(self._compile(job, NOBODY_LEFT), constraint)

    def _whole(self, compiled: Compiled, constraint: Constraint) -> WholeMatcher | BoundedNumbers:
        assert compiled.whole is not None
        matcher = compiled.whole.deep_copy()
        begun = self._tokenizer.greedy_tokenize(constraint.begun)
        if matcher.try_consume_tokens(begun) < len(begun):
            raise GrammarRejected(
                f"The answer to be continued does not fit the {NAMES[constraint.kind]}; leave "
                "that out, or ask again.",
                param=constraint.param,
            )
        whole = WholeMatcher(matcher, self._vocab.size)
        if not is_json(constraint, None):
            return whole
        return BoundedNumbers(whole, self._numerals, constraint.begun.encode("utf-8", "replace"))

    def _gated(
        self, plan: Plan, request: Generate, tail: str, shown: frozenset[int]
    ) -> GatedMatcher:
        vocab = self._vocab
        around = Surroundings(
            self._pieces,
            lambda t: vocab.piece(t, special=t in shown),
            vocab.size,
            vocab.ends,
            self._numerals if is_json(request.constraint, request.tools) else None,
        )
        matcher = GatedMatcher(plan, around, _opened(request, tail).encode())
        if request.constraint is not None:
            begun = request.constraint.begun
        else:
            begun = request.prompt.answer_prefix if isinstance(request.prompt, ChatPrompt) else ""
        for token in self._pieces.spell(begun.encode("utf-8", "replace")):
            if matcher.valid([token]) < 1:
                raise GrammarRejected(
                    "The answer to be continued does not fit what is asked of it; leave that out, "
                    "or ask again."
                )
            matcher.consume(token)
        return matcher

    # ------------------------------------------------------------------------ compiling

    def _compile(self, job: GrammarJob, left: Left) -> Compiled:
        """Return a job's grammars, from the cache where they are."""
        key = msgspec.msgpack.encode(job)
        with self._lock:
            if (refusal := self._refused.get(key)) is not None:
                raise GrammarRejected(refusal.message, param=refusal.param)
            if (compiled := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return compiled
        try:
            compiled = self._instantiate(job, self._sources(job, left))
        except GrammarRejected as error:
            with self._lock:
                # The system may have ended the process for a reason of its own: the second time counts.
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

    def _sources(self, job: GrammarJob, left: Left) -> GrammarSources:
        if self._process is not None:
            return self._process.build(job, left)
        return build_sources(
            job, self._special, lambda source, name: self._matcher(source, name, job.param)
        )

    def _instantiate(self, job: GrammarJob, sources: GrammarSources) -> Compiled:
        with self._lock:  # made once
            pieces, _ = self._pieces, self._tokenizer

        def matcher(source: str | None) -> LLMatcher | None:
            return None if source is None else self._matcher(source, "grammar", job.param)

        def gate(source: GateSource) -> Gate:
            grammar = self._matcher(source.source, "grammar", job.param)
            marker = source.marker.encode()
            inside = pieces.where(lambda piece: marker in piece)
            wrong = [token for token in inside if grammar.validate_tokens([token]) < 1]
            return Gate(marker, grammar, wrong, source.last)

        if sources.whole is not None:
            return Compiled(matcher(sources.whole), None, sources.note)
        plan = Plan(
            [(opening.encode(), close.encode()) for opening, close in job.thoughts],
            first=matcher(sources.first),
            may_think=sources.may_think,
            after={source.marker.encode(): gate(source) for source in sources.after},
            gates=[gate(source) for source in sources.gates],
            bare=matcher(sources.bare),
            braces=pieces.where(_begins_json) if sources.gates or sources.bare else [],
            single=sources.single,
        )
        return Compiled(None, plan, sources.note)

    def _matcher(self, source: str, name: str, param: str | None) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarRejected(f"The {name} is not usable: {reason(matcher)}", param=param)
        return matcher


_UNKNOWN_NOTATION = (
    "How this model writes calls is not known from its template, so they are not constrained."
)


def _begins_json(piece: bytes) -> bool:
    return piece.lstrip().startswith(b"{")


def _opened(request: Generate, tail: str) -> str:
    """Return what closes the thoughts that the prompt has opened; "" where it has opened none."""
    tail = tail.rstrip()
    return next((c for o, c in request.thoughts if tail.endswith(o.rstrip())), "")
