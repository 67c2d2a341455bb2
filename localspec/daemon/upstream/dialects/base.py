"""What is the same for all servers of OpenAI's shapes, and what a kind of them may say otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localspec.protocol import frames

Body = dict[str, Any]

# OpenAI's own parameters, under our names.
SAMPLING = {
    name: name for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
}


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server has counted since it started: of all requests, whoever sent them."""

    tokens: int  # generated
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """What is said of one answer. Its passes need no telling: each gives a token beside those it accepts,
    also one that found nothing to draft. `accepts[n]`: passes that accepted n drafts.
    """

    drafted: int
    accepted: int
    accepts: list[int] = field(default_factory=list)


class Dialect:
    """A server of OpenAI's shapes of which no more is known.

    sampling: our names of parameters, and its own. constraints: the kinds that it can hold an answer to.
    known: further fields of a request that it has under our names. native: it has llama-server's own paths.
    names_tools: a tool that must be called can be named. names_tokens: it has `return_token_ids`.
    """

    kind = "openai"
    name = "server"
    owners: tuple[str, ...] = ()  # what `owned_by` of its models says
    sampling: Mapping[str, str] = SAMPLING
    constraints: frozenset[str] = frozenset({"json_object", "json_schema"})
    text_constraints: frozenset[str] = frozenset()  # of a text that is no chat
    known: frozenset[str] = frozenset()
    native = False
    bias_of_texts = False
    template_kwargs = False
    names_tools = True
    names_tokens = False
    metrics = ""  # the path of what `counters` reads, from its root

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        """Ask for an answer in a language of `constraints`; `schema`: of a JSON schema, the object."""
        if constraint.kind == "json_object":
            body["response_format"] = {"type": "json_object"}
        else:
            named = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}

    def goes_on(self, body: Body, part: str) -> bool:
        """Have the answer go on with the last message; whether that can be asked for."""
        return False

    def more(self, body: Body, request: frames.Generate) -> None:
        """What it alone is told."""

    def spoken(self, chunk: Mapping[str, Any]) -> Spoken | None:
        """What a chunk of the end says of the speculation behind its answer."""
        return None

    def counters(self, text: str) -> Counters | None:
        """What its metrics say."""
        return None


def counted(text: str, name: str) -> int | None:
    """The sum of a counter of Prometheus' format, whatever its labels."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    ]
    return int(sum(values)) if values else None


def whole(value: object) -> int | None:
    """A count, where it is one."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 53
    return int(value) if good else None  # type: ignore[call-overload]
