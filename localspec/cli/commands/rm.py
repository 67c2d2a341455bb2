"""`localspec rm` and `localspec gc`: remove pairs, and files that no pair needs."""

from __future__ import annotations

import click

from localspec.cli import suggest
from localspec.cli.app import flag, json_option, require_consent, yes_option
from localspec.cli.terminal import render
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NoDaemon
from localspec.files import format_size


@click.command(
    help="Remove pairs. Files that another pair needs are kept, and so are your own files.",
    epilog="Example: localspec rm coder-7b",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=suggest.pairs)
@yes_option
def rm_command(names: tuple[str, ...], yes: bool) -> int:
    require_consent(yes=yes)
    client, code = PairsClient(), 0
    configured = client.pairs().get("configured", "")
    for name in dict.fromkeys(names):
        try:
            removed = client.remove(name)
        except NoDaemon:
            raise
        except LocalspecError as error:  # continue with the other pairs
            render.error(error.message)
            code = error.exit_code
            continue
        render.line(f"Removed {removed['name']}; {format_size(removed['freed'])} freed.")
        for kept_file in removed["kept"]:
            render.line(f"kept: {kept_file}")
        if removed["name"] == configured:
            render.error(
                f"{configured} is the configured pair, so questions fail until another one is chosen: "
                "localspec use NAME, or localspec config unset pair"
            )
    return code


@click.command(
    help="Delete files that no pair or conversation needs, including those of cancelled pulls.",
    epilog="Example: localspec gc --dry-run",
)
@flag("--dry-run", help="Only show what would be deleted.")
@yes_option
@json_option
def gc_command(dry_run: bool, yes: bool, as_json: bool) -> None:
    question = "Delete all files that `localspec gc --dry-run` lists?"
    require_consent(yes=yes or dry_run, question=question)
    result = PairsClient().collect(dry_run=dry_run)
    if as_json:
        render.record(result)
        return
    for file in result["files"]:
        render.line(file)
    verb = "would be freed" if dry_run else "freed"
    freed = f"{format_size(result['freed'])} {verb}."
    render.line(freed if result["files"] else "Nothing to delete.")
