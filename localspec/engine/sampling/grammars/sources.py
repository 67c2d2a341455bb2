"""Write the grammars of an answer as llguidance sources, from the request's constraint and tools.

Of the vocabulary, this module needs only the special tokens. It can therefore run in a process of its own
(`child`), where a hostile grammar or schema can be stopped. Every source is compiled there once before it is
returned.
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

from localspec.chat.families import grammar_of
from localspec.chat.notations.grammar import CallGrammar, write_thoughts_end
from localspec.chat.notations.lark import lark_string
from localspec.engine.sampling.grammars.enforced import (
    Enforced,
    describe,
    enforce,
    for_library,
    with_bounded_numbers,
)
from localspec.engine.sampling.grammars.gbnf import NO_TOKENS, TokenTable
from localspec.engine.sampling.grammars.json_values import json_expression, json_grammar
from localspec.engine.sampling.grammars.lexemes import gbnf_to_lark
from localspec.errors import GrammarRejected
from localspec.protocol.calls import CallFormat, ToolSet, call_markers
from localspec.protocol.frames import Constraint

# Bytes of a grammar or schema. With 300 KiB of alternatives, a mask took 7 s.
MAX_SOURCE_BYTES = 128 * 1024
MAX_TOOL_BYTES = 128 * 1024  # Bytes of one tool's schema.
# Bytes of all tool schemas. 50 schemas of 4 KiB take a quarter of a second.
MAX_TOOLS_BYTES = 1024 * 1024
# Blanks between the parts of JSON. A model that may begin new lines often goes on with blanks.
_ONE_LINE = " ?"
NAMES = {
    "json_object": "JSON mode",
    "json_schema": "JSON Schema",
    "grammar": "grammar",
    "regex": "regular expression",
}

_MAX_NAMED_TOOLS = 5  # Tools that a note names.

# Compiles a source. The second argument names it in errors. Raises GrammarRejected.
Compile = Callable[[str, str], object]


@dataclass(frozen=True)
class GrammarTokens:
    """The special tokens of a vocabulary.

    ids: the tokens by their text. ends: those that end an answer. table: the tokens that GBNF may name, which
    may include others.
    """

    ids: Mapping[str, int]
    ends: frozenset[int] = frozenset()
    table: TokenTable = NO_TOKENS

    def lark_expression(self, text: str, *, plain: bool = False) -> str:
        """Return a Lark expression for the marker `text`, with special tokens by their ids.

        Tokens that end an answer are left out, because no grammar contains them. plain: each special token
        may also be written as plain text.
        """
        contained = [re.escape(special) for special in self._longest_first if special in text]
        parts = re.split(f"({'|'.join(contained)})", text) if contained else [text]
        spelled = "(<[{}]> | {})" if plain else "<[{}]>"
        return " ".join(
            spelled.format(self.ids[part], lark_string(part))
            if part in self.ids
            else lark_string(part)
            for part in parts
            if part and self.ids.get(part) not in self.ends
        )

    @cached_property
    def _longest_first(self) -> list[str]:
        return sorted(filter(None, self.ids), key=len, reverse=True)


class GrammarJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """The inputs that determine the grammars of an answer.

    thoughts: pairs of opening and closing markers of thoughts that may come first. gated: whether the
    constraint applies after thoughts that the prompt has opened, or beside tools; otherwise it applies from
    the first token on.
    """

    tools: ToolSet | None = None
    constraint: Constraint | None = None
    thoughts: list[tuple[str, str]] = []
    gated: bool = False

    @property
    def param(self) -> str | None:
        """The request field that an error names."""
        return "tools" if self.constraint is None else self.constraint.param


class GateSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar that begins with its marker. last: whether the answer ends with it."""

    marker: str
    source: str
    last: bool = False


