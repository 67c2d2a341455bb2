"""Which grammars hold where in a request's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from llguidance import LLMatcher

from localspec.engine.sampling.grammars.calls import CallGrammar, after
from localspec.engine.sampling.grammars.gates import Gate, Pieces, Plan
from localspec.errors import GrammarRejected
from localspec.protocol.calls import Tools

MAX_TOOL = 128 * 1024  # bytes of a tool's schema
MAX_TOOLS = 1024 * 1024  # of all together; 50 of 4 KiB each take a quarter of a second


class Plans:
    """Makes a plan for requests that differ in nothing it depends on.

    compiled: a grammar's matcher and what to call it where it is refused. thoughts: the markers around
    them, of models that think.
    """

    def __init__(
        self,
        compiled: Callable[[str, str], LLMatcher],
        pieces: Pieces,
        thoughts: Sequence[tuple[str, str]],
    ) -> None:
        self._compiled = compiled
        self._pieces = pieces
        self._thoughts = thoughts
        self._marks = [(opening.encode(), close.encode()) for opening, close in thoughts]

    def plan(self, tools: Tools | None, answer: str) -> tuple[Plan, str]:
        """The plan, and what a person should know of it. answer: the rule of an answer that is no call.

        Raises:
            GrammarRejected: a grammar is not usable, or a tool's schema that must hold.
        """
        if tools is None:
            return self._first(lambda before: _answer(answer, before, self._pieces)), ""
        free, note = self._free(tools)
        if tools.required or answer:
            grammar = CallGrammar(tools, self._pieces.spelled, free, compact=True)
            either = "" if tools.required else answer
            thinks = [self._pieces.special(opening) for opening, _ in self._thoughts]
            tokens = [token for token in thinks if token is not None]
            return self._first(lambda before: grammar.whole(either, before), tokens), note
        return self._on_its_own(tools, free), note

    def _first(self, grammar: Callable[[str], str], may_think: Sequence[int] = ()) -> Plan:
        """One that holds from the beginning on, after thoughts."""
        gates = {
            close.encode(): self._gate(close, grammar(close), last=True)
            for _, close in self._thoughts
        }
        first = self._compiled(grammar(""), "response format")
        return Plan(self._marks, first, may_think, gates)

    def _on_its_own(self, tools: Tools, free: Sequence[str]) -> Plan:
        """Calls that the model opens, or does not."""
        format = tools.format
        gates = []
        for marker in format.opens:
            source = CallGrammar(tools, self._pieces.spelled, free).opened(marker)
            gates.append(self._gate(marker, source))
        bare = None
        if format.bare:
            source = CallGrammar(tools, self._pieces.spelled, free).opened("")
            bare = self._compiled(source, "tools")
        braces = self._pieces.where(lambda piece: piece.lstrip().startswith(b"{"))
        return Plan(self._marks, gates=gates, bare=bare, braces=braces, single=not tools.parallel)

    def _gate(self, marker: str, source: str, *, last: bool = False) -> Gate:
        grammar = self._compiled(source, "tools")
        inside = self._pieces.where(lambda piece: marker.encode() in piece)
        wrong = [token for token in inside if grammar.validate_tokens([token]) < 1]
        return Gate(marker.encode(), grammar, wrong, last)

    # ------------------------------------------------------------------------ what cannot hold

    def _free(self, tools: Tools) -> tuple[list[str], str]:
        """Tools whose arguments can only be held to be an object, and that in a sentence.

        Raises:
            GrammarRejected: one of them must hold.
        """
        sizes = {name: len(msgspec.json.encode(schema)) for name, schema in tools.schemas.items()}
        free = {name: "it is too long" for name, size in sizes.items() if size > MAX_TOOL}
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
            source = CallGrammar(tools, self._pieces.spelled, free).opened(_marker(tools))
            self._compiled(source, "tools")
        except (GrammarRejected, RecursionError, ValueError):
            return False
        return True

    def _why_not(self, tools: Tools, name: str, schema: object) -> str:
        """Why a tool's schema cannot hold; "": it can."""
        one = Tools(tools.format, {name: schema})
        try:
            source = CallGrammar(one, self._pieces.spelled).opened(_marker(tools))
            self._compiled(source, "schema")
        except RecursionError:
            return "it is nested too deeply."
        except (GrammarRejected, ValueError) as error:
            return str(error)
        return ""


def _marker(tools: Tools) -> str:
    return tools.format.opens[0] if tools.format.opens else ""


def _answer(rule: str, before: str, pieces: Pieces) -> str:
    return f"start: {after(before, pieces.spelled)} answer\nanswer: {rule}"
