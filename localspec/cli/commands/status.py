"""`localspec status`."""

from __future__ import annotations

import click

from localspec.cli import render
from localspec.client.api import Client


@click.command(
    help="Show what the daemon is doing. Exit code 3 when none is running.",
    epilog="Example: localspec status --json",
)
@click.option("--json", "as_json", is_flag=True, help="Print it as one line of JSON.")
def command(as_json: bool) -> int:
    status = Client(autostart=False).status()
    (render.record if as_json else render.status)(status)
    return 0
