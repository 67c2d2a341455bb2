"""`localspec config`: show and change the configuration."""

from __future__ import annotations

import click

from localspec.cli import settings, suggest
from localspec.cli.app import Group, json_option
from localspec.cli.terminal import render
from localspec.paths import default_paths


@click.group(
    cls=Group,
    synonyms={"reset": ("unset",), "list": ("show",), "ls": ("show",)},
    invoke_without_command=True,
    help="Show or change the configuration.",
    epilog="Examples:\n\n\b\n  localspec config\n  localspec config set pair coder-7b\n"
    "  localspec config set idle_unload 0",
)
@click.pass_context
def command(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        settings.show()


@command.command(
    help="Print the path of the configuration file.",
    epilog='Example: cat "$(localspec config path)"',
)
def path() -> None:
    render.path(default_paths().config_file)


@command.command(
    help="Show every value and its source: default, file or environment.",
    epilog="Examples:\n\n\b\n  localspec config show\n  localspec config show --json",
)
@json_option
def show(as_json: bool) -> None:
    settings.show(as_json=as_json)


@command.command(help="Print one value.", epilog="Example: localspec config get pair")
@click.argument("key", shell_complete=suggest.keys)
def get(key: str) -> None:
    settings.get(key)


@command.command(
    "set",
    help="Set a value in the configuration file; without a value, restore the default. A running "
    "daemon uses it from the next question.",
    epilog="Examples:\n\n\b\n  localspec config set context 16384\n  localspec config set depth -1",
    context_settings={"ignore_unknown_options": True},  # a value may be -1
)
@click.argument("key", shell_complete=suggest.keys)
@click.argument("value", required=False, shell_complete=suggest.values)
def set_(key: str, value: str | None) -> None:
    name, equals, text = key.partition("=")
    settings.change(name, text if equals and value is None else value)


@command.command(
    help="Remove a value from the configuration file, which restores the default.",
    epilog="Example: localspec config unset context",
)
@click.argument("key", shell_complete=suggest.keys)
def unset(key: str) -> None:
    settings.change(key, None)


@command.command(
    help="Edit the configuration file in $EDITOR; it is checked before it is saved.",
    epilog="Example: localspec config edit",
)
def edit() -> None:
    settings.edit()