class GrammarSources(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grammars of an answer as llguidance sources, each of which is known to compile.

    whole: a single grammar that applies from the first token on. first, may_think, after, gates, bare,
    single: as in `gates.GatePlan`. note: a message for the user.
    """

    whole: str | None = None
    first: str | None = None
    may_think: list[int] = []
    after: list[GateSource] = []
    gates: list[GateSource] = []
    bare: str | None = None
    single: bool = False
    note: str = ""


def build_sources(job: GrammarJob, special: GrammarTokens, compile: Compile) -> GrammarSources:
    """Write the grammars of a job, and compile each of them once.

    Raises:
        GrammarRejected: a grammar is not usable, or the schema of a strict tool cannot be enforced.
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
    """A writer of grammars for an answer that may contain thoughts or calls."""

    def __init__(
        self, special: GrammarTokens, compile: Compile, thoughts: Sequence[tuple[str, str]]
    ) -> None:
        self._special = special
        self._compile = compile
        self._thoughts = thoughts

    def build(self, tools: ToolSet | None, answer: str) -> GrammarSources:
        """Return the sources. answer: the rule of an answer that is not a call, or "".

        Raises:
            GrammarRejected: a grammar is not usable, or the schema of a strict tool cannot be enforced.
        """
        if tools is None:
            return self._build_from_start(lambda close: self._write_answer(answer, close))
        tools, invalid, dropped = enforced_tools(tools)
        free, note = self._find_free_tools(tools, invalid)
        note = " ".join(filter(None, [dropped, note]))
        if tools.required or answer:
            grammar = self._grammar(tools, free, compact=True)
            alternative = "" if tools.required else answer
            ids = [self._special.ids.get(opening) for opening, _ in self._thoughts]
            may_think = [token for token in ids if token is not None]
            return self._build_from_start(
                lambda close: grammar.write_whole(alternative, close), may_think, note
            )
        return self._build_gates(tools, free, note)

    def _grammar(
        self, tools: ToolSet, free: Sequence[str] = (), *, compact: bool = False
    ) -> CallGrammar:
        write = grammar_of(tools.format)
        return write(tools, self._special.lark_expression, json_rule, free, compact=compact)

    def _write_answer(self, rule: str, closing_marker: str) -> str:
        prefix = write_thoughts_end(closing_marker, self._special.lark_expression)
        return f"start: {prefix} answer\nanswer: {rule}"

    def _compiled(self, source: str, name: str) -> str:
        """Return `source` after compiling it."""
        self._compile(source, name)
        return source

    def _build_from_start(
        self, write: Callable[[str], str], may_think: Sequence[int] = (), note: str = ""
    ) -> GrammarSources:
        """Return grammars that apply from the beginning of the answer, or after thoughts.

        write: returns the grammar after a closing marker of thoughts, which is "" without thoughts.
        """
        return GrammarSources(
            first=self._compiled(write(""), "response format"),
            may_think=list(may_think),
            after=[self._gate(close, write(close), last=True) for _, close in self._thoughts],
            note=note,
        )

    def _build_gates(self, tools: ToolSet, free: Sequence[str], note: str) -> GrammarSources:
        """Return grammars of calls that the model may open in free text."""

        def opened(marker: str) -> str:
            return self._grammar(tools, free).write_opened(marker)

        format = tools.format
        return GrammarSources(
            gates=[
                self._gate(marker, opened(marker)) for marker in call_markers(format, tools.schemas)
            ],
            bare=self._compiled(opened(""), "tools") if format.bare else None,
            single=not tools.parallel,
            note=note,
        )

    def _gate(self, marker: str, source: str, *, last: bool = False) -> GateSource:
        return GateSource(marker, self._compiled(source, "tools"), last)

    # ------------------------------------------------------------------------ tools without enforcement

    def _find_free_tools(self, tools: ToolSet, invalid: Mapping[str, str]) -> tuple[list[str], str]:
        """Return the tools whose schemas cannot be enforced, and a note about them.

        The arguments of such a tool may be any object. invalid: the error of each invalid schema by tool.

        Raises:
            GrammarRejected: one of these tools is strict.
        """
        sizes = {name: len(msgspec.json.encode(schema)) for name, schema in tools.schemas.items()}
        free = dict(invalid)
        if sum(sizes.values()) > MAX_TOOLS_BYTES:
            free = dict.fromkeys(sizes, "all together are too long")
        if not self._usable(tools, list(free)):
            for name, schema in tools.schemas.items():
                if name not in free and (error := self._find_error(tools, name, schema)):
                    free[name] = error
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
        [error, *_] = free.values()
        return list(free), f"Calls of {names} are not held to their parameters: {error}"

    def _usable(self, tools: ToolSet, free: Sequence[str]) -> bool:
        # One marker stands for all, except where the tool's name is part of it.
        markers = call_markers(tools.format, tools.schemas) or ("",)
        markers = markers if tools.format.recipient else markers[:1]
        try:
            for marker in markers:
                grammar = self._grammar(tools, free)
                self._compile(grammar.write_opened(marker), "tools")
        except (GrammarRejected, RecursionError, ValueError):
            return False
        return True

    def _find_error(self, tools: ToolSet, name: str, schema: object) -> str:
        """Return why a tool's schema cannot be enforced, or "" if it can."""
        tool = ToolSet(tools.format, {name: schema})
        try:
            [marker, *_] = call_markers(tools.format, tool.schemas) or ("",)
            source = self._grammar(tool).write_opened(marker)
            self._compile(source, "schema")
        except RecursionError:
            return "it is nested too deeply."
        except (GrammarRejected, ValueError) as error:
            return str(error)
        return ""


def json_rule(schema: Any, blanks: str = "", *, bounded: bool = False) -> str:
    """Return the expression of the JSON that fits a schema, as `JsonRule` has it."""
    readable = for_library(schema)
    return json_expression(with_bounded_numbers(readable) if bounded else readable, blanks)


def enforced_tools(tools: ToolSet) -> tuple[ToolSet, dict[str, str], str]:
    """Reduce the tools' schemas to what can be enforced.

    Return the tools, the errors of invalid schemas by tool, and a note about keywords that are not enforced.

    Raises:
        GrammarRejected: a tool is strict, and part of its schema cannot be enforced.
    """
    schemas: dict[str, Any] = {}
    invalid: dict[str, str] = {}
    notes: list[str] = []
    for name, schema in tools.schemas.items():
        schemas[name] = {"type": "object"}
        if len(msgspec.json.encode(schema)) > MAX_TOOL_BYTES:
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
    note = "; ".join(notes[:_MAX_NAMED_TOOLS]) + "; …" * (len(notes) > _MAX_NAMED_TOOLS)
    note = f"Not enforced in the parameters {note}." if notes else ""
    return msgspec.structs.replace(tools, schemas=schemas), invalid, note


def constraint_source(constraint: Constraint, tokens: TokenTable = NO_TOKENS) -> str:
    """Return a constraint in llguidance's own format.

    Raises:
        GrammarRejected: the constraint is too long or invalid, or strict and not fully enforceable.
    """
    if len(constraint.source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise GrammarRejected(
            f"The grammar is longer than {MAX_SOURCE_BYTES // 1024} KiB.", param=constraint.param
        )
    name = NAMES[constraint.kind]
    try:
        if constraint.kind == "regex":
            return str(LLMatcher.grammar_from_regex(constraint.source))
        if constraint.kind == "grammar":
            lark = gbnf_to_lark(constraint.source, tokens)
            return str(LLMatcher.grammar_from_lark(lark))
        schema = for_library(_enforced_constraint(constraint).schema)
        return str(LLMatcher.grammar_from_lark(json_grammar(schema, _ONE_LINE)))
    except GrammarRejected:
        raise
    except RecursionError:
        raise GrammarRejected(f"The {name} is nested too deeply.", param=constraint.param) from None
    # llguidance documents ValueError, but may raise other exceptions.
    except Exception as error:
        cause = one_line(str(error).strip() or type(error).__name__)
        raise GrammarRejected(
            f"The {name} is not usable: {cause}", param=constraint.param
        ) from error


@lru_cache(maxsize=8)
def _enforced_constraint(constraint: Constraint) -> Enforced:
    """Reduce a constraint's schema to what can be enforced.

    Raises:
        GrammarRejected: the constraint is strict, and part of it cannot be enforced.
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
    """Return a note about the parts of a constraint that are not enforced, or ""."""
    if constraint.kind != "json_schema" or len(constraint.source) > MAX_SOURCE_BYTES:
        return ""
    try:
        dropped = _enforced_constraint(constraint).dropped
    except (GrammarRejected, RecursionError, ValueError):
        return ""  # Compiling the constraint raises the same error.
    if not dropped:
        return ""
    return f"Not enforced in the schema of '{constraint.param}': {describe(dropped)}."


def is_json(constraint: Constraint | None, tools: ToolSet | None) -> bool:
    """Return whether all grammars of an answer describe JSON, so that numbers can be found by quotes."""
    if constraint is not None and constraint.kind not in ("json_object", "json_schema"):
        return False
    return tools is None or _calls_are_json(tools.format)


def _calls_are_json(form: CallFormat) -> bool:
    """Return whether quotes in calls of this format are always those of JSON."""
    literals = "".join((*form.opens, form.lead, form.middle, form.again, form.close))
    is_tagged = bool(form.parameter or form.elements)
    return form.kind in ("hermes", "json", "mistral") or (
        form.kind in ("named", "found") and not is_tagged and literals.count('"') % 2 == 0
    )


def _constraint_rule(constraint: Constraint, tokens: TokenTable) -> str:
    """Return a constraint as the body of a Lark rule."""
    source = constraint_source(constraint, tokens)
    if source.startswith("{"):
        [grammar] = json.loads(source)["grammars"]
        source = grammar["lark_grammar"]
    return f"%lark {{\n{source}\n}}"


def one_line(text: str) -> str:
    """Return an error of llguidance in one line: its first line, and the line with the cause.

    The first line gives the place; the cause follows after an excerpt of the grammar.
    """
    first, *following = text.splitlines() or [""]
    cause = next((line.strip() for line in following if line.strip().startswith("error:")), "")
    return f"{first} {cause}".strip()[:300]
