"""Write the grammars of an answer as llguidance sources, from the request's constraint and tools.

Of the vocabulary, this module needs only the special tokens. It can therefore run in a process of its own
(`child`), where a hostile grammar or schema can be stopped. Every source is compiled there once before it is
returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from localspec.chat.families import grammar_of
from localspec.chat.notations.grammar import CallGrammar, write_thoughts_end
from localspec.chat.notations.lark import lark_string
from localspec.engine.sampling.grammars.enforced import (
    Dropped,
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
# llguidance's fuel bounds the time of one mask: 0.1 s if it computes nothing but lexer states.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, max_lexer_states=50_000, max_grammar_size=200_000
)
# Blanks between the parts of JSON. A model that may begin new lines often goes on with blanks.
_ONE_LINE = " ?"
NAMES = {
    "json_object": "JSON mode",
    "json_schema": "JSON Schema",
    "grammar": "grammar",
    "regex": "regular expression",
}
_MAX_NAMED_TOOLS = 5  # Tools that a note names.


class GrammarTokens(msgspec.Struct, frozen=True, dict=True):
    """The parts of a vocabulary that writing and compiling grammars needs.

    ids: the special tokens by their text. ends: the tokens that end an answer. size: the number of tokens.
    bracketed, unusable: `ids` and `unusable` of the table.
    """

    ids: dict[str, int]
    ends: list[int] = []
    size: int = 0
    bracketed: dict[str, int] = {}
    unusable: list[int] = []

    @cached_property
    def table(self) -> TokenTable:
        """The tokens that GBNF may name, which may include other than special ones."""
        return TokenTable(self.size, self.bracketed, frozenset(self.unusable))

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
    constraint applies after thoughts that the prompt has opened, beside tools, or inside a message; otherwise
    it applies from the first token on. messages: the format of a model whose answer begins with a message.
    """

    tools: ToolSet | None = None
    constraint: Constraint | None = None
    thoughts: list[tuple[str, str]] = []
    gated: bool = False
    messages: CallFormat | None = None

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


