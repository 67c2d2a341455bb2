"""`localspec rm`."""

from __future__ import annotations

import click

from localspec.cli import suggest
from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import size
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NoDaemon


@click.command(
    help="Remove pairs. Files that another pair needs are kept, and so are your own files.",
    epilog="Example: localspec rm coder-7b",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=suggest.pairs)
def command(names: tuple[str, ...]) -> int:
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
        render.line(f"Removed {removed['name']}; {size(removed['freed'])} freed.")
        for kept_file in removed["kept"]:
            render.line(f"kept: {kept_file}")
        if removed["name"] == configured:
            render.error(
                f"{configured} is the configured pair, so questions fail until another one is chosen: "
                "localspec use NAME, or localspec config unset pair"
            )
    return code
