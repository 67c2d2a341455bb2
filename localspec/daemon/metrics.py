"""What the daemon counts beside its status, and all of it in Prometheus' text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from localspec.protocol import frames

# Seconds until the first text; 0.05 s is what feels instant.
_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Metrics:
    """Sums since the daemon started."""

    first_text: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    first_text_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    plain_seconds: float = 0.0  # what the same tokens would have taken without drafts
    taken_seconds: float = 0.0
    last_speed_up: float | None = None

    def begin(self) -> Watch:
        """Watch one request, from now."""
        return Watch(self, time.monotonic())


@dataclass
class Watch:
    """One request."""

    metrics: Metrics
    began: float
    shown: bool = False

    def saw(self, event: frames.Started | frames.Delta | frames.Done) -> None:
        metrics = self.metrics
        match event:
            case frames.Started():
                metrics.prompt_tokens += event.prompt_tokens
                metrics.cached_tokens += event.cached_tokens
            case frames.Delta() if not self.shown:
                self.shown = True
                waited = time.monotonic() - self.began
                metrics.first_text[bisect_left(_BOUNDS, waited)] += 1
                metrics.first_text_seconds += waited
            case frames.Done():
                done = event.speculation
                metrics.rounds += done.rounds
                metrics.last_speed_up = done.speed_up or metrics.last_speed_up
                if done.speed_up:
                    seconds = event.timings.predicted_ms / 1000
                    metrics.taken_seconds += seconds
                    metrics.plain_seconds += seconds * done.speed_up
            case _:
                pass


def counter(name: str, text: str, value: float) -> Iterator[str]:
    yield from _one(name, "counter", text, value)


def gauge(name: str, text: str, value: float) -> Iterator[str]:
    yield from _one(name, "gauge", text, value)


def _one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP localspec_{name} {text}"
    yield f"# TYPE localspec_{name} {kind}"
    yield f"localspec_{name} {value:g}" if isinstance(value, float) else f"localspec_{name} {value}"


def first_text(metrics: Metrics) -> Iterator[str]:
    """The histogram of times to the first text."""
    name = "localspec_time_to_first_text_seconds"
    yield f"# HELP {name} From a request's arrival to its first text."
    yield f"# TYPE {name} histogram"
    total = 0
    for bound, count in zip((*_BOUNDS, "+Inf"), metrics.first_text, strict=True):
        total += count
        yield f'{name}_bucket{{le="{bound}"}} {total}'
    yield f"{name}_sum {metrics.first_text_seconds:.6f}"
    yield f"{name}_count {total}"
