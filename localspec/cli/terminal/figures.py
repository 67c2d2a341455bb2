"""Figures in lines: of an answer, as `-u` shows them, and of the daemon, as `status` does."""

from __future__ import annotations

import time

from localspec.cli.terminal import render

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


# Of fewer tokens, or in less time, a rate says how exact a clock is.
_FEWEST = 10
_SHORTEST = 0.05  # seconds
# Over fewer tokens the speed-up of two identical runs differs by more than drafting usually gains.
MIN_SPEED_UP_TOKENS = 200


def statistics(response: dict[str, Any]) -> None:
    """What `-u` shows, from a response's `timings`, `usage` and `localspec`."""
    timings = response.get("timings") or {}
    ours = response.get("localspec") or {}
    usage = response.get("usage") or {}
    lines = [
        _rate(timings),
        _speculation(ours.get("speculation") or {}, timings),
        _prompt(timings, usage),
    ]
    lines.append(ours.get("note") or "")
    render.note("\n".join(line for line in lines if line))


def rate(tokens: int, seconds: float, per_second: float | None) -> str:
    """As in "21.3", of tokens per second; nothing where they are too few, or came too soon, to tell."""
    told = tokens >= _FEWEST and seconds >= _SHORTEST and per_second
    return f"{per_second:.1f}" if told else ""


def rate_of(timings: dict[str, Any]) -> str:
    """The same, of an answer's `timings`."""
    seconds = timings.get("predicted_ms", 0.0) / 1000
    return rate(timings.get("predicted_n", 0), seconds, timings.get("predicted_per_second"))


def speed_up(ratio: float | None, tokens: float) -> str:
    """Return a speed-up as in "1.42×"; empty if it was not measured, or over too few tokens to mean
    anything.
    """
    return f"{ratio:.2f}×" if ratio is not None and tokens >= MIN_SPEED_UP_TOKENS else ""


def share(part: float) -> str:
    """As in "71%"."""
    return f"{100 * part:.0f}%"


def duration(seconds: float) -> str:
    """As in "0.35 s", "48 min" or "5 h 12 min"."""
    if seconds <= -0.005:
        return f"-{duration(-seconds)}"
    seconds = abs(seconds)
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds >= 0.005 or not seconds else "under 0.01 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60:02} min"


def _rate(timings: dict[str, Any]) -> str:
    count = timings.get("predicted_n", 0)
    took = (
        f"{count} token{'s' * (count != 1)} in {duration(timings.get('predicted_ms', 0.0) / 1000)}"
    )
    told = rate_of(timings)
    return f"{told} tokens/s: {took}" if told else took


def _speculation(spec: dict[str, Any], timings: dict[str, Any]) -> str:
    if not spec.get("active"):
        return f"speculation: off ({spec.get('reason') or 'not used'})"
    drafted, accepted = spec.get("drafted", 0), spec.get("accepted", 0)
    part = f" ({share(accepted / drafted)})" if drafted else ""
    parts = [
        f"speculation: drafted {drafted}, accepted {accepted}{part}",
        f"{spec.get('mean_tokens_per_pass', 0.0):.2f} tokens per target pass",
    ]
    if told := speed_up(spec.get("speed_up"), timings.get("predicted_n", 0)):
        parts.append(f"{told} the speed of plain decoding")
    return ", ".join(parts)


def _prompt(timings: dict[str, Any], usage: dict[str, Any]) -> str:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if not usage:  # /infill has llama-server's timings alone
        cached = timings.get("cache_n", 0)
    read = usage.get("prompt_tokens", timings.get("prompt_n", 0) + cached)
    seconds = timings.get("prompt_ms", 0.0) / 1000
    return f"prompt: {read} tokens, {cached} cached, read in {seconds:.2f} s"


def status(value: dict[str, Any], *, verbose: bool = False) -> None:
    """Print `localspec status` for a person; `verbose` with everything that is known."""
    render.fields(rows(value, verbose=verbose))


def rows(value: dict[str, Any], *, verbose: bool = False) -> list[tuple[str, str]]:
    """Return the names and texts of its lines."""
    found = _verbose(value) if verbose else _short(value)
    return [(name, str(text)) for name, text in found if text]


