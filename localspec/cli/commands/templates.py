"""`localspec templates`: saved prompts, for `ask -t` and `chat -t`."""

from __future__ import annotations

import textwrap

import click

from localspec.cli import suggest, templates
from localspec.cli.app import Group, json_option, require_consent, yes_option
from localspec.cli.terminal import render

_MAX_PROMPT_CHARS = 160  # shown of a prompt in the list


@click.group(
    cls=Group,
    invoke_without_command=True,
    help="List, show, edit and remove templates: saved prompts with their options. "
    "`localspec ask --save NAME` creates one, `-t NAME` uses it.",
    epilog="Examples:\n\n\b\n  localspec ask --save review 'Review $input'\n"
    "  localspec templates\n  localspec templates edit review",
)
@click.pass_context
def command(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        _print_list(as_json=False)


def _print_list(*, as_json: bool) -> None:
    entries = templates.list_templates()
    if as_json:
        render.record(entries)
        return
    rows = [["NAME", "FROM", "PARAMETERS", "PROMPT"]]
    for entry in entries:
        prompt = entry["template"].get("prompt") or entry["template"].get("system") or ""
        text = textwrap.shorten(prompt, _MAX_PROMPT_CHARS, placeholder=" …")
        origin, names = "yours" if entry["file"] else "localspec", ", ".join(entry["parameters"])
        rows.append([entry["name"], origin, names, "(see below)" if entry["problem"] else text])
    render.table(rows)
    for entry in entries:
        if entry["problem"]:
            render.line(entry["problem"])


@command.command("list", help="List the templates.", epilog="Example: localspec templates list")
@json_option
def listed(as_json: bool) -> None:
    _print_list(as_json=as_json)


@command.command(help="Print a template's file.", epilog="Example: localspec templates show review")
@click.argument("name", shell_complete=suggest.saved_templates)
def show(name: str) -> None:
    render.whole_text(templates.text(name))
    render.dim(f"Use it with: {templates.usage(name, templates.read(name))}")


@command.command(
    help="Edit a template in $EDITOR, or create one. Mistakes are reported and can be edited again.",
    epilog="Example: localspec templates edit review",
)
@click.argument("name", shell_complete=suggest.saved_templates)
def edit(name: str) -> None:
    templates.edit(name)


@command.command(help="Remove templates.", epilog="Example: localspec templates rm review")
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", shell_complete=suggest.saved_templates
)
@yes_option
def rm(names: tuple[str, ...], yes: bool) -> None:
    require_consent(yes=yes)
    templates.remove(list(names))


@command.command(
    help="Print the path of the templates' folder, or of one template's file.",
    epilog='Example: ls "$(localspec templates path)"',
)
@click.argument("name", required=False, shell_complete=suggest.saved_templates)
def path(name: str | None) -> None:
    render.path(templates.folder() if name is None else templates.path(name))
