"""`localspec start`."""

from __future__ import annotations

import click

from localspec.cli import render
from localspec.client.api import Client


@click.command(help="Start the daemon, unless it is running.", epilog="Example: localspec start")
@click.option("--reset", is_flag=True, help="Try again a pair that was set aside after crashes.")
def command(reset: bool) -> int:
    client = Client()
    status = client.status()
    if reset:
        client.reset()
    render.line(f"The daemon is running (pid {status['pid']}).")
    return 0
