"""From a request's constraint and tools to the grammars of its answer, as sources for llguidance.

Pure: needs no vocabulary but its special tokens, so it runs in a process of its own (`checker`), where a
hostile grammar or schema can be stopped. Every source is compiled there once before it is handed back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import msgspec
from llguidance import LLMatcher

from localspec.engine.sampling.grammars.calls import CallGrammar, after, quoted
from localspec.engine.sampling.grammars.enforced import (
    Enforced,
    describe,
    enforce,
    for_library,
)
from localspec.engine.sampling.grammars.gbnf import NO_TOKENS, TokenTable
from localspec.engine.sampling.grammars.lark import gbnf_to_lark
from localspec.errors import GrammarRejected
from localspec.protocol.calls import CallFormat, Tools
from localspec.protocol.frames import Constraint

MAX_SOURCE = 128 * 1024  # bytes of a grammar or schema: 300 KiB of alternatives took 7 s for a mask
MAX_TOOL = 128 * 1024  # bytes of a tool's schema
MAX_TOOLS = 1024 * 1024  # of all together; 50 of 4 KiB each take a quarter of a second
# Between the parts of JSON: who begins lines goes on with blanks, twenty of them at a time.
_ONE_LINE = {"whitespace_pattern": " ?"}
NAMES = {
    "json_object": "JSON mode",
    "json_schema": "JSON Schema",
    "grammar": "grammar",
    "regex": "regular expression",
}

_NAMED_TOOLS = 5  # in a note

# Compiles a source; the second argument is what an error calls it. Raises GrammarRejected.
Compile = Callable[[str, str], object]


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a vocabulary by their text, and those of them that end an answer.

    table: what GBNF may name, which may be other tokens too.
    """

    ids: Mapping[str, int]
    ends: frozenset[int] = frozenset()
    table: TokenTable = NO_TOKENS

    def spelled(self, text: str) -> str:
        """Return a marker as the vocabulary writes it, for llguidance's Lark.

        What ends an answer is left out: no grammar contains it.
        """
        within = [re.escape(special) for special in self._longest_first if special in text]
        parts = re.split(f"({'|'.join(within)})", text) if within else [text]
        return " ".join(
            f"<[{self.ids[part]}]>" if part in self.ids else quoted(part)
            for part in parts
            if part and self.ids.get(part) not in self.ends
        )

    @cached_property
    def _longest_first(self) -> list[str]:
        return sorted(filter(None, self.ids), key=len, reverse=True)


class GrammarJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decides the grammars of an answer.

    thoughts: markers around thoughts that may come first. gated: the constraint holds after thoughts that
    the prompt has opened, or beside tools; otherwise from the first token on.
    """

    tools: Tools | None = None
    constraint: Constraint | None = None
    thoughts: list[tuple[str, str]] = []
    gated: bool = False

    @property
    def param(self) -> str | None:
        """The request's field that an error names."""
        return "tools" if self.constraint is None else self.constraint.param


class GateSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grammar that holds from a marker on, the marker included; last: nothing follows it."""

    marker: str
    source: str
    last: bool = False


class GrammarSources(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grammars of an answer as llguidance's sources, each of which compiles.

    whole: the only one, from the first token on. first, may_think, after, gates, bare: as in `gates.Plan`.
    note: what a person should know of them.
    """

    whole: str | None = None
    first: str | None = None
    may_think: list[int] = []
    after: list[GateSource] = []
    gates: list[GateSource] = []
    bare: str | None = None
    single: bool = False
    note: str = ""


def build_sources(job: GrammarJob, special: SpecialTokens, compile: Compile) -> GrammarSources:
    """Write the grammars that a job asks for, and compile each of them once.

    Raises:
        GrammarRejected: a grammar is not usable, or a tool's schema that must hold cannot.
    """
    constraint = job.constraint
    if not job.gated:
        assert constraint is not None
        source = constraint_source(constraint, special.table)
        compile(source, NAMES[constraint.kind])
        return GrammarSources(whole=source, note=note_of(constraint))
    builder = _Builder(special, compile, job.thoughts)
    answer = "" if constraint is None else _constraint_rule(constraint, special.table)
    sources = builder.build(job.tools, answer)
    if constraint is None:
        return sources
    note = " ".join(filter(None, [sources.note, note_of(constraint)]))
    return msgspec.structs.replace(sources, note=note)


