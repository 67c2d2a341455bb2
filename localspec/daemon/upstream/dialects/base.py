"""What all servers in OpenAI's shape have in common, and what a kind of server may override."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localspec.protocol import frames

Body = dict[str, Any]

# OpenAI's sampling parameters: our name of each, and the server's.
SAMPLING = {
    name: name for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
}


@dataclass(frozen=True, slots=True)
class Counters:
    """The counts of a server since its start, over the requests of all clients."""

    tokens: int  # generated
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """The draft tokens of one answer.

    The number of passes follows from them: each pass adds one token to those that it accepts, also if nothing
    was drafted. `accepts[n]` is the number of passes that accepted n draft tokens.
    """

    drafted: int
    accepted: int
    accepts: list[int] = field(default_factory=list)


class Dialect:
    """A server in OpenAI's shape about which no more is known.

    sampling: our names of sampling parameters, and the server's.
    constraints: the kinds of constraints that the server supports.
    known: further fields of a request that the server has under our names.
    native: whether it has llama-server's own paths.
    names_tools: whether a request can require one tool by name.
    names_tokens: whether it has `return_token_ids`.
    """

    kind = "openai"
    name = "server"
    owners: tuple[str, ...] = ()  # values of `owned_by` in its list of models
    sampling: Mapping[str, str] = SAMPLING
    constraints: frozenset[str] = frozenset({"json_object", "json_schema"})
    text_constraints: frozenset[str] = frozenset()  # for a text that is not a chat
    known: frozenset[str] = frozenset()
    native = False
    bias_of_texts = False
    template_kwargs = False
    names_tools = True
    names_tokens = False
    metrics = ""  # the path of the metrics that `counters` parses, from the server's root

    def constrain(self, body: Body, constraint: frames.Constraint, schema: Any) -> None:
        """Add a constraint to the body. `schema` is the object of a JSON schema."""
        if constraint.kind == "json_object":
            body["response_format"] = {"type": "json_object"}
        else:
            response_schema = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": response_schema}

    def goes_on(self, body: Body, part: str) -> bool:
        """Make the answer continue the last message. Return whether the server supports that."""
        return False

    def more(self, body: Body, request: frames.Generate) -> None:
        """Add the fields that only this kind of server knows."""

    def spoken(self, chunk: Mapping[str, Any]) -> Spoken | None:
        """Return the draft tokens that a chunk at the end of an answer reports."""
        return None

    def counters(self, text: str) -> Counters | None:
        """Parse the server's metrics."""
        return None


def counted(text: str, name: str) -> int | None:
    """Return the sum of a counter over all labels, in Prometheus' text format."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    ]
    return int(sum(values)) if values else None


def whole(value: object) -> int | None:
    """Return a non-negative count as an int, or None if `value` is not one."""
    is_count = (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 53
    )
    return int(value) if is_count else None  # type: ignore[call-overload]
