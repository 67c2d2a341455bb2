"""Everything that draws. Answers go to stdout and nothing else does; the rest goes to stderr."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_last = "\n"


def text(piece: str) -> None:
    """A piece of the answer, shown at once."""
    global _last
    if not piece:
        return
    _last = piece[-1]
    try:
        sys.stdout.write(piece)
    except UnicodeEncodeError:  # a terminal that is not UTF-8
        encoding = sys.stdout.encoding
        sys.stdout.write(piece.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def end_of_text() -> None:
    """The shell's prompt belongs on a line of its own."""
    if _last != "\n":
        text("\n")


def record(value: object) -> None:
    """One line of JSON."""
    import json

    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def line(message: str) -> None:
    """A result that is no answer of a model: of `status`, `start`, `stop`."""
    sys.stdout.write(f"{message}\n")


def error(message: str) -> None:
    sys.stderr.write(f"localspec: {message}\n")


def statistics(response: dict[str, Any]) -> None:
    """What `-u` shows, from a response's `timings`, `usage` and `localspec`."""
    timings = response.get("timings") or {}
    ours = response.get("localspec") or {}
    usage = response.get("usage") or {}
    lines = [_rate(timings), _speculation(ours.get("speculation") or {}), _prompt(timings, usage)]
    lines.append(ours.get("note") or "")
    sys.stderr.write("".join(f"{line}\n" for line in lines if line))


def _rate(timings: dict[str, Any]) -> str:
    count, seconds = timings.get("predicted_n", 0), timings.get("predicted_ms", 0.0) / 1000
    return f"{timings.get('predicted_per_second', 0.0):.1f} tokens/s: {count} in {seconds:.2f} s"


def _speculation(spec: dict[str, Any]) -> str:
    if not spec.get("active"):
        return f"speculation: off ({spec.get('reason') or 'not used'})"
    drafted, accepted = spec.get("drafted", 0), spec.get("accepted", 0)
    share = f" ({100 * accepted / drafted:.0f} %)" if drafted else ""
    parts = [
        f"speculation: drafted {drafted}, accepted {accepted}{share}",
        f"{spec.get('mean_tokens_per_pass', 0.0):.2f} tokens per target pass",
    ]
    if spec.get("speed_up") is not None:
        parts.append(f"{spec['speed_up']:.2f}× the speed of plain decoding")
    return ", ".join(parts)


def _prompt(timings: dict[str, Any], usage: dict[str, Any]) -> str:
    if "prompt_tokens" not in usage:
        return ""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    seconds = timings.get("prompt_ms", 0.0) / 1000
    read = usage["prompt_tokens"]
    return f"prompt: {read} tokens, {cached} of them cached, read in {seconds:.2f} s"


def status(value: dict[str, Any]) -> None:
    """`localspec status` for a person."""
    pair, counts = value["pair"], value["counts"]
    up = _span(value["uptime"])
    rows = [
        ("daemon", f"localspec {value['version']}, pid {value['pid']}, up {up}"),
        ("pair", _pair(pair)),
        ("target", pair.get("target")),
        ("draft", pair.get("draft")),
        ("note", pair.get("note")),
        ("requests", f"{value['running']} running, {value['waiting']} waiting, {_counts(counts)}"),
        ("engine", _engine(value)),
        ("pulls", f"{value['pulls']} running: localspec pulls" if value["pulls"] else ""),
        ("log", value["log"]),
        *(("problem", problem) for problem in value["problems"]),
    ]
    for name, text_ in rows:
        if text_:
            line(f"{name:9} {text_}")


def _pair(pair: dict[str, Any]) -> str:
    state = str(pair["state"]).replace("_", " ")
    if pair["state"] == "loading":
        state += f" {pair['stage']}, {100 * pair['progress']:.0f} %"
    if pair["state"] == "ready":
        state += f", context {pair['n_ctx']}, {pair['backend']}"
    return f"{pair['name']}: {state}"


def _counts(counts: dict[str, Any]) -> str:
    said = f"{counts['requests']} so far"
    if counts["drafted"]:
        share = 100 * counts["accepted"] / counts["drafted"]
        said += f", {counts['tokens']} tokens, {share:.0f} % of drafts accepted"
    return said


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
