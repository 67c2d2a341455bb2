"""What is compared: settings, and what one run of a setting gave."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.errors import LocalspecError

WARM_TOKENS = 24  # generated before a measurement, and not counted


class BenchError(LocalspecError):
    """A run that did not come to its end; there is nothing to compare then."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How to decode. depth 0 is plain, None lets the policy decide (our engine only)."""

    depth: int | None
    server: bool = False  # llama-server's, not ours

    @property
    def name(self) -> str:
        """Short and unique: `plain`, `3`, `auto`, `server plain`, `server 3`."""
        short = {0: "plain", None: "auto"}.get(self.depth, str(self.depth))
        return f"server {short}" if self.server else short


PLAIN, AUTO = Setting(0), Setting(None)


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    speed: tokens per second from the first token on, as llama-server counts (`predicted_per_second`).
    speed_after: the same for the tokens after the first `skip`; None where it is not known.
    python_share: share of the rounds' time outside llama.cpp, python_ms: the same per round.
    others: cores that other processes kept busy meanwhile.
    """

    setting: str
    repetition: int
    tokens: int
    correct: bool
    speed: float
    speed_after: float | None = None
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    python_share: float | None = None
    python_ms: float | None = None
    others: float | None = None
