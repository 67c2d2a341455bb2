"""Handle GET /localspec/status, and POST /localspec/config, /load, /unload, /reset and /shutdown."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

import localspec
from localspec.daemon.http.requests import json_response, read_body
from localspec.daemon.http.sse import EventStream
from localspec.daemon.state import DaemonState, state_of
from localspec.daemon.worker import eviction
from localspec.daemon.worker.eviction import MIB
from localspec.daemon.worker.metrics import Histogram, Metrics
from localspec.daemon.worker.queue import Job
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.answers import Configured, PairStatus, Status, UpstreamStatus
from localspec.protocol.requests import LoadRequest

# ------------------------------------------------------------------------ description
# Handle GET /openapi.yaml.


async def openapi(_request: Request) -> Response:
    """Return the OpenAPI description of every endpoint."""
    text = resources.files("localspec").joinpath("openapi.yaml").read_bytes()
    return Response(text, media_type="application/yaml")


# ------------------------------------------------------------------------ metrics
# Handle GET /metrics in Prometheus' text format.
#
# localspec's own names come first, then llama-server's for dashboards that were made for it.


_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def show(request: Request) -> Response:
    """Handle GET /metrics."""
    daemon = state_of(request)
    upstreams = await _present_upstreams(daemon)
    text = "\n".join([*_own_lines(daemon, upstreams), *_llama_server_lines(daemon)])
    started = str(int(time.time() - (time.monotonic() - daemon.started)))
    headers = {"content-type": _CONTENT_TYPE, "process-start-time-unix": started}
    return Response(text + "\n", media_type=None, headers=headers)


async def _present_upstreams(daemon: DaemonState) -> list[UpstreamStatus]:
    """Return the status of the servers that were used and whose pairs are still in models.toml."""
    statuses = daemon.supervisor.upstreams()
    names = await asyncio.to_thread(lambda: daemon.registry.upstreams) if statuses else []
    return [status for status in statuses if status.name in names]


def _own_lines(daemon: DaemonState, upstreams: list[UpstreamStatus]) -> Iterator[str]:
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
    yield from _speculation_lines(metrics)
    yield from _counter(
        "embedding_requests_total", "Requests for embeddings or rankings.", counts.embeddings
    )
    yield from _counter("embedded_texts_total", "Texts in them.", counts.embedded_texts)
    yield from _counter("embedded_tokens_total", "Tokens of those.", counts.embedded_tokens)
    yield from _counter("worker_starts_total", "Engine processes started.", counts.worker_starts)
    yield from _counter("worker_deaths_total", "Engine processes that died.", counts.worker_deaths)
    yield from _gauge("pair_loaded", "Whether a pair is loaded.", int(bool(residents.loaded)))
    yield from _pair_lines(residents.statuses())
    yield from _upstream_lines(upstreams)
    yield from _gauge(
        "safe_mode", "Whether safe mode (slower kernels) is on.", int(residents.safe_mode.on)
    )


def _pair_lines(present: list[PairStatus]) -> Iterator[str]:
    """Yield the figures of every loaded pair."""
    loaded = {_escape_label(pair.name): pair for pair in present if pair.state == "ready"}
    yield from _gauge("pairs_loaded", "Pairs that are loaded.", len(loaded))
    figures = (
        ("pair_memory_bytes", "Memory planned for a pair.", "memory"),
        ("pair_loaded_since_seconds", "When a pair was loaded, Unix time.", "since"),
        ("pair_requests_running", "A pair's requests running.", "running"),
        ("pair_requests_waiting", "A pair's generations waiting in its queue.", "waiting"),
    )
    for name, description, field in figures:
        values = {label: round(getattr(status, field) or 0) for label, status in loaded.items()}
        yield from _counters(name, description, "pair", values, "gauge")


def _upstream_lines(upstreams: list[UpstreamStatus]) -> Iterator[str]:
    """Yield the figures of every pair of another server that was used; drafts only if it reports them."""
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
    for field, kind, description in figures:
        values = {
            _escape_label(upstream.name): int(getattr(upstream, field)) for upstream in upstreams
        }
        name = f"upstream_{field}{'_total' * (kind == 'counter')}"
        yield from _counters(name, description, "pair", values, kind)


def _escape_label(text: str) -> str:
    """Escape a label's value, since a pair may be named by a path that contains any character."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _llama_server_lines(daemon: DaemonState) -> Iterator[str]:
    """Yield llama-server's metrics; as there, rates cover the time since the last request for them.

    They are about the engine of this machine: what other servers answered is left out.
    """
    queue, metrics = daemon.supervisor.residents, daemon.supervisor.metrics
    counts, totals, elsewhere = metrics.counts, metrics.totals, metrics.elsewhere
    cached = totals.cached_tokens - elsewhere.cached
    samples = [
        ("counter", "prompt_tokens_total", "Prompt tokens processed, without cached ones.",
         totals.prompt_tokens - elsewhere.prompt - cached + counts.embedded_tokens),
        ("counter", "prompt_tokens_cached_total", "Prompt tokens reused from a cache.", cached),
        ("counter", "prompt_seconds_total", "Time until first tokens.", metrics.prompt_seconds),
        ("counter", "tokens_predicted_total", "Tokens generated.",
         counts.tokens - elsewhere.generated),
        ("counter", "tokens_predicted_seconds_total", "Time from first tokens to last ones.",
         metrics.predicted_seconds),
        ("counter", "n_decode_total", "Target passes.", metrics.passes),
        ("counter", "n_tokens_max", "Longest prompt with its answer, in tokens.", metrics.longest),
        ("counter", "spec_decode_num_draft_tokens_total", "Tokens drafted.",
         counts.drafted - elsewhere.drafted),
        ("counter", "spec_decode_num_accepted_tokens_total", "Drafted tokens accepted.",
         counts.accepted - elsewhere.accepted),
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
    for kind, name, text, value in samples:
        yield from _head(f"llamacpp:{name}", kind, text)
        yield f"llamacpp:{name} {value}"
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    if metrics.accepted:
        yield from _head(name, "counter", "Accepted tokens by position in a pass.")
    for position, count in _by_position(metrics.accepted).items():
        yield f'{name}{{position="{int(position) - 1}"}} {count}'  # llama-server counts from 0


def _speculation_lines(metrics: Metrics) -> Iterator[str]:
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
    yield f"localspec_{name} {value}"


def _gauge(name: str, text: str, value: float) -> Iterator[str]:
    return _counter(name, text, value, "gauge")


def _counters(
    name: str, text: str, label: str, values: Mapping[str, int], kind: str = "counter"
) -> Iterator[str]:
    """Yield one sample for each value of a label; nothing if there is no value."""
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
    """Return the counts by position as strings, without zeros, as Prometheus recommends."""
    return {str(position): counts[position] for position in sorted(counts) if counts[position]}


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


# ------------------------------------------------------------------------ control


# A pair that was never read before is hashed first, and the answer of /config does not wait longer for it.
_COSTS_TIMEOUT_S = 5.0


async def status(request: Request) -> Response:
    """Handle GET /localspec/status."""
    daemon = state_of(request)
    supervisor, residents = daemon.supervisor, daemon.supervisor.residents
    recent = residents.most_recent()
    configured = daemon.config.pair
    if configured not in {pair.name for pair in residents.present}:  # it may be an alias
        configured = await asyncio.to_thread(daemon.registry.listed_name, configured)
    return json_response(
        Status(
            version=localspec.__version__,
            api_version=localspec.API_VERSION,
            pid=os.getpid(),
            uptime=time.monotonic() - daemon.started,
            pair=recent.status(),
            running=residents.running(),
            waiting=residents.waiting(),
            queue_limit=daemon.config.queue,
            worker_pid=recent.worker.pid if recent.worker else None,
            safe_mode=residents.safe_mode.on,
            draining=daemon.draining,
            counts=supervisor.metrics.counts,
            figures=supervisor.figures(),
            ahead=recent.admission.ahead(Job()),
            socket=str(daemon.paths.socket),
            log=str(daemon.paths.log),
            pulls=len(daemon.registry.running_pulls),
            hashing=daemon.registry.hashing,
            problems=daemon.problems,
            listen=daemon.tcp.url if daemon.tcp else None,
            token_file=str(daemon.paths.token) if daemon.tcp else None,
            pairs=residents.statuses(),
            upstreams=await _present_upstreams(daemon),
            memory=daemon.config.memory * MIB or None,
            configured=configured,
        )
    )


async def shutdown(request: Request) -> Response:
    """Drain and end like SIGTERM, and name the pulls that the next daemon resumes."""
    daemon = state_of(request)
    pulls = daemon.registry.running_pulls
    daemon.stop()
    return json_response({"status": "draining", "pulls": pulls})


async def reset(request: Request) -> Response:
    """Handle POST /localspec/reset."""
    state_of(request).supervisor.residents.reset()
    return json_response({"status": "ok"})


async def configure(request: Request) -> Response:
    """Read config.toml again; requests that arrive after the answer use the new configuration.

    The answer contains the problems of the file and what the configuration costs on this machine.
    """
    daemon = state_of(request)
    await daemon.configure()
    config = daemon.config
    return json_response(
        Configured(
            problems=daemon.problems,
            notes=await _costs(daemon, request),
            origin={key: source for key, source in config.origin.items() if _not_a_file(source)},
            listen=daemon.tcp.url if daemon.tcp else None,
            token_file=str(daemon.paths.token) if daemon.tcp else None,
        )
    )


def _not_a_file(source: str) -> bool:
    return source == "flag" or source.startswith("LOCALSPEC_")


async def _costs(daemon: DaemonState, request: Request) -> list[str]:
    """Return which settings this machine cannot give the pair; [] if that takes too long to find out."""
    workers = daemon.supervisor.residents.pids
    settings = eviction.engine_settings(daemon.config, daemon.paths)
    try:
        async with asyncio.timeout(_COSTS_TIMEOUT_S):
            pair = await daemon.resolve_pair("", request.receive)
            if pair.upstream is not None:
                return []
            return await asyncio.to_thread(eviction.setting_notes, pair, settings, workers)
    except (TimeoutError, LocalspecError):  # The next request for an answer reports the error.
        return []


async def load(request: Request) -> Response:
    """Load a pair; if memory is full, other pairs are unloaded once they have answered.

    Events: the pair's status at once and whenever it changes, and at last that it is ready or why not. A
    request that is refused before anything was tried (an unknown pair, one that was set aside) has an error
    status.
    """
    body = await read_body(request, LoadRequest)
    daemon = state_of(request)
    pair = await daemon.resolve_pair(body.model, request.receive)
    if pair.upstream is not None:
        return EventStream(partial(_nothing_to_load, await daemon.supervisor.ready(pair)))
    return EventStream(partial(daemon.supervisor.residents.get(pair.name).load, pair))


async def _nothing_to_load(
    info: frames.Loaded, report: Callable[[PairStatus], Awaitable[None]]
) -> None:
    """Report a pair of another server as ready; that server is only contacted when a request comes."""
    target, backend = info.target_description, info.backend
    await report(PairStatus(info.name, "ready", target=target, n_ctx=info.n_ctx, backend=backend))


async def unload(request: Request) -> Response:
    """Free the memory of one pair, or of all pairs without a name; the status is 409 while one is busy.

    Raises:
        ModelNotFound: there is no such pair.
    """
    daemon = state_of(request)
    body = await read_body(request, LoadRequest, empty=LoadRequest())
    name = None
    if body.model:
        name = (await daemon.resolve_named(body.model, request.receive)).name
    pairs = await daemon.supervisor.unload_idle(name)
    return json_response({"unloaded": bool(pairs), "pairs": pairs})
