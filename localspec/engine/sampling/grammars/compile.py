"""Structured output through llguidance: token masks for the target, forced tokens as free drafts.

llama.cpp's own grammar parser is never given a user's text: it ends the process on bad input.
llguidance returns errors, and its limits bound time and memory.
"""

from __future__ import annotations

import json
from functools import cached_property, partial
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from localspec.engine.llama import Vocab
from localspec.engine.sampling.grammars.gates import GatedMatcher, Pieces, Plan, Surroundings
from localspec.engine.sampling.grammars.matcher import WholeMatcher, one_line, reason
from localspec.engine.sampling.grammars.plans import Plans
from localspec.engine.sampling.grammars.schemas import closed
from localspec.engine.sampling.guide import Guide
from localspec.errors import GrammarRejected
from localspec.protocol.frames import ChatPrompt, Constraint, Generate

MAX_SOURCE = 128 * 1024  # bytes of a grammar or schema: 300 KiB of alternatives took 7 s for a mask
# Between the parts of JSON: who begins lines goes on with blanks, twenty of them at a time.
_ONE_LINE = {"whitespace_pattern": " ?"}
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000, max_lexer_states=50_000, max_grammar_size=200_000
)
_KEPT = 8  # requests' plans: an agent sends the same tools with every turn


class Grammars:
    """Compiles constraints for one vocabulary. The tokenizer table is built at first use (1 s)."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._plans: dict[bytes, tuple[Plan, str]] = {}

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        found: LLTokenizer = self._vocab.guidance_tokenizer()
        return found

    @cached_property
    def _pieces(self) -> Pieces:
        vocab = self._vocab
        pieces = [vocab.piece(token, special=False) for token in range(vocab.size)]
        special = set(filter(self._tokenizer.is_special_token, range(vocab.size)))
        written = {vocab.piece(token, special=True): token for token in special}
        return Pieces(pieces, written, vocab.ends)

    def compile(self, constraint: Constraint) -> WholeMatcher:
        """A fresh matcher of an answer that is in its language from the first token on.

        Raises:
            GrammarRejected: not a grammar, or too large, with llguidance's reason in one line; or one
                that the beginning of the answer is not in.
        """
        matcher = self._matcher(_source(constraint), _NAMES[constraint.kind], constraint.param)
        begun = self._tokenizer.greedy_tokenize(constraint.begun)
        if matcher.try_consume_tokens(begun) < len(begun):
            raise GrammarRejected(
                f"The answer to be continued does not fit the {_NAMES[constraint.kind]}; leave "
                "that out, or ask again.",
                param=constraint.param,
            )
        return WholeMatcher(matcher, self._vocab.size)

    def answer(
        self, request: Generate, tail: str, shown: frozenset[int]
    ) -> tuple[Guide | None, str]:
        """What holds in a request's answer, None nothing; and what a person should know of it.

        tail: the end of the prompt, which may have opened the thoughts. shown: control tokens whose text
        belongs to the answer.

        Raises:
            GrammarRejected: as `compile`; or a tool's schema that must hold cannot.
        """
        tools, constraint = request.tools, request.constraint
        unheld = ""
        if tools is not None and tools.format.guessed and not tools.required:
            tools, unheld = None, _UNKNOWN
        tail = tail.rstrip()
        close = next((c for o, c in request.thoughts if tail.endswith(o.rstrip())), "")
        if tools is None and (constraint is None or not close):
            return (None if constraint is None else self.compile(constraint)), unheld
        key = msgspec.msgpack.encode((tools, constraint, request.thoughts))
        if key not in self._plans:
            answer = _rule(constraint) if constraint is not None else ""
            compiled = partial(self._matcher, param=constraint.param if constraint else "tools")
            plans = Plans(compiled, self._pieces, request.thoughts)
            self._plans[key] = plans.plan(tools, answer)
            for old in list(self._plans)[:-_KEPT]:
                del self._plans[old]
        plan, note = self._plans[key]
        vocab = self._vocab
        around = Surroundings(
            self._pieces, lambda t: vocab.piece(t, special=t in shown), vocab.size, vocab.ends
        )
        matcher = GatedMatcher(plan, around, close.encode())
        if constraint is not None:
            begun = constraint.begun
        else:
            begun = request.prompt.answer_prefix if isinstance(request.prompt, ChatPrompt) else ""
        for token in self._pieces.spell(begun.encode("utf-8", "replace")):
            if matcher.valid([token]) < 1:
                raise GrammarRejected(
                    "The answer to be continued does not fit what is asked of it; leave that out, "
                    "or ask again."
                )
            matcher.consume(token)
        return matcher, note or unheld

    def _matcher(self, source: str, name: str, param: str | None) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarRejected(f"The {name} is not usable: {reason(matcher)}", param=param)
        return matcher


_UNKNOWN = (
    "How this model writes calls is not known from its template, so they are not constrained."
)
_NAMES = {
    "json_object": "JSON mode",
    "json_schema": "JSON Schema",
    "grammar": "grammar",
    "regex": "regular expression",
}


def _source(constraint: Constraint) -> str:
    """llguidance's own form of a constraint."""
    if len(constraint.source.encode("utf-8", "surrogatepass")) > MAX_SOURCE:
        raise GrammarRejected(
            f"The grammar is longer than {MAX_SOURCE // 1024} KiB.", param=constraint.param
        )
    name = _NAMES[constraint.kind]
    try:
        if constraint.kind == "regex":
            return str(LLMatcher.grammar_from_regex(constraint.source))
        if constraint.kind == "grammar":
            lark = gbnf_to_lark(constraint.source)
            return str(LLMatcher.grammar_from_lark(lark))
        source = '{"type": "object"}' if constraint.kind == "json_object" else constraint.source
        schema = json.loads(source)
        if isinstance(schema, dict):
            source = json.dumps(closed(schema))
        options: Any = _ONE_LINE  # its stubs know fewer of them than it does
        return str(LLMatcher.grammar_from_json_schema(source, overrides=options))
    except RecursionError:
        raise GrammarRejected(f"The {name} is nested too deeply.", param=constraint.param) from None
    # llguidance documents ValueError; its GBNF converter raises plain Exception and IndexError too
    except Exception as error:
        cause = one_line(str(error).strip() or type(error).__name__)
        raise GrammarRejected(
            f"The {name} is not usable: {cause}", param=constraint.param
        ) from error


def _rule(constraint: Constraint) -> str:
    """A constraint as the body of a rule, beside others."""
    source = _source(constraint)
    if source.startswith("{"):
        [grammar] = json.loads(source)["grammars"]
        if grammar["json_schema"] is not None:
            return f"%json {json.dumps(grammar['json_schema'])}"
        source = grammar["lark_grammar"]
    return f"%lark {{\n{source}\n}}"
