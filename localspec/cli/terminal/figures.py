"""Figures as lines: those of an answer for `-u`, and those of the daemon for `status`."""

from __future__ import annotations

import time

from localspec.cli.terminal import render

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


# A rate over fewer tokens or a shorter time mostly depends on the precision of the clock.
_MIN_RATE_TOKENS = 10
_MIN_RATE_S = 0.05
_MIN_READ_TOKENS = 64  # fewer tokens of prompts do not show how fast they are read
# Over fewer tokens two identical runs differ by more than drafting usually gains.
MIN_SPEED_UP_TOKENS = 200


def statistics(response: dict[str, Any]) -> None:
    """Print the figures of a response for `-u`, from its `timings`, `usage` and `localspec`."""
    timings, usage = response.get("timings") or {}, response.get("usage") or {}
    extension = response.get("localspec") or {}
    count, seconds = timings.get("predicted_n", 0), timings.get("predicted_ms", 0.0) / 1000
    rate = format_rate_of(timings)
    summary = f"{count} token{'s' * (count != 1)} in {format_duration(seconds)}"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if not usage:  # a response of /infill only has llama-server's timings
        cached = timings.get("cache_n", 0)
    read = usage.get("prompt_tokens", timings.get("prompt_n", 0) + cached)
    ahead = f" ({timings['cache_ahead_n']} read ahead)" if timings.get("cache_ahead_n") else ""
    reading_s = timings.get("prompt_ms", 0.0) / 1000
    lines = [
        f"{rate} tokens/s: {summary}" if rate else summary,
        _format_speculation(extension.get("speculation") or {}, timings),
        f"prompt: {read} tokens, {cached} cached{ahead}, read in {reading_s:.2f} s",
        extension.get("note") or "",
    ]
    render.note("\n".join(filter(None, lines)))


