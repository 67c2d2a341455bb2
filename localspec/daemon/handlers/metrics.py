"""GET /metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.state import Context, context
from localspec.daemon.worker.metrics import by_position, counter, counters, gauge

_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def show(request: Request) -> Response:
    text = "\n".join(_lines(context(request)))
    return Response(text + "\n", media_type=None, headers={"content-type": _TYPE})


def _lines(daemon: Context) -> Iterator[str]:
    supervisor = daemon.supervisor
    metrics, queue, loaded = supervisor.metrics, supervisor.admission, supervisor.loaded
    counts, totals = metrics.counts, metrics.totals
    yield from counter("requests_total", "Generations asked for.", counts.requests)
    yield from counter("requests_failed_total", "Of them, those that failed.", counts.failed)
    yield from counter("requests_cancelled_total", "Of them, those left early.", counts.cancelled)
    yield from gauge("requests_running", "Generations at work.", queue.running)
    yield from gauge("requests_waiting", "Generations in the queue.", queue.waiting)
    yield from metrics.time_to_first_token.lines(
        "time_to_first_text_seconds", "From a request's arrival to its first text."
    )
    yield from counter("prompt_tokens_total", "Tokens of prompts.", totals.prompt_tokens)
    yield from counter("cached_tokens_total", "Of them, found in a cache.", totals.cached_tokens)
    yield from counters(
        "cache_hits_total", "Prompts that began in a cache.", "source", totals.cache_hits
    )
    yield from counter("generated_tokens_total", "Tokens generated.", counts.tokens)
    yield from counter("target_passes_total", "Target passes that made them.", metrics.rounds)
    yield from counter("drafted_tokens_total", "Tokens drafted.", counts.drafted)
    yield from counter("accepted_tokens_total", "Of them, accepted.", counts.accepted)
    yield from counters(
        "drafted_at_total", "By place in a pass.", "position", by_position(metrics.drafted)
    )
    yield from counters(
        "accepted_at_total", "Of them, accepted.", "position", by_position(metrics.accepted)
    )
    yield from metrics.depths.lines("draft_depth", "Drafts verified by a target pass.")
    yield from counter("generating_seconds_total", "Time spent generating.", metrics.taken_seconds)
    yield from counter(
        "plain_seconds_total", "Time the same tokens take without drafts.", metrics.plain_seconds
    )
    if metrics.last_speed_up is not None:
        yield from gauge("speed_up", "Of the last answer, over plain.", metrics.last_speed_up)
    yield from counter("worker_starts_total", "Engine processes started.", counts.worker_starts)
    yield from counter("worker_deaths_total", "Engine processes that died.", counts.worker_deaths)
    yield from gauge("pair_loaded", "Whether a pair is loaded.", int(loaded.info is not None))
    yield from gauge("safe_mode", "Whether slower kernels are used.", int(loaded.safe_mode.on))
