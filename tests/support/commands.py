"""The commands of the program, with the lines that run them."""

from __future__ import annotations

from collections.abc import Iterator

import click

from localspec.cli.app import app


def list_commands(command: click.Command = app, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command of the program, a group before those in it, with its line."""
    yield " ".join(names), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from list_commands(inner, *names, name)
