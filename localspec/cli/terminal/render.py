"""Everything that draws. Answers go to stdout and nothing else does; the rest goes to stderr.

What comes from elsewhere passes `harmless` on its way to a terminal. In a pipe an answer is what the
model wrote, byte by byte; lists and messages are harmless there too, for a terminal may follow.
"""

from __future__ import annotations

import os
import sys

from localspec.errors import visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TextIO

harmless = visible

_last = "\n"
_last_thought = "\n"


class Printer:
    """Shows an answer as it comes; this one as it is."""

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        """`drafted`: from and to of what the draft proposed, in characters."""
        del drafted
        text(piece)

    def close(self) -> None:
        end_of_text()


class Tinted(Printer):
    """Colours what came from the draft; underlines it where colours are not wanted."""

    def __init__(self) -> None:
        self._style = "4" if os.environ.get("NO_COLOR") else "32"

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        done = 0
        for start, end in drafted:
            _answer(harmless(piece[done:start]))
            _answer(f"\x1b[{self._style}m{harmless(piece[start:end])}\x1b[0m")
            done = end
        _answer(harmless(piece[done:]))

    def close(self) -> None:
        _answer("\n")  # a style's end hides what the last character was
        how = "Underlined" if self._style == "4" else "Green"
        dim(f"{how} is what the draft proposed.")


def printer(*, plain: bool = False, tinted: bool = False) -> Printer:
    """What suits stdout: Markdown is drawn on a terminal only."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return Printer()
    if tinted:
        return Tinted()
    if plain:
        return Printer()
    from localspec.cli.terminal import markdown

    return markdown.Markdown()


def reasoning(piece: str) -> None:
    """What a model thinks before it answers: beside the answer, dim on a terminal."""
    global _last_thought
    if piece:
        _last_thought = piece[-1]
        _stderr(f"\x1b[2m{harmless(piece)}\x1b[0m" if sys.stderr.isatty() else piece)


def end_of_thought() -> None:
    """An empty line between what was thought and the answer."""
    global _last_thought
    if _last_thought != "\n":
        _last_thought = "\n"
        _stderr("\n\n" if sys.stderr.isatty() else "\n")


def dim(message: str) -> None:
    """A line of small importance, for a person at a terminal only."""
    if sys.stderr.isatty():
        sys.stdout.flush()
        _stderr(f"\x1b[2m{harmless(message)}\x1b[0m\n")


def _stderr(message: str) -> None:
    _write(sys.stderr, message)
    sys.stderr.flush()


def _write(stream: TextIO, text_: str) -> None:
    """`text_`, with question marks for what the stream's encoding does not have."""
    try:
        stream.write(text_)
    except UnicodeEncodeError:  # a terminal that is not UTF-8, or half a surrogate pair
        stream.write(text_.encode(stream.encoding, "replace").decode(stream.encoding))


def text(piece: str) -> None:
    """A piece of the answer, shown at once."""
    _answer(harmless(piece) if sys.stdout.isatty() else piece)


def _answer(piece: str) -> None:
    """The same with escape codes of our own in it."""
    global _last
    if not piece:
        return
    if _last_thought != "\n":
        end_of_thought()
    _last = piece[-1]
    _write(sys.stdout, piece)
    sys.stdout.flush()


def end_of_text() -> None:
    """The shell's prompt belongs on a line of its own."""
    if _last != "\n":
        text("\n")


def record(value: object) -> None:
    """One line of JSON; what is not harmless in it is written as JSON can, with its number."""
    import json
    import re

    def escaped(found: re.Match[str]) -> str:
        return f"\\u{ord(found[0]):04x}"

    written = json.dumps(value, ensure_ascii=False)
    unsafe = "[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    sys.stdout.write(re.sub(unsafe, escaped, written) + "\n")


def line(message: str) -> None:
    """A result that is no answer of a model: of `status`, `start`, `stop`."""
    _write(sys.stdout, f"{harmless(message)}\n")


