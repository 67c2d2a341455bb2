"""`localspec editor install|uninstall|config`."""

from __future__ import annotations

import shutil
from types import ModuleType

import click

from localspec.cli.app import Group
from localspec.cli.editors import emacs, plugin, settings
from localspec.cli.terminal import render
from localspec.paths import default_paths


@click.group(
    cls=Group,
    help="Set up an editor: install what it needs, or print settings.",
    epilog="Examples:\n\n\b\n  localspec editor install vim\n  localspec editor install --print nvim\n"
    "  localspec editor config zed",
)
def command() -> None:
    pass


_editor = click.argument("editor", type=click.Choice((*plugin.EDITORS, "emacs")))


@command.command(
    help="Install the plug-in for Vim or Neovim, which completes code as you type and answers questions "
    "about it: one file is written, which leads to this installation of localspec. In the editor: :help "
    "localspec. For Emacs, settings for gptel and minuet are written into its init file.",
    epilog="Example: localspec editor install nvim",
)
@_editor
@click.option(
    "--print", "only_print", is_flag=True, help="Only print the file that would be written."
)
def install(editor: str, only_print: bool) -> int:
    if only_print:
        comment = ";;" if editor == "emacs" else '"'
        render.verbatim(
            f"{comment} {_settings_module(editor).file(editor)}\n{_settings_module(editor).text(editor)}"
        )
        return 0
    path = _settings_module(editor).install(editor)
    render.line(f"Written: {path}")
    render.line(
        f"It takes effect when the editor starts. To undo: localspec editor uninstall {editor}"
    )
    if not shutil.which(editor):
        render.note(f"Note: {editor} is not on the PATH, so it may not be installed here.")
    return 0


def _settings_module(editor: str) -> ModuleType:
    """Return the module that installs the files of an editor."""
    return emacs if editor == "emacs" else plugin


@command.command(
    help="Remove what was installed. Nothing else of the editor is changed.",
    epilog="Example: localspec editor uninstall nvim",
)
@_editor
def uninstall(editor: str) -> int:
    path = _settings_module(editor).uninstall(editor)
    if path is None:
        render.line("It is not installed.")
    else:
        render.line(f"Removed from: {path}" if path.exists() else f"Removed: {path}")
    return 0


@command.command(
    help="Print settings for an editor, or for a plug-in of others, with this machine's values: the "
    "socket, the address and the token. Nothing is changed.",
    epilog="Examples:\n\n\b\n  localspec editor config zed\n  localspec editor config minuet",
)
@click.argument("name", metavar="NAME", type=click.Choice(list(settings.SETTINGS)))
def config(name: str) -> int:
    local_settings = settings.machine(default_paths())
    for note in settings.notes(name, local_settings):
        render.note(note)
    render.verbatim(settings.SETTINGS[name].text(local_settings))
    return 0