def compile_source(tokenizer: LLTokenizer, source: str, name: str, param: str | None) -> LLMatcher:
    """Compile a source, which an error calls `name`. Raises GrammarRejected if it is not usable."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarRejected(f"The {name} is not usable: {reason(matcher)}", param=param)
    return matcher


def reason(matcher: LLMatcher) -> str:
    """Return the error of a matcher in one line."""
    return _one_line(matcher.get_error())


def _one_line(error: str) -> str:
    """Return an error of llguidance in one line: its first line, and the line with the cause.

    The first line gives the place; the cause follows after an excerpt of the grammar.
    """
    first, *following = error.strip().splitlines() or [""]
    cause = next((line.strip() for line in following if line.strip().startswith("error:")), "")
    return f"{first} {cause}".strip()[:300]


def build_sources(
    job: GrammarJob, special: GrammarTokens, tokenizer: LLTokenizer
) -> GrammarSources:
    """Write the grammars of a job, and compile each of them once.

    Raises:
        GrammarRejected: a grammar is not usable, or the schema of a strict tool cannot be enforced.
    """
    builder, constraint = _Builder(job, special, tokenizer), job.constraint
    if constraint is None:
        return builder.build("")
    source = constraint_source(constraint, special.table)
    if not job.gated:
        sources = GrammarSources(whole=builder.compiled(source, NAMES[constraint.kind]))
    else:
        if source.startswith("{"):
            source = json.loads(source)["grammars"][0]["lark_grammar"]
        sources = builder.build(f"%lark {{\n{source}\n}}")
    note = " ".join(filter(None, [sources.note, note_of(constraint)]))
    return msgspec.structs.replace(sources, note=note)


class _Builder:
    """A writer of grammars for an answer that may contain thoughts or calls."""

    def __init__(self, job: GrammarJob, special: GrammarTokens, tokenizer: LLTokenizer) -> None:
        self._job = job
        self._special = special
        self._tokenizer = tokenizer

    def compiled(self, source: str, name: str) -> str:
        """Return `source` after compiling it."""
        compile_source(self._tokenizer, source, name, self._job.param)
        return source

    def build(self, answer: str) -> GrammarSources:
        """Return the sources. answer: the rule of an answer that is not a call, or ""."""
        if self._job.tools is None:
            if (messages := self._job.messages) is not None:
                grammar = self._grammar(ToolSet(messages, {}), [], compact=True)
                return self._build_from_start(lambda _: grammar.write_message(answer))
            return self._build_from_start(
                lambda close: f"start: {self._thoughts_end(close)} answer\nanswer: {answer}"
            )
        tools, invalid, dropped = enforced_tools(self._job.tools)
        free, note = self._find_free_tools(tools, invalid)
        note = " ".join(filter(None, [dropped, note]))
        if tools.required or answer:
            grammar = self._grammar(tools, free, compact=True)
            ids = [self._special.ids.get(opening) for opening, _ in self._job.thoughts]
            sources = self._build_from_start(
                lambda close: grammar.write_whole("" if tools.required else answer, close)
            )
            may_think = [token for token in ids if token is not None]
            return msgspec.structs.replace(sources, may_think=may_think, note=note)

        def opened(marker: str) -> str:  # A call that the model may open in free text.
            return self.compiled(self._grammar(tools, free).write_opened(marker), "tools")

        markers = call_markers(tools.format, tools.schemas)
        return GrammarSources(
            gates=[GateSource(marker, opened(marker)) for marker in markers],
            bare=opened("") if tools.format.bare else None,
            single=not tools.parallel,
            note=note,
        )

    def _grammar(
        self, tools: ToolSet, free: Sequence[str], *, compact: bool = False
    ) -> CallGrammar:
        write = grammar_of(tools.format)
        return write(tools, self._special.lark_expression, json_rule, free, compact=compact)

    def _thoughts_end(self, closing_marker: str) -> str:
        return write_thoughts_end(closing_marker, self._special.lark_expression)

    def _build_from_start(self, write: Callable[[str], str]) -> GrammarSources:
        """Return grammars that apply from the beginning of the answer, or after thoughts.

        write: returns the grammar after a closing marker of thoughts, which is "" without thoughts.
        """
        return GrammarSources(
            first=self.compiled(write(""), "response format"),
            after=[
                GateSource(close, self.compiled(write(close), "tools"), last=True)
                for _, close in self._job.thoughts
            ],
        )

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
        if self._find_error(tools, list(free), "tools"):
            for name, schema in tools.schemas.items():
                tool = ToolSet(tools.format, {name: schema})
                if name not in free and (error := self._find_error(tool, [], "schema")):
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

    def _find_error(self, tools: ToolSet, free: Sequence[str], name: str) -> str:
        """Return why a schema of these tools cannot be enforced, or "" if all can."""
        markers = call_markers(tools.format, tools.schemas) or ("",)
        try:
            # One marker stands for all, except where the tool's name is part of it.
            for marker in markers if tools.format.recipient else markers[:1]:
                self.compiled(self._grammar(tools, free).write_opened(marker), name)
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
            raise _not_strict(f"parameters of the tool '{name}'", enforced.dropped, "tools")
        schemas[name] = enforced.schema
        if enforced.dropped:
            notes.append(f"of '{name}': {describe(enforced.dropped)}")
    note = "; ".join(notes[:_MAX_NAMED_TOOLS]) + "; …" * (len(notes) > _MAX_NAMED_TOOLS)
    note = f"Not enforced in the parameters {note}." if notes else ""
    return msgspec.structs.replace(tools, schemas=schemas), invalid, note


def _not_strict(what: str, dropped: tuple[Dropped, ...], param: str | None) -> GrammarRejected:
    return GrammarRejected(
        f"The {what} cannot be enforced as 'strict' asks. Not supported: {describe(dropped)}. "
        "Leave it out, or leave out 'strict'.",
        param=param,
    )


def constraint_source(constraint: Constraint, tokens: TokenTable = NO_TOKENS) -> str:
    """Return a constraint in llguidance's own format.

    Raises:
        GrammarRejected: the constraint is too long or invalid, or strict and not fully enforceable.
    """
    name, param = NAMES[constraint.kind], constraint.param
    if len(constraint.source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise GrammarRejected(
            f"The grammar is longer than {MAX_SOURCE_BYTES // 1024} KiB.", param=param
        )
    try:
        if constraint.kind == "regex":
            return str(LLMatcher.grammar_from_regex(constraint.source))
        if constraint.kind == "grammar":
            lark = gbnf_to_lark(constraint.source, tokens)
        else:
            lark = json_grammar(for_library(_enforced_constraint(constraint).schema), _ONE_LINE)
        return str(LLMatcher.grammar_from_lark(lark))
    except GrammarRejected:
        raise
    except RecursionError:
        raise GrammarRejected(f"The {name} is nested too deeply.", param=param) from None
    # llguidance documents ValueError, but may raise other exceptions.
    except Exception as error:
        cause = _one_line(str(error).strip() or type(error).__name__)
        raise GrammarRejected(f"The {name} is not usable: {cause}", param=param) from error


@lru_cache(maxsize=8)
def _enforced_constraint(constraint: Constraint) -> Enforced:
    """Reduce a constraint's schema to what can be enforced."""
    if constraint.kind == "json_object":
        return Enforced({"type": "object"})
    enforced = enforce(json.loads(constraint.source))
    if constraint.strict and enforced.dropped:
        raise _not_strict(NAMES[constraint.kind], enforced.dropped, constraint.param)
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
    if tools is None or tools.format.kind in ("hermes", "json", "mistral"):
        return True
    form = tools.format
    literals = "".join((*form.opens, form.lead, form.middle, form.again, form.close))
    is_tagged = bool(form.parameter or form.elements)
    return form.kind in ("named", "found") and not is_tagged and literals.count('"') % 2 == 0