class _Builder:
    """Writes the grammars of an answer that may have thoughts before it, or calls in it."""

    def __init__(
        self, special: SpecialTokens, compile: Compile, thoughts: Sequence[tuple[str, str]]
    ) -> None:
        self._special = special
        self._compile = compile
        self._thoughts = thoughts

    def build(self, tools: Tools | None, answer: str) -> GrammarSources:
        """Return the sources. answer: the rule of an answer that is no call.

        Raises:
            GrammarRejected: a grammar is not usable, or a tool's schema that must hold cannot.
        """
        if tools is None:
            return self._from_the_start(lambda before: self._answer(answer, before))
        tools, invalid, dropped = enforced_tools(tools)
        free, note = self._free(tools, invalid)
        note = " ".join(filter(None, [dropped, note]))
        if tools.required or answer:
            grammar = CallGrammar(tools, self._special.spelled, free, compact=True)
            either = "" if tools.required else answer
            ids = [self._special.ids.get(opening) for opening, _ in self._thoughts]
            may_think = [token for token in ids if token is not None]
            return self._from_the_start(
                lambda before: grammar.whole(either, before), may_think, note
            )
        return self._on_its_own(tools, free, note)

    def _answer(self, rule: str, before: str) -> str:
        return f"start: {after(before, self._special.spelled)} answer\nanswer: {rule}"

    def _compiled(self, source: str, name: str) -> str:
        self._compile(source, name)
        return source

    def _from_the_start(
        self, grammar: Callable[[str], str], may_think: Sequence[int] = (), note: str = ""
    ) -> GrammarSources:
        """A language that holds from the beginning on, or after thoughts."""
        return GrammarSources(
            first=self._compiled(grammar(""), "response format"),
            may_think=list(may_think),
            after=[self._gate(close, grammar(close), last=True) for _, close in self._thoughts],
            note=note,
        )

    def _on_its_own(self, tools: Tools, free: Sequence[str], note: str) -> GrammarSources:
        """Calls that the model opens, or does not."""

        def opened(marker: str) -> str:
            return CallGrammar(tools, self._special.spelled, free).opened(marker)

        format = tools.format
        return GrammarSources(
            gates=[self._gate(marker, opened(marker)) for marker in format.opens],
            bare=self._compiled(opened(""), "tools") if format.bare else None,
            single=not tools.parallel,
            note=note,
        )

    def _gate(self, marker: str, source: str, *, last: bool = False) -> GateSource:
        return GateSource(marker, self._compiled(source, "tools"), last)

    # ------------------------------------------------------------------------ what cannot hold

    def _free(self, tools: Tools, invalid: Mapping[str, str]) -> tuple[list[str], str]:
        """Tools whose arguments can only be held to be an object, and that in a sentence. invalid: why
        some tools' schemas are none.

        Raises:
            GrammarRejected: one of them must hold.
        """
        sizes = {name: len(msgspec.json.encode(schema)) for name, schema in tools.schemas.items()}
        free = dict(invalid)
        if sum(sizes.values()) > MAX_TOOLS:
            free = dict.fromkeys(sizes, "all together are too long")
        if not self._usable(tools, list(free)):
            for name, schema in tools.schemas.items():
                if name not in free and (why := self._why_not(tools, name, schema)):
                    free[name] = why
        for name in tools.strict:
            if name in free:
                raise GrammarRejected(
                    f"The parameters of the tool '{name}' cannot be held to, as 'strict' asks: "
                    f"{free[name]}",
                    param="tools",
                )
        if not free:
            return [], ""
        names = ", ".join(f"'{name}'" for name in list(free)[:5]) + ", …" * (len(free) > 5)
        [why, *_] = free.values()
        return list(free), f"Calls of {names} are not held to their parameters: {why}"

    def _usable(self, tools: Tools, free: Sequence[str]) -> bool:
        try:
            source = CallGrammar(tools, self._special.spelled, free).opened(_marker(tools))
            self._compile(source, "tools")
        except (GrammarRejected, RecursionError, ValueError):
            return False
        return True

    def _why_not(self, tools: Tools, name: str, schema: object) -> str:
        """Why a tool's schema cannot hold; "": it can."""
        one = Tools(tools.format, {name: schema})
        try:
            source = CallGrammar(one, self._special.spelled).opened(_marker(tools))
            self._compile(source, "schema")
        except RecursionError:
            return "it is nested too deeply."
        except (GrammarRejected, ValueError) as error:
            return str(error)
        return ""


