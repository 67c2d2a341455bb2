"""`localspec ask`, as click sees it."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli import ask, options, suggest
from localspec.cli.app import Limited

_SUGGESTED = {
    "model": suggest.pairs,
    "conversation": suggest.conversations,
    "template": suggest.saved,
    "files": suggest.files,
    "schema": suggest.files,
}


def click_option(option: options.Option) -> click.Option:
    names = [*option.flags, option.name]
    if option.kind is bool:
        return click.Option(names, is_flag=True, help=option.help)
    more: Any = {"multiple": True} if option.many else {}
    more["shell_complete"] = _SUGGESTED.get(option.name)
    kind: Any = option.kind
    if option.kind is int:
        kind = click.IntRange(int(option.low), int(option.high))
    elif option.kind is float:
        kind = click.FloatRange(option.low, option.high)
    return Limited(names, type=kind, metavar=option.metavar, help=option.help, **more)


def _run(words: tuple[str, ...], **values: object) -> int:
    lists = {key: list(each) for key, each in values.items() if isinstance(each, tuple)}
    return ask.run({**values, **lists, "words": list(words)})


command = click.Command(
    "ask",
    callback=_run,
    params=[
        click.Argument(["words"], nargs=-1, metavar="[WORDS]..."),
        *map(click_option, options.ASK),
    ],
    help="Ask one question. Text from stdin and from files (-f) goes before the question. "
    "Only the answer goes to stdout; Markdown is rendered on a terminal and left as it "
    "is in a pipe.",
    epilog=f"Examples:\n\n\b\n{ask.EXAMPLE}",
)
