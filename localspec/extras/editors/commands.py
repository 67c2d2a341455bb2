"""The commands for people who work in an editor.

acp       a chat in an editor's agent panel
complete  complete code at a position in a file
editor    plug-ins for Vim, Neovim and VS Code, and settings for other editors
lsp       the language server
"""

from __future__ import annotations

import re
import shutil
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import Group, flag, number_option, require_consent, yes_option
from localspec.cli.commands.ask import click_option
from localspec.cli.options import AskOptions, select_options
from localspec.cli.terminal import figures, render
from localspec.client.api import Client
from localspec.errors import UsageError
from localspec.extras.editors import emacs, plugin, servers, settings, vscode
from localspec.paths import default_paths

_POSITION = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?")
_FENCE = "```"
_DEFAULT_TOKENS = 64  # enough for the few lines that an editor shows


@click.command(
    params=[*map(click_option, select_options("model", "query"))],
    help="Complete code at a position in a file, as an editor does. Lines and columns count "
    "from 1; without a column, the end of the line is used.",
    epilog="Examples:\n\n\b\n  localspec complete src/cache.py:42\n"
    "  localspec complete src/cache.py:42:17 -m coder-7b -n 128",
)
@click.argument("place", metavar="FILE:LINE[:COL]", shell_complete=suggest.files)
@number_option(
    "-n",
    "--tokens",
    low=1,
    metavar="TOKENS",
    default=_DEFAULT_TOKENS,
    show_default=True,
    help="Maximum number of tokens.",
)
@flag("--no-log", help="Do not count it in `localspec stats`.")
@flag("-u", "--usage", help="Print statistics to stderr.")
@flag("--json", "as_json", help="Print the response as one line of JSON.")
def complete_command(
    place: str,
    model: str | None,
    query: tuple[str, ...],
    tokens: int,
    no_log: bool,
    usage: bool,
    as_json: bool,
) -> None:
    prefix, suffix = split_at(place)
    lines_before, newline, line = prefix.rpartition("\n")
    request: dict[str, Any] = {
        "input_prefix": lines_before + newline,
        "prompt": line,
        "input_suffix": suffix,
        "n_predict": tokens,
        "temperature": 0,
    }
    if not no_log:
        request["localspec"] = {"kind": "complete"}
    has_fence = _FENCE in prefix + suffix
    if not has_fence:
        # A model that was trained to chat ends its code with a fence and then explains it.
        request["stop"] = [f"\n{_FENCE}"]
    if model := inputs.resolve_query(AskOptions(model=model, query=query)).model:
        request["model"] = inputs.resolve_pair(model)
    response = Client().infill(request)
    if as_json:
        render.record(response)
        return
    # Code is printed as it is, not as Markdown.
    render.whole_text(response["content"] if has_fence else code_of(response["content"]))
    if usage:
        figures.statistics(response)


def code_of(content: str) -> str:
    """Return the code of a completion, without a fence around it and the text after that."""
    if content.lstrip().startswith(_FENCE):
        content = content.lstrip().partition("\n")[2]
    return content.split(f"\n{_FENCE}")[0]


def split_at(place: str) -> tuple[str, str]:
    """Return the text before and after a position in a file.

    Raises UsageError if it is not a position, or the file has no such position.
    """
    match = _POSITION.fullmatch(place)
    if not match:
        raise UsageError(
            f"'{place}' is not FILE:LINE[:COL]; for example: localspec complete src/cache.py:42:17"
        )
    text, number = inputs.read_text(match["file"]), int(match["line"])
    lines = text.splitlines(keepends=True) or [""]
    if not 1 <= number <= len(lines):
        raise UsageError(f"{match['file']} has no line {number}; it has {len(lines)} lines.")
    line = lines[number - 1].rstrip("\r\n")
    column = int(match["column"]) if match["column"] else len(line) + 1
    if not 1 <= column <= len(line) + 1:
        raise UsageError(
            f"Line {number} of {match['file']} has no such column; its columns are 1 to "
            f"{len(line) + 1}."
        )
    offset = sum(map(len, lines[: number - 1])) + column - 1
    return text[:offset], text[offset:]


