"""`localspec ask`, as click sees it."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli import ask, options, suggest
from localspec.cli.app import Limited, Texts

_COMPLETERS = {
    "model": suggest.pairs,
    "conversation": suggest.conversations,
    "template": suggest.saved_templates,
    "files": suggest.files,
    "schema": suggest.files,
}


def click_option(option: options.Option) -> click.Option:
    """Return the click option for an entry of `options.ASK`."""
    names = [*option.flags, option.name]
    if option.kind is bool:
        return click.Option(names, is_flag=True, help=option.help)
    attributes: Any = {"multiple": True} if option.many else {}
    attributes["shell_complete"] = _COMPLETERS.get(option.name)
    kind: Any = option.kind
    if option.kind is int:
        kind = click.IntRange(int(option.low), int(option.high))
    elif option.kind is float:
        kind = click.FloatRange(option.low, option.high)
    return Limited(names, type=kind, metavar=option.metavar, help=option.help, **attributes)


class Asking(Texts):
    """A command that sends WORDS as a question and lists the sampling options last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in two sections, the second of which is for sampling."""
        sampling = {option.name for option in options.SAMPLING}
        records: dict[str, list[tuple[str, str]]] = {"Options": [], "Sampling": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                records["Sampling" if param.name in sampling else "Options"].append(record)
        for title, rows in records.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _run(words: tuple[str, ...], **values: object) -> int:
    lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
    return ask.run({**values, **lists, "words": list(words)})


command = Asking(
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
