"""GET /metrics, in Prometheus' text format: our own names, then llama-server's for dashboards made for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from starlette.requests import Request
from starlette.responses import Response

from localspec.daemon.state import State, state_of
from localspec.daemon.worker.metrics import Histogram, Metrics
from localspec.protocol.answers import PairStatus, UpstreamStatus

_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def show(request: Request) -> Response:
    daemon = state_of(request)
    text = "\n".join([*_lines(daemon), *_as_llama_server(daemon)])
    began = str(int(time.time() - (time.monotonic() - daemon.started)))
    headers = {"content-type": _TYPE, "process-start-time-unix": began}
    return Response(text + "\n", media_type=None, headers=headers)


def _lines(daemon: State) -> Iterator[str]:
    supervisor = daemon.supervisor
    metrics, residents = supervisor.metrics, supervisor.residents
    counts, totals = metrics.counts, metrics.totals
    yield from _counter("requests_total", "Generations requested.", counts.requests)
    yield from _counter("requests_failed_total", "Generations that failed.", counts.failed)
    yield from _counter(
        "requests_cancelled_total", "Generations cancelled by the client.", counts.cancelled
    )
    yield from _gauge("requests_running", "Requests running.", residents.running())
    yield from _gauge("requests_waiting", "Generations waiting in the queue.", residents.waiting())
    yield from _histogram(
        "time_to_first_text_seconds",
        "Time from a request's arrival to its first text.",
        metrics.time_to_first_token,
    )
    yield from _counter("prompt_tokens_total", "Prompt tokens.", totals.prompt_tokens)
    yield from _counter(
        "cached_tokens_total", "Prompt tokens found in a cache.", totals.cached_tokens
    )
    yield from _counters(
        "cache_hits_total",
        "Prompts whose beginning was found in a cache.",
        "source",
        totals.cache_hits,
    )
    yield from _counter("generated_tokens_total", "Tokens generated.", counts.tokens)
    yield from _speculation(metrics)
    yield from _counter(
        "embedding_requests_total", "Requests for embeddings or rankings.", counts.embeddings
    )
    yield from _counter("embedded_texts_total", "Texts in them.", counts.embedded_texts)
    yield from _counter("embedded_tokens_total", "Tokens of those.", counts.embedded_tokens)
    yield from _counter("worker_starts_total", "Engine processes started.", counts.worker_starts)
    yield from _counter("worker_deaths_total", "Engine processes that died.", counts.worker_deaths)
    yield from _gauge("pair_loaded", "Whether a pair is loaded.", int(bool(residents.loaded)))
    yield from _pairs(residents.statuses())
    yield from _upstreams(supervisor.upstreams())
    yield from _gauge(
        "safe_mode", "Whether safe mode (slower kernels) is on.", int(residents.safe_mode.on)
    )


def _pairs(present: list[PairStatus]) -> Iterator[str]:
    """Of each that is in memory."""
    loaded = {_label(each.name): each for each in present if each.state == "ready"}
    yield from _gauge("pairs_loaded", "Pairs that are loaded.", len(loaded))
    figures = (
        ("pair_memory_bytes", "Memory planned for a pair.", "memory"),
        ("pair_loaded_since_seconds", "When a pair was loaded, Unix time.", "since"),
        ("pair_requests_running", "A pair's requests running.", "running"),
        ("pair_requests_waiting", "A pair's generations waiting in its queue.", "waiting"),
    )
    for name, text, key in figures:
        values = {pair: round(getattr(each, key) or 0) for pair, each in loaded.items()}
        yield from _counters(name, text, "pair", values, "gauge")


def _upstreams(asked: list[UpstreamStatus]) -> Iterator[str]:
    """Of each pair of another server that was asked. Of drafts those alone that a server has told of."""
    figures = (
        ("requests", "counter", "Requests for a pair of another server."),
        ("failed", "counter", "Those of them that failed."),
        ("fallbacks", "counter", "Those that another pair answered."),
        ("tokens", "counter", "Tokens that a server generated for us."),
        ("drafted", "counter", "Tokens that a server has told it drafted for us."),
        ("accepted", "counter", "Those of them that were accepted."),
        ("running", "gauge", "Requests that are running there."),
        ("away", "gauge", "Whether a server does not answer and is tried again."),
    )
    for key, kind, text in figures:
        values = {_label(each.name): int(getattr(each, key)) for each in asked}
        name = f"upstream_{key}{'_total' * (kind == 'counter')}"
        yield from _counters(name, text, "pair", values, kind)


def _label(text: str) -> str:
    """As a label's value: a pair may be named by a path, and that may have anything in it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _as_llama_server(daemon: State) -> Iterator[str]:
    """llama-server's names. As there, the rates are of the time since they were last asked for."""
    queue, metrics = daemon.supervisor.residents, daemon.supervisor.metrics
    counts, totals = metrics.counts, metrics.totals
    found = [
        ("counter", "prompt_tokens_total", "Prompt tokens processed, without cached ones.",
         totals.prompt_tokens - totals.cached_tokens + counts.embedded_tokens),
        ("counter", "prompt_tokens_cached_total", "Prompt tokens reused from a cache.",
         totals.cached_tokens),
        ("counter", "prompt_seconds_total", "Time until first tokens.", metrics.prompt_seconds),
        ("counter", "tokens_predicted_total", "Tokens generated.", counts.tokens),
        ("counter", "tokens_predicted_seconds_total", "Time from first tokens to last ones.",
         metrics.predicted_seconds),
        ("counter", "n_decode_total", "Target passes.", metrics.passes),
        ("counter", "n_tokens_max", "Longest prompt with its answer, in tokens.", metrics.longest),
        ("counter", "spec_decode_num_draft_tokens_total", "Tokens drafted.", counts.drafted),
        ("counter", "spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.",
         counts.accepted),
        ("counter", "spec_decode_num_drafts_total", "Target passes that verified drafts.",
         metrics.depths.count - metrics.depths.counts[0]),
        ("gauge", "prompt_tokens_seconds", "Prompt tokens per second.", metrics.prompt_rate.take()),
        ("gauge", "predicted_tokens_seconds", "Generated tokens per second.",
         metrics.predicted_rate.take()),
        ("gauge", "requests_processing", "Requests running.", queue.running()),
        ("gauge", "requests_deferred", "Generations waiting in the queue.", queue.waiting()),
        ("gauge", "n_busy_slots_per_decode", "Sequences in a target pass, on average.",
         metrics.busy / max(metrics.passes, 1)),
    ]  # fmt: skip
    for kind, name, text, value in found:
        yield from _head(f"llamacpp:{name}", kind, text)
        yield (
            f"llamacpp:{name} {value:g}" if isinstance(value, float) else f"llamacpp:{name} {value}"
        )
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    if metrics.accepted:
        yield from _head(name, "counter", "Accepted tokens by position in a pass.")
    for position, count in _by_position(metrics.accepted).items():
        yield f'{name}{{position="{int(position) - 1}"}} {count}'  # llama-server counts from 0


