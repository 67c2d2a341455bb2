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


class Asking(click.Command):
    """A command that asks WORDS, which may begin with a dash, and lists options for sampling last."""

    def __init__(self, *args: Any, table: tuple[options.Option, ...], **attrs: Any) -> None:
        """Take a click command's arguments, and the options that it makes of `table`."""
        params = [*attrs.pop("params"), *map(click_option, table)]
        super().__init__(*args, params=params, **attrs)
        self._table = table

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments as click does, but words with a dash as words."""
        if not ctx.resilient_parsing:  # which completes a line that is not whole
            args = options.divided(self._table, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in two sections, of which sampling is the second."""
        sampling = {option.name for option in options.SAMPLING}
        records: dict[str, list[tuple[str, str]]] = {"Options": [], "Sampling": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                records["Sampling" if param.name in sampling else "Options"].append(record)
        for title, found in records.items():
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)


def _run(words: tuple[str, ...], **values: object) -> int:
    lists = {key: list(each) for key, each in values.items() if isinstance(each, tuple)}
    return ask.run({**values, **lists, "words": list(words)})


command = Asking(
    "ask",
    callback=_run,
    params=[click.Argument(["words"], nargs=-1, metavar="[WORDS]...")],
    table=options.ASK,
    help="Ask one question. Text from stdin and from files (-f) goes before the question. "
    "Only the answer goes to stdout; Markdown is rendered on a terminal and left as it "
    "is in a pipe.",
    epilog=f"Examples:\n\n\b\n{ask.EXAMPLE}",
)