def enforced_tools(tools: Tools) -> tuple[Tools, dict[str, str], str]:
    """Reduce the tools' schemas to what can be enforced.

    Returns the tools, why some schemas are none, and what is left out of the others, for a person.

    Raises:
        GrammarRejected: a tool is strict, and something of its schema cannot be enforced.
    """
    schemas: dict[str, Any] = {}
    invalid: dict[str, str] = {}
    notes: list[str] = []
    for name, schema in tools.schemas.items():
        schemas[name] = {"type": "object"}
        if len(msgspec.json.encode(schema)) > MAX_TOOL:
            invalid[name] = "it is too long"
            continue
        try:
            enforced = enforce({"type": "object", **schema})
        except RecursionError:
            invalid[name] = "it is nested too deeply."
            continue
        except ValueError as error:
            invalid[name] = str(error)
            continue
        if enforced.dropped and name in tools.strict:
            raise GrammarRejected(
                f"The parameters of the tool '{name}' cannot be enforced as 'strict' asks. Not "
                f"supported: {describe(enforced.dropped)}. Leave it out, or leave out 'strict'.",
                param="tools",
            )
        schemas[name] = enforced.schema
        if enforced.dropped:
            notes.append(f"of '{name}': {describe(enforced.dropped)}")
    note = "; ".join(notes[:_NAMED_TOOLS]) + "; …" * (len(notes) > _NAMED_TOOLS)
    note = f"Not enforced in the parameters {note}." if notes else ""
    return msgspec.structs.replace(tools, schemas=schemas), invalid, note


def _marker(tools: Tools) -> str:
    return tools.format.opens[0] if tools.format.opens else ""


def constraint_source(constraint: Constraint, tokens: TokenTable = NO_TOKENS) -> str:
    """llguidance's own form of a constraint."""
    if len(constraint.source.encode("utf-8", "surrogatepass")) > MAX_SOURCE:
        raise GrammarRejected(
            f"The grammar is longer than {MAX_SOURCE // 1024} KiB.", param=constraint.param
        )
    name = NAMES[constraint.kind]
    try:
        if constraint.kind == "regex":
            return str(LLMatcher.grammar_from_regex(constraint.source))
        if constraint.kind == "grammar":
            lark = gbnf_to_lark(constraint.source, tokens)
            return str(LLMatcher.grammar_from_lark(lark))
        schema = for_library(_enforced_constraint(constraint).schema)
        options: Any = _ONE_LINE  # its stubs know fewer of them than it does
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    except GrammarRejected:
        raise
    except RecursionError:
        raise GrammarRejected(f"The {name} is nested too deeply.", param=constraint.param) from None
    # llguidance documents ValueError, and may raise others
    except Exception as error:
        cause = one_line(str(error).strip() or type(error).__name__)
        raise GrammarRejected(
            f"The {name} is not usable: {cause}", param=constraint.param
        ) from error


@lru_cache(maxsize=8)
def _enforced_constraint(constraint: Constraint) -> Enforced:
    """Reduce a constraint's schema to what can be enforced.

    Raises:
        GrammarRejected: the constraint is strict, and something cannot be enforced.
    """
    if constraint.kind == "json_object":
        return Enforced({"type": "object"})
    enforced = enforce(json.loads(constraint.source))
    if constraint.strict and enforced.dropped:
        raise GrammarRejected(
            f"The {NAMES[constraint.kind]} cannot be enforced as 'strict' asks. Not supported: "
            f"{describe(enforced.dropped)}. Leave it out, or leave out 'strict'.",
            param=constraint.param,
        )
    return enforced


def note_of(constraint: Constraint) -> str:
    """Return what of a constraint is not enforced, for a person; "" where that is nothing."""
    if constraint.kind != "json_schema" or len(constraint.source) > MAX_SOURCE:
        return ""
    try:
        dropped = _enforced_constraint(constraint).dropped
    except (GrammarRejected, RecursionError, ValueError):
        return ""  # compiling it raises the same
    if not dropped:
        return ""
    return f"Not enforced in the schema of '{constraint.param}': {describe(dropped)}."


def is_json(constraint: Constraint | None, tools: Tools | None) -> bool:
    """Return whether all grammars of an answer are JSON's, so that quotes tell texts from numbers."""
    if constraint is not None and constraint.kind not in ("json_object", "json_schema"):
        return False
    return tools is None or _calls_are_json(tools.format)


def _calls_are_json(form: CallFormat) -> bool:
    literals = "".join((*form.opens, form.lead, form.middle, form.again, form.close))
    return form.kind in ("hermes", "json", "mistral", "named") or (
        form.kind == "found" and not form.parameter and literals.count('"') % 2 == 0
    )


def _constraint_rule(constraint: Constraint, tokens: TokenTable) -> str:
    """A constraint as the body of a rule, beside others."""
    source = constraint_source(constraint, tokens)
    if source.startswith("{"):
        [grammar] = json.loads(source)["grammars"]
        if grammar["json_schema"] is not None:
            return f"%json {json.dumps(grammar['json_schema'])}"
        source = grammar["lark_grammar"]
    return f"%lark {{\n{source}\n}}"


def one_line(text: str) -> str:
    """Where and what: the first line, and the one that names the error under an excerpt."""
    first, *rest = text.splitlines() or [""]
    cause = next((line.strip() for line in rest if line.strip().startswith("error:")), "")
    return f"{first} {cause}".strip()[:300]
