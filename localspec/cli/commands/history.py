"""`localspec history`: what was asked and answered."""

from __future__ import annotations

import click

from localspec.cli import suggest
from localspec.cli.terminal import history, render
from localspec.client.conversations import ConversationsClient

_JSON = click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")


@click.group(
    invoke_without_command=True,
    help="List past conversations, newest first; show, search, remove and export them.",
    epilog="Examples:\n\n\b\n  localspec history\n  localspec history show last\n"
    "  localspec history search copytree\n  localspec history rm 1f3a",
)
@click.pass_context
def command(context: click.Context) -> int:
    if context.invoked_subcommand is None:
        return _listed(20, "", as_json=False)
    return 0


def _listed(limit: int, search: str, *, as_json: bool) -> int:
    found = ConversationsClient().conversations(limit, search)
    if as_json:
        render.record(found)
    elif not found:
        render.dim("Nothing was found." if search else "Nothing was asked yet.")
    else:
        history.listing(found)
    return 0


@command.command(
    "list",
    help="List the newest conversations.",
    epilog="Example: localspec history list -n 100",
)
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), default=20, help="Maximum number.")
@_JSON
def listed(limit: int, as_json: bool) -> int:
    return _listed(limit, "", as_json=as_json)


@command.command(
    help="Search conversations for a text, ignoring case.",
    epilog="Example: localspec history search copytree",
)
@click.argument("text")
@click.option("-n", "--limit", type=click.IntRange(1, 10_000), default=20, help="Maximum number.")
@_JSON
def search(text: str, limit: int, as_json: bool) -> int:
    return _listed(limit, text, as_json=as_json)


@command.command(
    help="Show one conversation, named by its ID, a prefix of it, or 'last'.",
    epilog="Example: localspec history show last",
)
@click.argument("name", default="last", shell_complete=suggest.conversations)
@_JSON
def show(name: str, as_json: bool) -> int:
    found = ConversationsClient().conversation(name)
    (render.record if as_json else history.conversation)(found)
    return 0


@command.command(
    help="Remove conversations permanently.",
    epilog="Examples:\n\n\b\n  localspec history rm 1f3a\n  localspec history rm --all",
)
@click.argument("names", nargs=-1, metavar="ID...", shell_complete=suggest.conversations)
@click.option("--all", "everything", is_flag=True, help="Remove all conversations.")
def rm(names: tuple[str, ...], everything: bool) -> int:
    if everything == bool(names):
        raise click.UsageError("Name conversations to remove, or use --all.")
    client = ConversationsClient()
    if everything:
        render.line(f"{client.forget_all()} removed.")
    for name in names:
        render.line(f"{client.forget(name)} removed.")
    return 0


@command.command(
    help="Export all conversations as JSON, one per line.",
    epilog="Example: localspec history export > history.jsonl",
)
def export() -> int:
    client = ConversationsClient()
    for each in reversed(client.conversations(10_000)):
        render.record(client.conversation(each["id"]))
    return 0
