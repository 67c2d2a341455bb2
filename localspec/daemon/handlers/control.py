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
from localspec.daemon.worker.metrics import Histogram, Metrics
from localspec.daemon.worker.plan import MIB, engine_settings, setting_notes
from localspec.daemon.worker.queue import Job
from localspec.errors import LocalspecError
from localspec.protocol import frames
from localspec.protocol.answers import Configured, PairStatus, Status, UpstreamStatus
from localspec.protocol.requests import LoadRequest

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A pair that was never read before is hashed first, and the answer of /config does not wait longer for it.
_COSTS_TIMEOUT_S = 5.0


async def openapi(_request: Request) -> Response:
    """Return the OpenAPI description of every endpoint."""
    text = resources.files("localspec").joinpath("openapi.yaml").read_bytes()
    return Response(text, media_type="application/yaml")


Sample = tuple[str, str, str, float]  # kind, name, description, value


async def show(request: Request) -> Response:
    """Handle GET /metrics in Prometheus' text format.

    localspec's own names come first, then llama-server's for dashboards that were made for it.
    """
    daemon = state_of(request)
    upstreams = await _present_upstreams(daemon)
    text = "\n".join([*_own_lines(daemon, upstreams), *_llama_server_lines(daemon)])
    started = str(int(time.time() - (time.monotonic() - daemon.started)))
    headers = {"content-type": _METRICS_TYPE, "process-start-time-unix": started}
    return Response(text + "\n", media_type=None, headers=headers)


async def _present_upstreams(daemon: DaemonState) -> list[UpstreamStatus]:
    """Return the status of the servers that were used and whose pairs are still in models.toml."""
    statuses = daemon.pairs.upstreams()
    names = await asyncio.to_thread(lambda: daemon.registry.upstreams) if statuses else []
    return [status for status in statuses if status.name in names]


def _own_lines(daemon: DaemonState, upstreams: list[UpstreamStatus]) -> Iterator[str]:
    table, metrics = daemon.pairs, daemon.pairs.metrics
    counts, totals = metrics.counts, metrics.totals
    yield from _samples(
        ("counter", "requests_total", "Generations requested.", counts.requests),
        ("counter", "requests_failed_total", "Generations that failed.", counts.failed),
        ("counter", "requests_cancelled_total", "Generations cancelled by the client.",
         counts.cancelled),
        ("gauge", "requests_running", "Requests running.", table.running()),
        ("gauge", "requests_waiting", "Generations waiting in the queue.", table.waiting()),
    )  # fmt: skip
    text = "Time from a request's arrival to its first text."
    yield from _histogram("time_to_first_text_seconds", text, metrics.time_to_first_token)
    text = "Prompt tokens found in a cache."
    yield from _samples(
        ("counter", "prompt_tokens_total", "Prompt tokens.", totals.prompt_tokens),
        ("counter", "cached_tokens_total", text, totals.cached_tokens),
    )
    text = "Prompts whose beginning was found in a cache."
    yield from _labelled("cache_hits_total", text, "source", totals.cache_hits)
    yield from _samples(("counter", "generated_tokens_total", "Tokens generated.", counts.tokens))
    yield from _speculation_lines(metrics)
    yield from _samples(
        ("counter", "embedding_requests_total", "Requests for embeddings or rankings.",
         counts.embeddings),
        ("counter", "embedded_texts_total", "Texts in them.", counts.embedded_texts),
        ("counter", "embedded_tokens_total", "Tokens of those.", counts.embedded_tokens),
        ("counter", "worker_starts_total", "Engine processes started.", counts.worker_starts),
        ("counter", "worker_deaths_total", "Engine processes that died.", counts.worker_deaths),
        ("gauge", "pair_loaded", "Whether a pair is loaded.", int(bool(table.loaded))),
    )  # fmt: skip
    yield from _pair_lines(table.statuses(), upstreams)
    text = "Whether safe mode (slower kernels) is on."
    yield from _samples(("gauge", "safe_mode", text, int(table.safe_mode.on)))