def path(name: object) -> None:
    """A path alone on its line, for a program that uses it; harmless on a terminal."""
    shown = str(name)
    _write(sys.stdout, f"{harmless(shown) if sys.stdout.isatty() else shown}\n")


def error(message: str) -> None:
    _stderr(f"localspec: {harmless(message)}\n")


def traceback() -> None:
    """Of the error that is being handled."""
    import traceback as standard

    _stderr(harmless(standard.format_exc()))


def usage(message: str) -> None:
    """What click says about a command line, as it is but harmless."""
    _stderr(harmless(message))


def statistics(response: dict[str, Any]) -> None:
    """What `-u` shows, from a response's `timings`, `usage` and `localspec`."""
    timings = response.get("timings") or {}
    ours = response.get("localspec") or {}
    usage = response.get("usage") or {}
    lines = [_rate(timings), _speculation(ours.get("speculation") or {}), _prompt(timings, usage)]
    lines.append(ours.get("note") or "")
    _stderr(harmless("".join(f"{line}\n" for line in lines if line)))


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
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if not usage:  # /infill has llama-server's timings alone
        cached = timings.get("cache_n", 0)
    read = usage.get("prompt_tokens", timings.get("prompt_n", 0) + cached)
    seconds = timings.get("prompt_ms", 0.0) / 1000
    return f"prompt: {read} tokens, {cached} of them cached, read in {seconds:.2f} s"


def status(value: dict[str, Any]) -> None:
    """`localspec status` for a person."""
    for row in status_rows(value):
        line(row)


def status_rows(value: dict[str, Any]) -> list[str]:
    """Its lines."""
    pair, counts = value["pair"], value["counts"]
    up = _span(value["uptime"])
    rows = [
        ("daemon", f"localspec {value['version']}, pid {value['pid']}, up {up}"),
        ("pair", _pair(pair)),
        ("target", pair.get("target")),
        ("draft", pair.get("draft")),
        ("note", pair.get("note")),
        ("requests", f"{value['running']} running, {value['waiting']} waiting, {_counts(counts)}"),
        ("speed", _speed(value.get("figures") or {})),
        ("drafts", _drafts(value.get("figures") or {})),
        ("cache", _cache(value.get("figures") or {})),
        ("engine", _engine(value)),
        ("hashing", hashing(value)),
        ("pulls", f"{value['pulls']} running: localspec pulls" if value["pulls"] else ""),
        ("socket", value["socket"]),
        ("tcp", value.get("listen") and f"{value['listen']}, token in {value['token_file']}"),
        ("log", value["log"]),
        *(("problem", problem) for problem in value["problems"]),
    ]
    return [harmless(f"{name:9} {text_}", lines=False) for name, text_ in rows if text_]


def hashing(value: dict[str, Any]) -> str:
    """As in "target.gguf 43 %"; empty where no file is hashed."""
    found = value.get("hashing")
    return f"{found['file']} {100 * found['done'] // (found['size'] or 1)} %" if found else ""


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


def _speed(figures: dict[str, Any]) -> str:
    parts = []
    if figures.get("speed_up") is not None:
        parts.append(f"{figures['speed_up']:.2f}× plain decoding")
    if figures.get("first_text_ms") is not None:
        parts.append(f"first text after {figures['first_text_ms']:.0f} ms (median)")
    return ", ".join(parts)


def _drafts(figures: dict[str, Any]) -> str:
    if not figures.get("accepted_at"):
        return ""
    shares = " ".join(f"{100 * share:.0f}" for share in figures["accepted_at"][:8])
    return f"{figures['mean_depth']:.1f} per pass; accepted by place, %: {shares}"


def _cache(figures: dict[str, Any]) -> str:
    if not figures.get("prompt_tokens"):
        return ""
    share = 100 * figures["cached_tokens"] / figures["prompt_tokens"]
    hits = figures["cache_hits"]
    places = ", ".join(f"{count} from {place}" for place, count in hits.items() if count)
    return f"{share:.0f} % of prompts not read again" + (f" ({places})" if places else "")


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
