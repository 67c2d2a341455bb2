"""Count the tokens that were read of each prompt, beside those that had to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.agents.sessions import Event
from localspec.engine.cache.prefixes import common_prefix


@dataclass(frozen=True, slots=True)
class Row:
    """One request. new: tokens that are new or stand behind a change; read: tokens that were read."""

    agent: str
    event: Event
    prompt: int
    new: int
    read: int


@dataclass(slots=True)
class Ledger:
    """All requests for one pair, in their order."""

    rows: list[Row] = field(default_factory=list)
    _texts: list[Sequence[int]] = field(default_factory=list)

    def add(
        self, agent: str, event: Event, prompt: Sequence[int], answer: Sequence[int], read: int
    ) -> Row:
        """Book a request of which `read` tokens were read.

        What any earlier prompt or its answer begins with is not new, except the last token, which is always
        read.
        """
        known = max((common_prefix(prompt, text) for text in self._texts), default=0)
        row = Row(agent, event, len(prompt), len(prompt) - min(known, len(prompt) - 1), read)
        self.rows.append(row)
        self._texts.append([*prompt, *answer])
        return row

    def forget_texts(self) -> None:
        """Begin anew: what comes now is sent to another server."""
        self._texts.clear()

    def totals(self) -> dict[Event, tuple[int, int]]:
        """Return the new tokens and those that were read, by event."""
        result: dict[Event, tuple[int, int]] = {}
        for row in self.rows:
            new, read = result.get(row.event, (0, 0))
            result[row.event] = new + row.new, read + row.read
        return result


def ratio(rows: Iterable[Row]) -> float:
    """Return how many tokens were read for each that had to be."""
    chosen = list(rows)
    return sum(row.read for row in chosen) / max(sum(row.new for row in chosen), 1)
