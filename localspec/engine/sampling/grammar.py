"""Structured output through llguidance: token masks for the target, forced tokens as free drafts.

llama.cpp's own grammar parser is never given a user's text: it ends the process on bad input.
llguidance returns errors, and its limits bound time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from localspec.engine.llama import Vocab
from localspec.engine.sampling.schemas import closed
from localspec.errors import GrammarRejected
from localspec.protocol.frames import Constraint

MAX_SOURCE = 128 * 1024  # bytes of a grammar or schema: 300 KiB of alternatives took 7 s for a mask
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000, max_lexer_states=50_000, max_grammar_size=200_000
)
# Whitespace is free in JSON and a small model can go on with it forever: one space, or a new line and
# its indentation, as llama.cpp's grammars for JSON have it.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?"}


class Grammars:
    """Compiles constraints for one vocabulary. The tokenizer table is built at first use (1 s)."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._tokenizer: LLTokenizer | None = None

    def compile(self, constraint: Constraint) -> Matcher:
        """A fresh matcher.

        Raises:
            GrammarRejected: not a grammar, or too large, with llguidance's reason in one line; or one
                that the beginning of the answer is not in.
        """
        if len(constraint.source.encode("utf-8", "surrogatepass")) > MAX_SOURCE:
            raise GrammarRejected(
                f"The grammar is longer than {MAX_SOURCE // 1024} KiB.", param=constraint.param
            )
        if self._tokenizer is None:
            self._tokenizer = self._vocab.guidance_tokenizer()
        matcher = LLMatcher(self._tokenizer, _source(constraint), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarRejected(
                f"The {_NAMES[constraint.kind]} is not usable: {_line(matcher)}",
                param=constraint.param,
            )
        begun = self._tokenizer.greedy_tokenize(constraint.begun)
        if matcher.try_consume_tokens(begun) < len(begun):
            raise GrammarRejected(
                f"The answer to be continued does not fit the {_NAMES[constraint.kind]}; leave "
                "that out, or ask again.",
                param=constraint.param,
            )
        return Matcher(matcher, self._vocab.size)


_NAMES = {
    "json_object": "JSON mode",
    "json_schema": "JSON Schema",
    "grammar": "grammar",
    "regex": "regular expression",
}


def _source(constraint: Constraint) -> str:
    """llguidance's own form of a constraint."""
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
        options: Any = _JSON_OPTIONS  # its stubs know fewer of them than it does
        return str(LLMatcher.grammar_from_json_schema(source, overrides=options))
    except RecursionError:
        raise GrammarRejected(f"The {name} is nested too deeply.", param=constraint.param) from None
    # llguidance documents ValueError; its GBNF converter raises plain Exception and IndexError too
    except Exception as error:
        reason = _one_line(str(error).strip() or type(error).__name__)
        raise GrammarRejected(
            f"The {name} is not usable: {reason}", param=constraint.param
        ) from error


def _line(matcher: LLMatcher) -> str:
    return _one_line(str(matcher.get_error()).strip())


def _one_line(text: str) -> str:
    """Where and what: the first line, and the one that names the error under an excerpt."""
    first, *rest = text.splitlines() or [""]
    cause = next((line.strip() for line in rest if line.strip().startswith("error:")), "")
    return f"{first} {cause}".strip()[:300]


class Matcher:
    """A Guide: the state of one answer in its language."""

    narrows = True

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._passed = 0  # tokens after the end, which the grammar has not seen

    def mask(self) -> npt.NDArray[np.bool_]:
        """(n_vocab,): which tokens may come next. All of them once the grammar has ended.

        Raises:
            GrammarRejected: the grammar ran into its limits.
        """
        allowed: npt.NDArray[np.bool_] = (
            np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) != 0
        )
        self._check()
        return allowed[: self._n_vocab]

    def consume(self, token: int) -> None:
        """Advance by one token, which the mask allowed."""
        if self._matcher.is_stopped():
            self._passed += 1
            return
        self._matcher.consume_token(token)
        self._check()

    def take_back(self, count: int) -> None:
        """Be as before the last `count` tokens that were consumed."""
        seen = max(count - self._passed, 0)
        self._passed = max(self._passed - count, 0)
        self._matcher.rollback(seen)
        self._check()

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens could come next, in this order."""
        return int(self._matcher.validate_tokens(list(tokens)))

    def forced(self) -> list[int]:
        """Tokens that must come next whatever the model says."""
        return [int(token) for token in self._matcher.compute_ff_tokens()]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarRejected(f"The grammar ran into its limits: {_line(self._matcher)}")
