"""`localspec history`: list, show, search, remove and export past conversations."""

from __future__ import annotations

import click

from localspec.cli import suggest
from localspec.cli.app import (
    Group,
    TextCommand,
    flag,
    json_option,
    number_option,
    require_consent,
    yes_option,
)
from localspec.cli.terminal import extract, history, render
from localspec.client.conversations import ConversationsClient
from localspec.errors import LocalspecError, UsageError

_limit_option = number_option(
    "-n",
    "--limit",
    low=1,
    high=10_000,
    default=20,
    show_default=True,
    help="Maximum number of conversations.",
)


@click.group(
    cls=Group,
    synonyms={"last": ("show", "last")},
    invoke_without_command=True,
    help="List past conversations, newest first; show, search, remove and export them.",
    epilog="Examples:\n\n\b\n  localspec history\n  localspec history -n 100\n"
    "  localspec history show last\n  localspec history search copytree\n"
    "  localspec history rm 1f3a",
)
@_limit_option
@json_option
@click.pass_context
def command(context: click.Context, limit: int, as_json: bool) -> None:
    if not context.invoked_subcommand:
        _print_list(limit, as_json=as_json)


def _print_list(limit: int, *, as_json: bool) -> None:
    conversations = ConversationsClient().conversations(limit)
    if as_json:
        render.record(conversations)
    elif not conversations:
        render.dim("The history is empty.")
    else:
        history.listing(conversations)


@command.command(
    "list", help="List the newest conversations.", epilog="Example: localspec history list -n 100"
)
@_limit_option
@json_option
def listed(limit: int, as_json: bool) -> None:
    _print_list(limit, as_json=as_json)


@command.command(
    cls=TextCommand,
    help="Search conversations for a text, ignoring case. Shows the first matching line of "
    "each; exits with 1 if nothing matches.",
    epilog="Example: localspec history search copytree",
)
@click.argument("words", nargs=-1, required=True, metavar="TEXT...")
@_limit_option
@json_option
def search(words: tuple[str, ...], limit: int, as_json: bool) -> None:
    text = " ".join(words)
    if not text.strip():
        advice = "To list all conversations: localspec history"
        raise UsageError(f"There is no text to search for. {advice}")
    conversations = ConversationsClient().conversations(limit, text)
    if as_json:
        render.record(conversations)
    elif conversations:
        history.matches(conversations)
    if not conversations:
        raise LocalspecError(f"No conversation contains '{text}'.")


@command.command(
    help="Show one conversation, named by its ID, a prefix of it, or 'last'.",
    epilog="Examples:\n\n\b\n  localspec history show\n  localspec history show 1f3a --last\n"
    "  localspec history show -x > main.py",
)
@click.argument("name", default="last", shell_complete=suggest.conversations)
@flag("--last", "answer", help="Print only the last answer.")
@flag("-x", "--extract", "first", help="Print only the first code block of the last answer.")
@flag("--xl", "--extract-last", "final", help="Print only its last code block.")
@json_option
def show(name: str, answer: bool, first: bool, final: bool, as_json: bool) -> None:
    if answer + first + final + as_json > 1:
        raise click.UsageError("Use only one of --last, -x, --xl and --json.")
    conversation = ConversationsClient().conversation(name)
    if as_json:
        render.record(conversation)
    elif first or final:
        render.whole_text(extract.last_code(conversation, last=final))
    elif answer:
        render.answer(extract.last_answer(conversation))
    else:
        history.conversation(conversation)


@command.command(
    help="Remove conversations permanently.",
    epilog="Examples:\n\n\b\n  localspec history rm 1f3a\n  localspec history rm --all",
)
@click.argument("names", nargs=-1, metavar="ID...", shell_complete=suggest.conversations)
@flag("--all", "everything", help="Remove all conversations.")
@yes_option
def rm(names: tuple[str, ...], everything: bool, yes: bool) -> int:
    if everything == bool(names):
        raise click.UsageError("Name conversations to remove, or use --all.")
    require_consent(yes=yes, question="Remove all conversations permanently?" if everything else "")
    client, exit_code = ConversationsClient(), 0
    if everything:
        removed = client.forget_all()
        render.line(f"Removed {removed} conversation{'s' * (removed != 1)}.")
    for name in dict.fromkeys(names):
        try:
            render.line(f"Removed {client.forget(name)}.")
        except LocalspecError as error:  # continue with the other conversations
            render.error(error.message)
            exit_code = error.exit_code
    return exit_code


@command.command(
    help="Export all conversations as JSON, one per line.",
    epilog="Example: localspec history export > history.jsonl",
)
def export() -> None:
    client = ConversationsClient()
    for conversation in reversed(client.conversations(10_000)):
        render.record(client.conversation(conversation["id"]))
