"""A template is asked, about as much of a long text as the pair's context holds."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from localspec.cli import ask, templates
from localspec.cli import options as table
from localspec.cli.terminal import render
from localspec.client.api import Client
from localspec.errors import ContextExceeded, LocalspecError, TemplateFailed

_FIRST = 400_000  # characters; what is longer is cut before anybody counts its tokens
_ATTEMPTS = 4
# Of the context; the rest is for the template and the answer. The cut parts may have more tokens a character.
_SHARE = 0.7
_LEAST = 1000  # characters; less is not worth a second try
_TOLERANCE = 1.25  # forecasts of reading are that far from right


class Cut(NamedTuple):
    """A text of a wanted length, and what was left out of it, for a person; nothing if nothing was."""

    text: str
    left_out: str = ""


class Answer(NamedTuple):
    """An answer: its text, whether a token limit cut it off, and the pair that gave it."""

    text: str
    cut_off: bool
    model: str = ""


class Collected(render.Printer):
    """An answer that is not shown but used."""

    def __init__(self) -> None:
        self.whole = ""

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        del drafted
        self.whole += piece

    def close(self) -> None:
        """It ends no line on the screen."""


class _TooSlow(Exception):
    """Reading the prompt would take `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class _ReadingClock:
    """Watches how long a prompt is read, from the daemon's forecasts.

    These come from the pair's measured costs, so a prompt that is too long is known before it is read.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began: float | None = None

    def watch(self, progress: dict[str, Any]) -> None:
        """Take in a report of progress. Raises _TooSlow: it will take clearly longer than the limit."""
        if progress["state"] != "reading":
            return
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        expected = now - self._began + progress.get("seconds", 0)
        if expected > _TOLERANCE * self._limit_s:
            raise _TooSlow(expected)


def answered(
    template: str,
    options: dict[str, Any],
    cut: Callable[[int], Cut],
    known: dict[str, str],
    printer: render.Printer,
    *,
    reading_s: float = math.inf,
) -> dict[str, Any]:
    """Ask `template` about what `cut` makes of a number of characters, less of it where that is too long.

    `options` are some of `options.ASK`, by name, and `about`, what the history calls it; `known` the
    template's variables. What is asked about is also cut to what the pair reads in `reading_s` seconds.
    What `ask.stream` returns.

    Raises:
        UsageError: the template is wrong. LocalspecError: no daemon, or what it answered.
    """
    client = Client(autostart=not options["no_daemon_start"])
    room, reason = _FIRST, ""
    for attempt in range(_ATTEMPTS):
        text, left_out = cut(room)
        request, merged = _request(template, options, text, known)
        clock = _ReadingClock(reading_s)
        guarded = attempt < _ATTEMPTS - 1 and len(text) > _LEAST and reading_s < math.inf
        try:
            last = _streamed(client, request, merged, printer, clock.watch if guarded else None)
            break
        except _TooSlow as error:
            room = max(_LEAST, int(min(len(text), room) * reading_s / error.seconds))
            reason = f"Too long to read in {reading_s:.0f} seconds"
        except ContextExceeded as error:
            tokens, context = error.n_prompt_tokens, error.n_ctx
            if attempt == _ATTEMPTS - 1 or not tokens or not context:
                raise
            room = int(min(len(text), room) * _SHARE * min(1, context / tokens))
            reason = "Too long for the pair's context"
    if left_out:
        render.note(f"{reason or 'Too long'}; left out: {left_out}")
    _after(client, last, usage=bool(options.get("usage")))
    return last


def _streamed(
    client: Client,
    request: dict[str, Any],
    options: dict[str, Any],
    printer: render.Printer,
    on_progress: Callable[[dict[str, Any]], None] | None,
) -> dict[str, Any]:
    """Print the answer; what `ask.stream` returns. Raises LocalspecError: of a base model, what it is."""
    hide = options["hide_reasoning"]
    try:
        return ask.stream(client, request, printer, hide_reasoning=hide, on_progress=on_progress)
    except TemplateFailed as error:
        from localspec.cli import base_models

        raise base_models.explained(client, request.get("model", ""), error) from error


def _request(
    template: str, options: dict[str, Any], text: str, known: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the request that asks `template` about a text, and the options with the template's."""
    used = options.get("template") or template
    given = {**table.defaults(table.ASK), "words": [], **options, "template": used}
    about = given.pop("about", "")
    merged, question = templates.applied(given, text, known)
    request = ask.request_for(merged, question)
    if ask.keeps(request):
        kind = template.partition("-")[0]
        request["localspec"]["kind"] = kind
        request["localspec"]["title"] = f"{kind}: {about}" if about else kind
    return request, merged


def _after(client: Client, last: dict[str, Any], *, usage: bool) -> None:
    """Print what a person should know beside an answer."""
    ask.tell(last)
    if usage:
        from localspec.cli.terminal import figures

        figures.statistics(last)
    if last.get("model") == "builtin" and sys.stderr.isatty():
        from localspec.cli.terminal import hints

        hints.real_pair(client)


def whole(
    template: str,
    options: dict[str, Any],
    cut: Callable[[int], Cut],
    known: dict[str, str],
    *,
    reading_s: float = math.inf,
) -> Answer:
    """The answer as a text; the rest as `answered`.

    Raises:
        LocalspecError: it is of a pair that cannot know what is asked.
    """
    printer = Collected()
    last = answered(template, options, cut, known, printer, reading_s=reading_s)
    if last.get("model") == "builtin":
        raise LocalspecError(
            "The built-in demo pair knows only Python's standard library. Use a real one: localspec catalogue"
        )
    cut_off = last.get("finish_reason") == "length"
    return Answer(printer.whole, cut_off, str(last.get("model", "")))


def shown(
    template: str, options: dict[str, Any], cut: Callable[[int], Cut], known: dict[str, str]
) -> None:
    """Print the answer as `ask` does; the rest as `answered`."""
    answered(template, options, cut, known, render.printer(plain=options["plain"]))


def everything(text: str) -> Callable[[int], Cut]:
    """For a text that is not to be cut: what is too long is refused."""
    return lambda room: Cut(text)


def middle_left_out(text: str) -> Callable[[int], Cut]:
    """Of a log the end says most, and the beginning what it was."""

    def cut(room: int) -> Cut:
        if len(text) <= room:
            return Cut(text)
        head, tail = text[: room // 4], text[len(text) - room + room // 4 :]
        head, tail = head.rpartition("\n")[0] or head, tail.partition("\n")[2] or tail
        lines = text[len(head) : len(text) - len(tail)].strip("\n").count("\n") + 1
        said = f"{lines} line{'s' * (lines > 1)} in the middle"
        return Cut(f"{head}\n[… {said} left out …]\n{tail}", f"{said}.")

    return cut
