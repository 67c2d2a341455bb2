"""`localspec ask`, as click sees it."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli import ask, options


def _click_option(option: options.Option) -> click.Option:
    names = [*option.flags, option.name]
    if option.kind is bool:
        return click.Option(names, is_flag=True, help=option.help)
    kind: Any = option.kind
    if option.kind is int:
        kind = click.IntRange(min=option.low)
    elif option.kind is float:
        kind = click.FloatRange(min=option.low)
    return click.Option(names, type=kind, metavar=option.metavar, help=option.help)


def _run(words: tuple[str, ...], **values: object) -> int:
    return ask.run({**values, "words": list(words)})


command = click.Command(
    "ask",
    callback=_run,
    params=[
        click.Argument(["words"], nargs=-1, metavar="[WORDS]..."),
        *map(_click_option, options.ASK),
    ],
    help="Ask one question. What comes on stdin precedes the words, with a blank line between.",
    epilog=f"Examples:\n\n\b\n{ask.EXAMPLE}",
)