def _pair_lines(present: list[PairStatus], upstreams: list[UpstreamStatus]) -> Iterator[str]:
    """Yield the figures of every loaded pair, and of every pair of another server that was used."""
    loaded = {_escape_label(pair.name): pair for pair in present if pair.state == "ready"}
    yield from _samples(("gauge", "pairs_loaded", "Pairs that are loaded.", len(loaded)))
    pair_figures = (
        ("pair_memory_bytes", "Memory planned for a pair.", "memory"),
        ("pair_loaded_since_seconds", "When a pair was loaded, Unix time.", "since"),
        ("pair_requests_running", "A pair's requests running.", "running"),
        ("pair_requests_waiting", "A pair's generations waiting in its queue.", "waiting"),
    )
    for name, description, field in pair_figures:
        values = {label: round(getattr(status, field) or 0) for label, status in loaded.items()}
        yield from _labelled(name, description, "pair", values, "gauge")
    upstream_figures = (
        ("requests", "counter", "Requests for a pair of another server."),
        ("failed", "counter", "Those of them that failed."),
        ("fallbacks", "counter", "Those that another pair answered."),
        ("tokens", "counter", "Tokens that a server generated for us."),
        ("drafted", "counter", "Tokens that a server has told it drafted for us."),
        ("accepted", "counter", "Those of them that were accepted."),
        ("running", "gauge", "Requests that are running there."),
        ("away", "gauge", "Whether a server does not answer and is tried again."),
    )
    for field, kind, description in upstream_figures:
        values = {_escape_label(status.name): int(getattr(status, field)) for status in upstreams}
        name = f"upstream_{field}{'_total' * (kind == 'counter')}"
        yield from _labelled(name, description, "pair", values, kind)