def _speculation(metrics: Metrics) -> Iterator[str]:
    counts = metrics.counts
    yield from _counter(
        "target_passes_total", "Target passes that generated tokens.", metrics.rounds
    )
    yield from _counter("drafted_tokens_total", "Tokens drafted.", counts.drafted)
    yield from _counter("accepted_tokens_total", "Drafted tokens accepted.", counts.accepted)
    yield from _counters(
        "drafted_at_total",
        "Drafted tokens by position in a pass.",
        "position",
        _by_position(metrics.drafted),
    )
    yield from _counters(
        "accepted_at_total",
        "Accepted tokens by position in a pass.",
        "position",
        _by_position(metrics.accepted),
    )
    yield from _histogram("draft_depth", "Drafts verified by a target pass.", metrics.depths)
    yield from _counter("generating_seconds_total", "Time spent generating.", metrics.taken_seconds)
    yield from _counter(
        "plain_seconds_total",
        "Estimated time for the same tokens without drafts.",
        metrics.plain_seconds,
    )
    if metrics.last_speed_up is not None:
        yield from _gauge(
            "speed_up", "Speed-up of the last answer over plain decoding.", metrics.last_speed_up
        )


def _counter(name: str, text: str, value: float, kind: str = "counter") -> Iterator[str]:
    yield from _head(f"localspec_{name}", kind, text)
    yield f"localspec_{name} {value:g}" if isinstance(value, float) else f"localspec_{name} {value}"


def _gauge(name: str, text: str, value: float) -> Iterator[str]:
    return _counter(name, text, value, "gauge")


def _counters(
    name: str, text: str, label: str, values: Mapping[str, int], kind: str = "counter"
) -> Iterator[str]:
    """One for each value of a label; nothing where there is none."""
    if values:
        yield from _head(f"localspec_{name}", kind, text)
    for value, count in values.items():
        yield f'localspec_{name}{{{label}="{value}"}} {count}'


def _histogram(name: str, text: str, values: Histogram) -> Iterator[str]:
    yield from _head(f"localspec_{name}", "histogram", text)
    total = 0
    for bound, count in zip((*values.bounds, "+Inf"), values.counts, strict=True):
        total += count
        yield f'localspec_{name}_bucket{{le="{bound}"}} {total}'
    yield f"localspec_{name}_sum {values.sum:.6f}"
    yield f"localspec_{name}_count {total}"


def _by_position(counts: Counter[int]) -> dict[str, int]:
    """Positions without a count are left out, as Prometheus likes it."""
    return {str(at): counts[at] for at in sorted(counts) if counts[at]}


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