def format_time(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as its local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def format_rate(tokens: int, seconds: float, per_second: float | None) -> str:
    """Return tokens per second as in "21.3", or an empty string if tokens or time are too few to tell."""
    is_reliable = tokens >= _MIN_RATE_TOKENS and seconds >= _MIN_RATE_S and per_second
    return f"{per_second:.1f}" if is_reliable else ""


def format_about(rate: float) -> str:
    """Return an estimated rate with three digits, as in "1.25", "84.2" or "3,120"."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def format_rate_of(timings: dict[str, Any]) -> str:
    """Return the rate of an answer from its `timings`, in the form of `format_rate`."""
    seconds = timings.get("predicted_ms", 0.0) / 1000
    return format_rate(timings.get("predicted_n", 0), seconds, timings.get("predicted_per_second"))


def format_speed_up(ratio: float | None, tokens: float) -> str:
    """Return a speed-up as in "1.42×".

    Returns an empty string if it was not measured, or over too few tokens to mean anything.
    """
    return f"{ratio:.2f}×" if ratio is not None and tokens >= MIN_SPEED_UP_TOKENS else ""


def format_share(part: float) -> str:
    """Return a fraction as a percentage, as in "71%"."""
    return f"{100 * part:.0f}%"


def format_duration(seconds: float) -> str:
    """Return a time as in "0.35 s", "48 min" or "5 h 12 min"."""
    if seconds <= -0.005:
        return f"-{format_duration(-seconds)}"
    seconds = abs(seconds)
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds >= 0.005 or not seconds else "under 0.01 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60:02} min"


def _format_speculation(spec: dict[str, Any], timings: dict[str, Any]) -> str:
    if not spec.get("active"):
        return f"speculation: off ({spec.get('reason') or 'not used'})"
    drafted, accepted = spec.get("drafted", 0), spec.get("accepted", 0)
    part = f" ({format_share(accepted / drafted)})" if drafted else ""
    parts = [
        f"speculation: drafted {drafted}, accepted {accepted}{part}",
        f"{spec.get('mean_tokens_per_pass', 0.0):.2f} tokens per target pass",
    ]
    if factor := format_speed_up(spec.get("speed_up"), timings.get("predicted_n", 0)):
        parts.append(f"{factor} the speed of plain decoding")
    return ", ".join(parts)


def status(value: dict[str, Any], *, verbose: bool = False) -> None:
    """Print the output of `localspec status`; with `verbose`, everything that is known."""
    render.fields(rows(value, verbose=verbose))


def rows(value: dict[str, Any], *, verbose: bool = False) -> list[tuple[str, str]]:
    """Return the names and texts of the lines of `localspec status`."""
    lines = list(_verbose_rows(value) if verbose else _short_rows(value))
    lines.append(("hashing", format_hashing(value)))
    if value["pulls"]:
        lines.append(("pulls", f"{value['pulls']} running; see: localspec pulls"))
    lines += [("problem", problem) for problem in value["problems"]]
    return [(name, str(text)) for name, text in lines if text]


def _short_rows(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the most useful lines: the pairs, the last one's speed-up, the memory and running requests."""
    pair = value["pair"]
    yield "daemon", f"running for {_format_uptime(value['uptime'])}"
    speed_up = _format_speed_up(pair.get("figures") or {})
    yield from _pair_rows(value, [("note", pair.get("note")), ("speed-up", speed_up)])
    yield "memory", _format_memory(value)
    yield "requests", f"{value['running']} running, {value['waiting']} waiting"
    yield "queue", _format_queue(value.get("ahead") or {})
    yield "tcp", _format_tcp(value)


def _verbose_rows(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    pair, counts, figures = value["pair"], value["counts"], value["pair"].get("figures") or {}
    uptime = _format_uptime(value["uptime"])
    yield "daemon", f"localspec {value['version']}, pid {value['pid']}, up {uptime}"
    details = [
        *(("target", pair.get("target")), ("draft", pair.get("draft"))),
        *(("memory", _format_plan(pair.get("plan"))), ("note", pair.get("note"))),
        *(("speed-up", _format_speed_up(figures)), ("speed", _format_speed(figures))),
        *(("forecast", _format_forecast(pair)), ("passes", _format_passes(pair.get("costs")))),
        *(("drafts", _format_drafts(figures)), ("cache", _format_cache(figures))),
    ]
    yield from _pair_rows(value, details)
    requests = f"{value['running']} running, {value['waiting']} waiting"
    yield "requests", f"{requests}; of all pairs: {_format_counts(counts)}"
    if counts.get("embeddings"):
        texts, tokens = counts["embedded_texts"], counts["embedded_tokens"]
        yield "embeddings", f"{counts['embeddings']} total, {texts:,} texts, {tokens:,} tokens"
    yield "queue", _format_queue(value.get("ahead") or {})
    deaths = f", died {counts['worker_deaths']} times" if counts["worker_deaths"] else ""
    engine = f"pid {value['worker_pid']}" if value["worker_pid"] else "not running"
    yield "engine", f"{engine}{deaths}"
    yield "socket", value["socket"]
    yield "tcp", _format_tcp(value)
    yield "log", value["log"]


def _format_tcp(value: dict[str, Any]) -> str:
    return f"{value['listen']}, token in {value['token_file']}" if value.get("listen") else ""


def _pair_rows(value: dict[str, Any], details: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the configured pair, whether or not it is loaded, the other loaded pairs, and the servers.

    `details` are rows to yield after the pair that was used last.
    """
    configured = value.get("configured") or value["pair"]["name"]
    pairs = {pair["name"]: pair for pair in (value["pair"], *(value.get("pairs") or ()))}
    default = pairs.pop(configured, {"name": configured, "state": "unloaded"})
    for pair in (default, *pairs.values()):
        text = _format_pair(pair)
        if pair is default:
            yield "pair", text
        else:
            count = pair.get("running", 0)
            memory = f", at most {_format_size(pair['memory'])}" if pair.get("memory") else ""
            running = f", {count} request{'s' * (count != 1)} running" if count else ""
            yield "also", f"{text}{memory}{running}"
        if pair["name"] == value["pair"]["name"]:
            yield from details
    yield from (("upstream", _format_upstream(server)) for server in value.get("upstreams") or ())


def format_queue(ahead: dict[str, Any]) -> str:
    """Return what is ahead of a request, as in "3 other requests, about 14 s"."""
    count, seconds = ahead["requests"], ahead["seconds"]
    text = f"{count} other request{'s' * (count != 1)}"
    # From twenty seconds on, the time is rounded up to steps of ten seconds.
    about = f"{seconds} s" if seconds < 20 else format_duration(-(-seconds // 10) * 10)
    return f"{text}, about {about}" if seconds else text


def _format_queue(ahead: dict[str, Any]) -> str:
    if not ahead or ahead["seconds"] == 0 or not ahead["requests"]:
        return ""
    tokens = ahead["prompt_tokens"]
    unread = f", {tokens:,} prompt tokens to be read" if tokens else ""
    return f"a new request waits for {format_queue(ahead)}{unread}"


def format_hashing(value: dict[str, Any]) -> str:
    """Return the progress of hashing as in "target.gguf 43%", or an empty string."""
    progress = value.get("hashing")
    if not progress:
        return ""
    return f"{progress['file']} {100 * progress['done'] // (progress['size'] or 1)}%"


def _format_pair(pair: dict[str, Any]) -> str:
    """Return a pair's line, as in "coder-7b: ready, context 8192, cpu, loaded for 5 min, kept"."""
    state = str(pair["state"]).replace("_", " ")
    if pair["state"] == "loading":
        share = f"loading {pair['stage']}, {100 * pair['progress']:.0f}%"
        state = "measuring" if pair["stage"] == "profile" else share
    if pair["state"] == "ready":
        state += f", context {pair['n_ctx']}, {pair['backend']}"
    if since := pair.get("since"):
        state += f", loaded for {_format_uptime(max(time.time() - since, 0))}"
    return f"{pair['name']}: {state}{', kept' if pair.get('keep') else ''}"


def _format_upstream(entry: dict[str, Any]) -> str:
    """Return the line of an upstream server.

    As in "big: vLLM at http://tower:8000, 2 running, 14 requests, 71% of drafted tokens accepted".
    """
    state = f"does not answer, {entry['fallback']} does" if entry["away"] else ""
    counts = f"{entry['requests']} request{'s' * (entry['requests'] != 1)}"
    drafts = "acceptance not measured"
    if entry["drafted"]:
        drafts = f"{format_share(entry['accepted'] / entry['drafted'])} of drafted tokens accepted"
        if entry["tokens_per_pass"]:
            drafts += f", {entry['tokens_per_pass']:.2f} tokens per pass"
    server = f"{entry['kind'] or 'server'} at {entry['place']}"
    parts = [server, state, f"{entry['running']} running", counts, drafts]
    if entry["failed"]:
        parts.insert(4, f"{entry['failed']} failed")
    return f"{entry['name']}: {', '.join(filter(None, parts))}"


def _format_memory(value: dict[str, Any]) -> str:
    """Return the memory of the loaded pairs now, and how much more cached prompts may take."""
    plans = [pair["plan"] for pair in value.get("pairs") or () if pair.get("plan")]
    cached = sum(plan["prefixes"] for plan in plans)
    uses = f"uses {_format_size(sum(plan['needed'] for plan in plans) - cached)}" if plans else ""
    more = f", cached prompts may take up to {_format_size(cached)} more" if cached > 0 else ""
    return uses + more


def _format_size(count: float) -> str:
    from localspec.files import format_size  # imported here, because `ask` does not need it

    return format_size(count)


def _format_plan(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return ""
    from localspec.cli.terminal import pairs  # imported here, because `ask` does not need it

    return f"{pairs.format_plan(plan)}; {_format_size(plan['free'])} were free"


def _format_counts(counts: dict[str, Any]) -> str:
    text = f"{counts['requests']} total"
    if counts["drafted"]:
        accepted = format_share(counts["accepted"] / counts["drafted"])
        text += f", {counts['tokens']} tokens, {accepted} of drafted tokens accepted"
    return text


def _format_speed(figures: dict[str, Any]) -> str:
    parts = []
    if empty := figures.get("prompt_per_second"):
        full = figures["full_prompt_per_second"]
        slowdown = f" ({full:,.0f} at full context)" if full < 0.9 * empty else ""
        parts.append(f"prompt {empty:,.0f} tokens/s{slowdown}")
    if figures.get("first_text_ms") is not None:
        parts.append(f"time to first token {figures['first_text_ms']:.0f} ms (median)")
    return " · ".join(parts)


def _format_forecast(pair: dict[str, Any]) -> str:
    """Return what was expected of a pair before its load, and how right that was."""
    if not (forecast := pair.get("forecast")):
        return ""
    parts = []
    figures = pair.get("figures") or {}
    # Until prompts were read, their speed is what the load has assumed.
    was_read = figures.get("prompt_tokens", 0) - figures.get("cached_tokens", 0) >= _MIN_READ_TOKENS
    measured = pair.get("plain_per_second"), was_read and figures.get("prompt_per_second")
    for name, rate in zip(("plain", "reading"), measured, strict=True):
        if expected := forecast[name]:
            likely = expected["likely"]
            error = 100 * (likely / rate - 1) if rate else 0.0
            was = f", measured {format_about(rate)} ({error:+.0f} %)" if rate else ""
            parts.append(f"{name} {format_about(likely)} tokens/s{was}")
    return " · ".join(parts)


def _format_passes(costs: dict[str, Any] | None) -> str:
    """Return what passes of a few rows cost, as they were measured at the load."""
    measured = {int(rows): ms for rows, ms in ((costs or {}).get("target_ms") or {}).items()}
    shown = [f"{rows}: {measured[rows]:.3g}" for rows in (1, 2, 4, 8) if rows in measured]
    return f"milliseconds by rows: {', '.join(shown)}" if shown else ""


def _format_speed_up(figures: dict[str, Any]) -> str:
    return format_speed_up(figures.get("speed_up"), figures.get("measured_tokens", 0))


def _format_drafts(figures: dict[str, Any]) -> str:
    if not figures.get("accepted_at"):
        return ""
    shares = " ".join(map(format_share, figures["accepted_at"][:8]))
    return f"{figures['mean_depth']:.1f} per pass; accepted by position: {shares}"


def _format_cache(figures: dict[str, Any]) -> str:
    if not figures.get("prompt_tokens"):
        return ""
    cached = format_share(figures["cached_tokens"] / figures["prompt_tokens"])
    hits = figures["cache_hits"].items()
    places = ", ".join(f"{count} from {place}" for place, count in hits if count)
    return f"{cached} of prompt tokens cached" + (f" ({places})" if places else "")


def _format_uptime(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 120:
        return f"{minutes} min" if minutes else f"{int(seconds)} s"
    return f"{minutes // 60} h"