def _escape_label(text: str) -> str:
    """Escape a label's value, since a pair may be named by a path that contains any character."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _llama_server_lines(daemon: DaemonState) -> Iterator[str]:
    """Yield llama-server's metrics; as there, rates cover the time since the last request for them.

    They are about the engine of this machine: what other servers answered is left out.
    """
    queue, metrics = daemon.pairs, daemon.pairs.metrics
    counts, totals, elsewhere = metrics.counts, metrics.totals, metrics.elsewhere
    cached = totals.cached_tokens - elsewhere.cached
    yield from _samples(
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
        prefix="llamacpp:",
    )  # fmt: skip
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    if metrics.accepted:
        yield from _head(name, "counter", "Accepted tokens by position in a pass.")
    for position, count in _by_position(metrics.accepted).items():
        yield f'{name}{{position="{int(position) - 1}"}} {count}'  # llama-server counts from 0


def _speculation_lines(metrics: Metrics) -> Iterator[str]:
    counts = metrics.counts
    yield from _samples(
        ("counter", "target_passes_total", "Target passes that generated tokens.", metrics.rounds),
        ("counter", "drafted_tokens_total", "Tokens drafted.", counts.drafted),
        ("counter", "accepted_tokens_total", "Drafted tokens accepted.", counts.accepted),
    )
    for name, what, by_depth in (
        ("drafted_at_total", "Drafted", metrics.drafted),
        ("accepted_at_total", "Accepted", metrics.accepted),
    ):
        text = f"{what} tokens by position in a pass."
        yield from _labelled(name, text, "position", _by_position(by_depth))
    yield from _histogram("draft_depth", "Drafts verified by a target pass.", metrics.depths)
    text = "Estimated time for the same tokens without drafts."
    yield from _samples(
        ("counter", "generating_seconds_total", "Time spent generating.", metrics.taken_seconds),
        ("counter", "plain_seconds_total", text, metrics.plain_seconds),
    )
    if metrics.last_speed_up is not None:
        text = "Speed-up of the last answer over plain decoding."
        yield from _samples(("gauge", "speed_up", text, metrics.last_speed_up))


def _samples(*samples: Sample, prefix: str = "localspec_") -> Iterator[str]:
    for kind, name, text, value in samples:
        yield from _head(f"{prefix}{name}", kind, text)
        yield f"{prefix}{name} {value}"


def _labelled(
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


async def status(request: Request) -> Response:
    """Handle GET /localspec/status."""
    daemon = state_of(request)
    table = daemon.pairs
    recent = table.most_recent()
    configured = daemon.config.pair
    if configured not in {pair.name for pair in table.present}:  # it may be an alias
        configured = await asyncio.to_thread(daemon.registry.listed_name, configured)
    return json_response(
        Status(
            version=localspec.__version__,
            api_version=localspec.API_VERSION,
            pid=os.getpid(),
            uptime=time.monotonic() - daemon.started,
            pair=recent.status(),
            running=table.running(),
            waiting=table.waiting(),
            queue_limit=daemon.config.queue,
            worker_pid=recent.worker.pid if recent.worker else None,
            safe_mode=table.safe_mode.on,
            draining=daemon.draining,
            counts=table.metrics.counts,
            figures=table.figures(),
            ahead=recent.admission.ahead(Job()),
            socket=str(daemon.paths.socket),
            log=str(daemon.paths.log),
            pulls=len(daemon.registry.running_pulls),
            hashing=daemon.registry.hashing,
            problems=daemon.problems,
            listen=daemon.tcp.url if daemon.tcp else None,
            token_file=str(daemon.paths.token) if daemon.tcp else None,
            pairs=table.statuses(),
            upstreams=await _present_upstreams(daemon),
            memory=daemon.config.memory * MIB or None,
            configured=configured,
        )
    )


async def shutdown(request: Request) -> Response:
    """Drain and end like SIGTERM, and name the pulls that the next daemon resumes."""
    daemon = state_of(request)
    pulls = daemon.registry.running_pulls
    running = sum(pair.running for pair in daemon.pairs.all if not pair.loading)
    daemon.stop()
    return json_response({"status": "draining", "pulls": pulls, "running": running})


async def reset(request: Request) -> Response:
    """Handle POST /localspec/reset."""
    state_of(request).pairs.reset()
    return json_response({"status": "ok"})


async def configure(request: Request) -> Response:
    """Read config.toml again; requests that arrive after the answer use the new configuration.

    The answer contains the problems of the file and what the configuration costs on this machine.
    """
    daemon = state_of(request)
    await daemon.configure()
    config = daemon.config
    origin = {
        key: source
        for key, source in config.origin.items()
        if source == "flag" or source.startswith("LOCALSPEC_")
    }
    return json_response(
        Configured(
            problems=daemon.problems,
            notes=await _costs(daemon, request),
            origin=origin,
            listen=daemon.tcp.url if daemon.tcp else None,
            token_file=str(daemon.paths.token) if daemon.tcp else None,
        )
    )


async def _costs(daemon: DaemonState, request: Request) -> list[str]:
    """Return which settings this machine cannot give the pair; [] if that takes too long to find out."""
    workers = daemon.pairs.pids
    settings = engine_settings(daemon.config, daemon.paths)
    try:
        async with asyncio.timeout(_COSTS_TIMEOUT_S):
            pair = await daemon.resolve_pair("", request.receive)
            if pair.upstream is not None:
                return []
            return await asyncio.to_thread(setting_notes, pair, settings, workers)
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
        return EventStream(partial(_nothing_to_load, await daemon.pairs.ready(pair)))
    return EventStream(partial(daemon.pairs.get(pair.name).load, pair))


async def _nothing_to_load(
    info: frames.Loaded, report: Callable[[PairStatus], Awaitable[None]]
) -> None:
    """Report a pair of another server as ready; that server is only contacted when a request comes."""
    target, backend = info.target_description, info.backend
    await report(PairStatus(info.name, "ready", target=target, n_ctx=info.n_ctx, backend=backend))


async def unload(request: Request) -> Response:
    """Free the memory of one pair, or of all pairs without a name; the status is 409 while one is busy."""
    daemon = state_of(request)
    body = await read_body(request, LoadRequest, empty=LoadRequest())
    name = None
    if body.model:
        name = (await daemon.resolve_named(body.model, request.receive)).name
    pairs = await daemon.pairs.unload_idle(name)
    return json_response({"unloaded": bool(pairs), "pairs": pairs})