@click.group(
    cls=Group,
    help="Set up an editor: install what it needs, or print settings.",
    epilog="Examples:\n\n\b\n  localspec editor install vim\n  localspec editor install --print nvim\n"
    "  localspec editor config zed",
)
def editor_command() -> None:
    pass


_MODULES = {"vim": plugin, "nvim": plugin, "emacs": emacs, "vscode": vscode}
_editor = click.argument("editor", type=click.Choice(list(_MODULES)))


@editor_command.command(
    help="Install the plug-in for Vim or Neovim, which completes code as you type and answers questions "
    "about it: one file is written, which leads to this installation of localspec. In the editor: :help "
    "localspec. For Emacs, settings for gptel and minuet are written into its init file. For VS Code and its "
    "forks, their own programs (code, codium, …) install a small extension, which does the same.",
    epilog="Example: localspec editor install nvim",
)
@_editor
@flag("--print", "only_print", help="Only print the file that would be written.")
def install(editor: str, only_print: bool) -> None:
    module = _MODULES[editor]
    if only_print:
        comment = {"emacs": ";;", "vscode": "//"}.get(editor, '"')
        render.verbatim(f"{comment} {module.file(editor)}\n{module.text(editor)}")
        return
    render.line(f"Written: {module.install(editor)}")
    undo = f"localspec editor uninstall {editor}"
    render.line(f"It takes effect when the editor starts. To undo: {undo}")
    if editor != "vscode" and not shutil.which(editor):
        render.note(f"Note: {editor} is not on the PATH, so it may not be installed here.")


@editor_command.command(
    help="Remove what was installed. Nothing else of the editor is changed.",
    epilog="Example: localspec editor uninstall nvim",
)
@_editor
@yes_option
def uninstall(editor: str, yes: bool) -> None:
    require_consent(yes=yes)
    if not remove_installed(editor):
        render.line("It is not installed.")


def remove_installed(*editors: str) -> bool:
    """Remove what was installed for these editors, or for all, and return whether there was anything."""
    paths = [_MODULES[editor].uninstall(editor) for editor in editors or _MODULES]
    for path in filter(None, paths):
        render.line(f"Removed from: {path}" if path.exists() else f"Removed: {path}")
    return any(paths)


@editor_command.command(
    help="Print settings for an editor, or for a plug-in of others, with this machine's values: the "
    "socket, the address and the token. Nothing is changed.",
    epilog="Examples:\n\n\b\n  localspec editor config zed\n  localspec editor config minuet",
)
@click.argument("name", metavar="NAME", type=click.Choice(list(settings.SETTINGS)))
def config(name: str) -> None:
    local_settings = settings.read_environment(default_paths())
    for note in settings.setting_notes(name, local_settings):
        render.note(note)
    render.verbatim(settings.SETTINGS[name].text(local_settings))


@click.command(
    params=[*map(click_option, select_options("model"))],
    help="Run a language server on standard input and output, for an editor to start: completion as you type "
    "(textDocument/inlineCompletion, or plain completion), and the code actions explain and edit.",
    epilog="Examples:\n\n\b\n  localspec editor config helix\n  localspec lsp -m coder-7b",
)
def lsp_command(model: str | None) -> None:
    servers.require_server("lsp")
    from localspec.extras.editors import lsp

    lsp.serve(inputs.resolve_pair(model) if model else "")


@click.command(
    params=[*map(click_option, select_options("model"))],
    help="Run an agent of the Agent Client Protocol on standard input and output, for an editor to start. It "
    "is a chat: it runs nothing and changes no file.",
    epilog="Examples:\n\n\b\n  localspec editor config jetbrains\n  localspec acp -m coder-7b",
)
def acp_command(model: str | None) -> None:
    servers.require_server("acp")
    from localspec.extras.editors import acp

    acp.serve(inputs.resolve_pair(model) if model else "")
