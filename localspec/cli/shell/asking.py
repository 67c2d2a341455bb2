"""A template is asked, about as much of a long text as the pair's context holds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from localspec.cli import ask, templates
from localspec.cli import options as table
from localspec.cli.terminal import render
from localspec.client.api import Client
from localspec.errors import ContextExceeded, LocalspecError

_FIRST = 400_000  # characters; what is longer is cut before anybody counts its tokens
_ATTEMPTS = 4
# Of the context; the rest is for the template and the answer. The cut parts may have more tokens a character.
_SHARE = 0.7


class Cut(NamedTuple):
    """A text of a wanted length, and what was left out of it, for a person; nothing if nothing was."""

    text: str
    left_out: str = ""


class Answer(NamedTuple):
    """`cut_off`: by a limit of tokens."""

    text: str
    cut_off: bool


class Collected(render.Printer):
    """An answer that is not shown but used."""

    def __init__(self) -> None:
        self.whole = ""

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        del drafted
        self.whole += piece

    def close(self) -> None:
        """It ends no line on the screen."""


def answered(
    template: str,
    options: dict[str, Any],
    cut: Callable[[int], Cut],
    known: dict[str, str],
    printer: render.Printer,
) -> dict[str, Any]:
    """Ask `template` about what `cut` makes of a number of characters, less of it where that is too long.

    `options` are some of `options.ASK`, by name, and `about`, what the history calls it; `known` the
    template's variables. What `ask.stream` returns.

    Raises:
        UsageError: the template is wrong. LocalspecError: no daemon, or what it answered.
    """
    given = {**table.defaults(table.ASK), "words": [], **options, "template": template}
    client = Client(autostart=not given["no_daemon_start"])
    about, room = given.pop("about", ""), _FIRST
    for attempt in range(_ATTEMPTS):
        text, left_out = cut(room)
        merged, question = templates.applied(given, text, known)
        try:
            request = ask.request_for(merged, question)
            if ask.keeps(request):
                kind = template.partition("-")[0]
                request["localspec"]["kind"] = kind
                request["localspec"]["title"] = f"{kind}: {about}" if about else kind
            last = ask.stream(client, request, printer, hide_reasoning=merged["hide_reasoning"])
            break
        except ContextExceeded as error:
            tokens, context = error.n_prompt_tokens, error.n_ctx
            if attempt == _ATTEMPTS - 1 or not tokens or not context:
                raise
            room = int(min(len(text), room) * _SHARE * min(1, context / tokens))
    ask.tell(last)
    if left_out:
        render.note(f"Too long for the pair's context; left out: {left_out}")
    ask.tell(last)
    if options.get("usage"):
        from localspec.cli.terminal import figures

        figures.statistics(last)
    if last.get("model") == "builtin" and sys.stderr.isatty():
        from localspec.cli.terminal import hints

        hints.real_pair(client)
    return last


def whole(
    template: str, options: dict[str, Any], cut: Callable[[int], Cut], known: dict[str, str]
) -> Answer:
    """The answer as a text; the rest as `answered`.

    Raises:
        LocalspecError: it is of a pair that cannot know what is asked.
    """
    printer = Collected()
    last = answered(template, options, cut, known, printer)
    if last.get("model") == "builtin":
        raise LocalspecError(
            "The built-in demo pair knows only Python's standard library. Use a real one: localspec catalogue"
        )
    return Answer(printer.whole, last.get("finish_reason") == "length")


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
