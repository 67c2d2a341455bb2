"""`localspec chat`."""

from __future__ import annotations

import click

from localspec.cli import options
from localspec.cli.commands.ask import click_option


def _run(**values: object) -> int:
    from localspec.cli.chat import chat

    return chat.run(values)


command = click.Command(
    "chat",
    callback=_run,
    params=list(map(click_option, options.CHAT)),
    help='Talk with a pair: several lines with Alt-Enter or """, commands with /, completion with '
    "Tab. Ctrl-C stops the answer, Ctrl-D ends the chat.",
    epilog="Examples:\n\n\b\n  localspec chat\n  localspec chat -m coder-7b -s 'Be brief.'\n"
    "  localspec chat -c",
)
