#!/usr/bin/env python3
"""Write localspec/docs/commands.md: the help of every command, as `localspec COMMAND --help` prints it.

Run it after changing a command or its options. A test compares the page with the commands; for that,
`--print` prints the page instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from localspec.cli.app import GROUPS, app
from localspec.cli.commands.help import subcommands

FILE = Path(__file__).resolve().parents[1] / "localspec" / "docs" / "commands.md"
COLUMNS = 80
BEGINNING = """# Commands

Every command with its options, as `localspec help COMMAND` prints it.

`scripts/commands_page.py` makes this page from the commands themselves.
"""


def page() -> str:
    """Return the text of the page."""
    root = click.Context(app, info_name="localspec", terminal_width=COLUMNS, **app.context_settings)
    commands = {command.info_name: command for command in subcommands(root)}
    parts = [BEGINNING]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _sections(commands[name])
    return "\n".join(parts)


def _sections(context: click.Context) -> Iterator[str]:
    """Yield the section of a command, and those of the commands below it."""
    shown = "\n".join(line.rstrip() for line in context.get_help().splitlines())
    yield f"### {context.command_path}\n\n```text\n{shown}\n```\n"
    for command in subcommands(context):
        yield from _sections(command)


if __name__ == "__main__":
    if "--print" in sys.argv[1:]:
        print(page(), end="")
    else:
        FILE.write_text(page(), encoding="utf-8")
