"""Count what happens to requests, for `status` and /metrics."""

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

# Bounds of the time to the first text, in seconds. Up to 0.05 s feels instant.
_FIRST_TEXT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Bounds of the draft tokens per pass. Only n-gram drafts are longer than 8.
_DEPTH_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)


@dataclass(slots=True)
class Histogram:
    """The number of values up to each bound, and last of those above all bounds."""

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
        """Return the median, interpolated between the bounds around it, or None if there are no values."""
        half, below = self.count / 2, 0
        for index, count in enumerate(self.counts[:-1]):
            if count and below + count >= half:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * (half - below) / count
            below += count
        return self.bounds[-1] if self.count else None


@dataclass(slots=True)
class Rate:
    """Tokens per second since the last `take`, 0 if there were none."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, milliseconds: float) -> None:
        self.tokens += tokens
        self.seconds += milliseconds / 1e3

    def take(self) -> float:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        self.tokens, self.seconds = 0, 0.0
        return rate


@dataclass(slots=True)
class TokenSums:
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class Metrics:
    """Sums since the daemon started. Positions count from 1, the first draft token of a pass.

    `totals` holds the figures that are sums. `figures` computes the others. `elsewhere` is the part of them
    that other servers answered, in passes that are not ours.
    """

    elsewhere: TokenSums = field(default_factory=TokenSums)

    counts: Counts = field(default_factory=Counts)
    totals: Figures = field(
        default_factory=lambda: Figures(cache_hits=dict.fromkeys(frames.CACHE_SOURCES, 0))
    )
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TEXT_BOUNDS_S))
    depths: Histogram = field(default_factory=lambda: Histogram(_DEPTH_BOUNDS))
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    plain_seconds: float = 0.0  # estimated time of the same tokens without drafts
    taken_seconds: float = 0.0  # actual time
    last_speed_up: float | None = None
    prompt_seconds: float = 0.0
    predicted_seconds: float = 0.0  # from the first token of each answer to the last
    longest: int = 0  # the most tokens of a prompt and its answer
    passes: int = 0  # of the target, for prompts and answers
    busy: int = 0  # the sum of the sequences in each pass
    prompt_rate: Rate = field(default_factory=Rate)
    predicted_rate: Rate = field(default_factory=Rate)

    @contextlib.contextmanager
    def watch(self, *, elsewhere: bool = False) -> Iterator[GenerationWatch]:
        """Count one generation, which begins now and ends with the block, here or on another server."""
        self.counts.requests += 1
        watch = GenerationWatch(self, elsewhere=elsewhere)
        try:
            yield watch
        except LocalspecError:
            self.counts.failed += 1
            watch.over = True
            raise
        finally:
            self.counts.cancelled += not watch.over

    def count_embeddings(self, tokens: Sequence[int]) -> None:
        """Count an answered request for vectors or a ranking. `tokens` are those of each text."""
        self.counts.embeddings += 1
        self.counts.embedded_texts += len(tokens)
        self.counts.embedded_tokens += sum(tokens)

    def figures(self, prompt_per_second: tuple[float, float] | None = None) -> Figures:
        """Return the figures for `localspec status`. `speed_up` compares all answers with plain decoding.

        prompt_per_second: at the beginning of a text, and at the end of a full context.
        """
        positions = range(1, max(self.drafted, default=0) + 1)
        median = self.time_to_first_token.median()
        return msgspec.structs.replace(
            self.totals,
            first_text_ms=None if median is None else median * 1e3,
            mean_depth=self.depths.sum / self.depths.count if self.depths.count else None,
            accepted_at=[
                self.accepted[position] / self.drafted[position] for position in positions
            ],
            speed_up=self.plain_seconds / self.taken_seconds if self.taken_seconds else None,
            prompt_per_second=prompt_per_second[0] if prompt_per_second else None,
            full_prompt_per_second=prompt_per_second[1] if prompt_per_second else None,
        )


@dataclass(slots=True)
class GenerationWatch:
    metrics: Metrics
    elsewhere: bool = False  # whether it runs on another server
    began: float = field(default_factory=time.monotonic)
    started: bool = False
    untold: bool = False  # the length of its prompt is reported at its end, as by another server
    shown: bool = False  # set once there is text
    over: bool = False  # set once it has ended

    def count_event(self, event: Event) -> bool:
        """Count an event. Return False for a second start, after the first worker died."""
        match event:
            case frames.Started() if self.started:
                return False
            case frames.Started():
                self.started = True
                self.untold = not event.prompt_tokens
                self._count_prompt(event.prompt_tokens, event.cached_tokens)
                if event.cache:
                    self.metrics.totals.cache_hits[event.cache] += 1
            case frames.Delta() if not self.shown:
                self.shown = True
                self.metrics.time_to_first_token.add(time.monotonic() - self.began)
            case frames.Done():
                self.over = True
                if self.untold:
                    self._count_prompt(event.prompt_tokens, event.timings.cache_n)
                self._count_answer(event)
        return True

    def _count_prompt(self, tokens: int, cached: int) -> None:
        self.metrics.totals.prompt_tokens += tokens
        self.metrics.totals.cached_tokens += cached
        if self.elsewhere:
            self.metrics.elsewhere.prompt += tokens
            self.metrics.elsewhere.cached += cached

    def _count_answer(self, event: frames.Done) -> None:
        metrics, counts, speculation = self.metrics, self.metrics.counts, event.speculation
        counts.tokens += event.completion_tokens
        counts.drafted += speculation.drafted
        counts.accepted += speculation.accepted
        metrics.rounds += speculation.rounds
        metrics.last_speed_up = speculation.speed_up or metrics.last_speed_up
        if speculation.speed_up:
            seconds = event.timings.predicted_ms / 1000
            metrics.taken_seconds += seconds
            metrics.plain_seconds += seconds * speculation.speed_up
            metrics.totals.measured_tokens += event.completion_tokens
        if self.elsewhere:  # its times are those of a network and of another machine
            metrics.elsewhere.generated += event.completion_tokens
            metrics.elsewhere.drafted += speculation.drafted
            metrics.elsewhere.accepted += speculation.accepted
            return
        timings = event.timings
        metrics.prompt_seconds += timings.prompt_ms / 1e3
        metrics.predicted_seconds += timings.predicted_ms / 1e3
        metrics.prompt_rate.add(timings.prompt_n, timings.prompt_ms)
        metrics.predicted_rate.add(max(timings.predicted_n - 1, 0), timings.predicted_ms)
        metrics.longest = max(metrics.longest, event.prompt_tokens + event.completion_tokens)
        metrics.passes += event.passes
        metrics.busy += event.busy
        for depth, passes in enumerate(event.depths):
            metrics.depths.add(depth, passes)
            metrics.drafted.update(dict.fromkeys(range(1, depth + 1), passes))
        for accepted, passes in enumerate(event.accepts):
            metrics.accepted.update(dict.fromkeys(range(1, accepted + 1), passes))