def _short(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a person looks for: the pairs, the speed-up, the memory and what is running."""
    pair = value["pair"]
    yield "daemon", f"running for {_span(value['uptime'])}"
    yield from _pairs(value, [("note", pair.get("note"))])
    yield from (("upstream", _upstream(each)) for each in value.get("upstreams") or ())
    yield "speed-up", _speed_up(value.get("figures") or {})
    yield "memory", _memory(value)
    yield "requests", f"{value['running']} running, {value['waiting']} waiting"
    yield "queue", _queue(value.get("ahead") or {})
    yield "tcp", _tcp(value)
    yield from _doing(value)


def _verbose(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    pair, counts, figures = value["pair"], value["counts"], value.get("figures") or {}
    up = _span(value["uptime"])
    yield "daemon", f"localspec {value['version']}, pid {value['pid']}, up {up}"
    models = [("target", pair.get("target")), ("draft", pair.get("draft"))]
    more = [("memory", _plan(pair.get("plan"))), ("note", pair.get("note"))]
    yield from _pairs(value, [*models, *more])
    yield from (("upstream", _upstream(each)) for each in value.get("upstreams") or ())
    yield "requests", f"{value['running']} running, {value['waiting']} waiting, {_counts(counts)}"
    yield "embeddings", _embeddings(counts)
    yield "queue", _queue(value.get("ahead") or {})
    yield "speed-up", _speed_up(figures)
    yield "speed", _speed(figures)
    yield "drafts", _drafts(figures)
    yield "cache", _cache(figures)
    yield "engine", _engine(value)
    yield "socket", value["socket"]
    yield "tcp", _tcp(value)
    yield "log", value["log"]
    yield from _doing(value)


def _tcp(value: dict[str, Any]) -> str:
    return f"{value['listen']}, token in {value['token_file']}" if value.get("listen") else ""


def _doing(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what the daemon is at beside requests, and what is wrong."""
    yield "hashing", hashing(value)
    yield "pulls", f"{value['pulls']} running; see: localspec pulls" if value["pulls"] else ""
    yield from (("problem", problem) for problem in value["problems"])


def _pairs(value: dict[str, Any], about: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the configured pair, whether or not it is loaded, and the others that are.

    `about` is what to yield after the pair that was used last.
    """
    configured = value.get("configured") or value["pair"]["name"]
    known = {each["name"]: each for each in (value["pair"], *(value.get("pairs") or ()))}
    default = known.pop(configured, {"name": configured, "state": "unloaded"})
    for each in (default, *known.values()):
        yield ("pair", _pair(each)) if each is default else ("also", _beside(each))
        if each["name"] == value["pair"]["name"]:
            yield from about


def queue(ahead: dict[str, Any]) -> str:
    """As in "3 other requests, about 14 s": what is before a request, and how long that takes."""
    count = ahead["requests"]
    told = f"{count} other request{'s' * (count != 1)}"
    return told + (f", about {_about(ahead['seconds'])}" if ahead["seconds"] else "")


def _queue(ahead: dict[str, Any]) -> str:
    if not ahead or ahead["seconds"] == 0 or not ahead["requests"]:
        return ""
    tokens = ahead["prompt_tokens"]
    left = f", {tokens:,} prompt tokens to be read" if tokens else ""
    return f"a new request waits for {queue(ahead)}{left}"


def _about(seconds: int) -> str:
    """In steps of ten, from twenty on."""
    return f"{seconds} s" if seconds < 20 else duration(-(-seconds // 10) * 10)


def hashing(value: dict[str, Any]) -> str:
    """As in "target.gguf 43%"; empty where no file is hashed."""
    found = value.get("hashing")
    return f"{found['file']} {100 * found['done'] // (found['size'] or 1)}%" if found else ""


def _pair(pair: dict[str, Any]) -> str:
    state = str(pair["state"]).replace("_", " ")
    if pair["state"] == "loading":
        state += f" {pair['stage']}, {100 * pair['progress']:.0f}%"
    if pair["state"] == "ready":
        state += f", context {pair['n_ctx']}, {pair['backend']}"
    return f"{pair['name']}: {state}{_stays(pair)}"


def _stays(pair: dict[str, Any]) -> str:
    """As in ", loaded for 5 min, kept"."""
    since = pair.get("since")
    told = f", loaded for {_span(max(time.time() - since, 0))}" if since else ""
    return f"{told}, kept" if pair.get("keep") else told


def _beside(pair: dict[str, Any]) -> str:
    """Another pair in memory."""
    from localspec.cli.terminal import pairs  # which `ask` has no use for

    takes = f", at most {pairs.size(pair['memory'])}" if pair.get("memory") else ""
    count = pair.get("running", 0)
    return _pair(pair) + takes + (f", {count} request{'s' * (count != 1)} running" if count else "")


def _upstream(each: dict[str, Any]) -> str:
    """As in "big: vLLM at http://tower:8000, 2 running, 14 requests, 71% of drafted tokens accepted"."""
    state = f"does not answer, {each['fallback']} does" if each["away"] else ""
    counts = f"{each['requests']} request{'s' * (each['requests'] != 1)}"
    drafts = "acceptance not measured"
    if each["drafted"]:
        drafts = f"{share(each['accepted'] / each['drafted'])} of drafted tokens accepted"
        if each["tokens_per_pass"]:
            drafts += f", {each['tokens_per_pass']:.2f} tokens per pass"
    server = f"{each['kind'] or 'server'} at {each['place']}"
    parts = [server, state, f"{each['running']} running", counts, drafts]
    if each["failed"]:
        parts.insert(4, f"{each['failed']} failed")
    return f"{each['name']}: {', '.join(filter(None, parts))}"


def _memory(value: dict[str, Any]) -> str:
    """Return what the loaded pairs take, and what it may become when many prompts are cached."""
    from localspec.cli.terminal.pairs import size  # which `ask` has no use for

    plans = [each["plan"] for each in value.get("pairs") or () if each.get("plan")]
    most = sum(each["needed"] for each in plans)
    least = most - sum(each["prefixes"] for each in plans)
    if not plans:
        return ""
    return f"uses {size(least)}" + (
        f", cached prompts may take up to {size(most - least)} more" if most > least else ""
    )


def _plan(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return ""
    from localspec.cli.terminal import pairs  # which `ask` has no use for

    return f"{pairs.plan(plan)}; {pairs.size(plan['free'])} were free"


def _counts(counts: dict[str, Any]) -> str:
    said = f"{counts['requests']} total"
    if counts["drafted"]:
        accepted = share(counts["accepted"] / counts["drafted"])
        said += f", {counts['tokens']} tokens, {accepted} of drafted tokens accepted"
    return said


def _embeddings(counts: dict[str, Any]) -> str:
    if not counts.get("embeddings"):
        return ""
    texts, tokens = counts["embedded_texts"], counts["embedded_tokens"]
    return f"{counts['embeddings']} total, {texts:,} texts, {tokens:,} tokens"


def _speed(figures: dict[str, Any]) -> str:
    parts = []
    if figures.get("prompt_per_second"):
        first, full = figures["prompt_per_second"], figures["full_prompt_per_second"]
        slows = f" ({full:,.0f} at full context)" if full < 0.9 * first else ""
        parts.append(f"prompt {first:,.0f} tokens/s{slows}")
    if figures.get("first_text_ms") is not None:
        parts.append(f"time to first token {figures['first_text_ms']:.0f} ms (median)")
    return " · ".join(parts)


def _speed_up(figures: dict[str, Any]) -> str:
    return speed_up(figures.get("speed_up"), figures.get("measured_tokens", 0))


def _drafts(figures: dict[str, Any]) -> str:
    if not figures.get("accepted_at"):
        return ""
    shares = " ".join(map(share, figures["accepted_at"][:8]))
    return f"{figures['mean_depth']:.1f} per pass; accepted by position: {shares}"


def _cache(figures: dict[str, Any]) -> str:
    if not figures.get("prompt_tokens"):
        return ""
    cached = share(figures["cached_tokens"] / figures["prompt_tokens"])
    hits = figures["cache_hits"]
    places = ", ".join(f"{count} from {place}" for place, count in hits.items() if count)
    return f"{cached} of prompt tokens cached" + (f" ({places})" if places else "")


def _engine(value: dict[str, Any]) -> str:
    running = f"pid {value['worker_pid']}" if value["worker_pid"] else "not running"
    deaths = value["counts"]["worker_deaths"]
    return running + (f", died {deaths} times" if deaths else "")


def _span(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{int(seconds)} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h"
