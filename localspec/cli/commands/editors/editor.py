"""`localspec editor install|uninstall|config`."""

from __future__ import annotations

import click

from localspec.cli.app import Group
from localspec.cli.editors import plugin, settings
from localspec.cli.terminal import render
from localspec.paths import default_paths


@click.group(
    cls=Group,
    help="Set up an editor: install the plug-in for Vim or Neovim, or print settings for others.",
    epilog="Examples:\n\n\b\n  localspec editor install vim\n  localspec editor install --print nvim\n"
    "  localspec editor config zed",
)
def command() -> None:
    pass


_editor = click.argument("editor", type=click.Choice(plugin.EDITORS))


@command.command(
    help="Install the plug-in, which completes code as you type and answers questions about it: one file "
    "is written, which leads to this installation of localspec. In the editor: :help localspec",
    epilog="Example: localspec editor install nvim",
)
@_editor
@click.option(
    "--print", "only_print", is_flag=True, help="Only print the file that would be written."
)
def install(editor: str, only_print: bool) -> int:
    if only_print:
        render.verbatim(f'" {plugin.file(editor)}\n{plugin.text(editor)}')
        return 0
    path = plugin.install(editor)
    render.line(f"Written: {path}")
    render.line(
        f"It takes effect when the editor starts. To undo: localspec editor uninstall {editor}"
    )
    return 0


@command.command(
    help="Remove the plug-in. Nothing else of the editor is changed.",
    epilog="Example: localspec editor uninstall nvim",
)
@_editor
def uninstall(editor: str) -> int:
    path = plugin.uninstall(editor)
    render.line("The plug-in is not installed." if path is None else f"Removed: {path}")
    return 0


@command.command(
    help="Print settings for an editor, or for a plug-in of others, with this machine's values: the "
    "socket, the address and the token. Nothing is changed.",
    epilog="Examples:\n\n\b\n  localspec editor config zed\n  localspec editor config minuet",
)
@click.argument("name", metavar="NAME", type=click.Choice(list(settings.SETTINGS)))
def config(name: str) -> int:
    here = settings.machine(default_paths())
    for each in settings.notes(name, here):
        render.note(each)
    render.verbatim(settings.SETTINGS[name].text(here))
    return 0
