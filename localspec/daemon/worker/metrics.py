"""What the daemon counts of its requests, for `status` and /metrics."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from localspec.daemon.worker.process import Event
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.answers import Counts, Figures

# Seconds until the first text; 0.05 s is what feels instant.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Drafted tokens of a pass; beyond the model's own depths only lookup goes.
_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)


@dataclass(slots=True)
class Histogram:
    """Counts of values up to each bound, the last of those beyond all."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def median(self) -> float | None:
        """Between the bounds it lies in, by linear interpolation; None of nothing."""
        half, before = self.count / 2, 0
        for at, count in enumerate(self.counts[:-1]):
            if count and before + count >= half:
                low = self.bounds[at - 1] if at else 0.0
                return low + (self.bounds[at] - low) * (half - before) / count
            before += count
        return self.bounds[-1] if self.count else None


@dataclass(slots=True)
class Rate:
    """Tokens per second since it was last asked for, 0 where there were none."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, milliseconds: float) -> None:
        self.tokens += tokens
        self.seconds += milliseconds / 1e3

    def take(self) -> float:
        found = self.tokens / self.seconds if self.seconds else 0.0
        self.tokens, self.seconds = 0, 0.0
        return found


@dataclass
class Metrics:
    """Sums since the daemon started. Positions count from 1, the first draft of a pass.

    `totals` has those figures that are sums; `figures` works out the others.
    """

    counts: Counts = field(default_factory=Counts)
    totals: Figures = field(
        default_factory=lambda: Figures(cache_hits=dict.fromkeys(frames.CACHES, 0))
    )
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    depths: Histogram = field(default_factory=lambda: Histogram(_DEPTHS))
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    plain_seconds: float = 0.0  # what the same tokens would have taken without drafts
    taken_seconds: float = 0.0
    last_speed_up: float | None = None
    prompt_seconds: float = 0.0
    predicted_seconds: float = 0.0  # from each answer's first token to its last
    longest: int = 0  # tokens of a prompt and its answer
    passes: int = 0  # of the target, for prompts and for answers
    busy: int = 0  # the sequences in them
    prompt_rate: Rate = field(default_factory=Rate)
    predicted_rate: Rate = field(default_factory=Rate)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """Count one generation, which begins now and ends with the body."""
        self.counts.requests += 1
        watch = Watch(self)
        try:
            yield watch
        except LocalspecError:
            self.counts.failed += 1
            watch.over = True
            raise
        finally:
            self.counts.cancelled += not watch.over

    def embedded(self, tokens: Sequence[int]) -> None:
        """A request for vectors or a ranking was answered; of how many tokens each of its texts is."""
        self.counts.embeddings += 1
        self.counts.embedded_texts += len(tokens)
        self.counts.embedded_tokens += sum(tokens)

    def figures(self) -> Figures:
        """For `localspec status`; `speed_up` is of all answers together, over plain decoding."""
        positions = range(1, max(self.drafted, default=0) + 1)
        median = self.time_to_first_token.median()
        return msgspec.structs.replace(
            self.totals,
            first_text_ms=None if median is None else median * 1e3,
            mean_depth=self.depths.sum / self.depths.count if self.depths.count else None,
            accepted_at=[self.accepted[at] / self.drafted[at] for at in positions],
            speed_up=self.plain_seconds / self.taken_seconds if self.taken_seconds else None,
        )


@dataclass(slots=True)
class Watch:
    """One generation. `shown` once there is text, `over` once it has ended. `untold`: how long its prompt is
    comes with its end, as of another server.
    """

    metrics: Metrics
    began: float = field(default_factory=time.monotonic)
    started: bool = False
    untold: bool = False
    shown: bool = False
    over: bool = False

    def sees(self, event: Event) -> bool:
        """Count an event; False where it has been before, for the worker that was tried first."""
        match event:
            case frames.Started() if self.started:
                return False
            case frames.Started():
                self.started = True
                self.untold = not event.prompt_tokens
                self._prompted(event.prompt_tokens, event.cached_tokens)
                if event.cache:
                    self.metrics.totals.cache_hits[event.cache] += 1
            case frames.Delta() if not self.shown:
                self.shown = True
                self.metrics.time_to_first_token.add(time.monotonic() - self.began)
            case frames.Done():
                self.over = True
                if self.untold:
                    self._prompted(event.prompt_tokens, event.timings.cache_n)
                self._done(event)
            case _:
                pass
        return True

    def _prompted(self, tokens: int, cached: int) -> None:
        self.metrics.totals.prompt_tokens += tokens
        self.metrics.totals.cached_tokens += cached

    def _done(self, event: frames.Done) -> None:
        metrics, counts, done = self.metrics, self.metrics.counts, event.speculation
        counts.tokens += event.completion_tokens
        counts.drafted += done.drafted
        counts.accepted += done.accepted
        metrics.rounds += done.rounds
        metrics.last_speed_up = done.speed_up or metrics.last_speed_up
        if done.speed_up:
            seconds = event.timings.predicted_ms / 1000
            metrics.taken_seconds += seconds
            metrics.plain_seconds += seconds * done.speed_up
            metrics.totals.measured_tokens += event.completion_tokens
        times = event.timings
        metrics.prompt_seconds += times.prompt_ms / 1e3
        metrics.predicted_seconds += times.predicted_ms / 1e3
        metrics.prompt_rate.add(times.prompt_n, times.prompt_ms)
        metrics.predicted_rate.add(max(times.predicted_n - 1, 0), times.predicted_ms)
        metrics.longest = max(metrics.longest, event.prompt_tokens + event.completion_tokens)
        metrics.passes += event.passes
        metrics.busy += event.busy
        for depth, passes in enumerate(event.depths):
            metrics.depths.add(depth, passes)
            metrics.drafted.update(dict.fromkeys(range(1, depth + 1), passes))
        for accepted, passes in enumerate(event.accepts):
            metrics.accepted.update(dict.fromkeys(range(1, accepted + 1), passes))
