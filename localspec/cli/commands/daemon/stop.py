"""`localspec stop`."""

from __future__ import annotations

from pathlib import Path

import click

from localspec.cli.terminal import render
from localspec.client import autostart
from localspec.client.api import Client
from localspec.errors import NoDaemon
from localspec.paths import default_paths


@click.command(
    help="Stop the daemon. Answers in progress get a few seconds to finish.",
    epilog="Example: localspec stop",
)
def command() -> int:
    stop_daemon()
    return 0


def stop_daemon() -> None:
    """Stop the daemon and print whether it stopped, and which pulls will resume."""
    client = Client(autostart=False)
    try:
        with autostart.until_gone():
            pulls = client.shutdown().get("pulls", [])
    except NoDaemon:
        # A daemon that hangs or has lost its socket still holds its lock.
        was_killed = autostart.end_unresponsive()
        render.line(
            "The daemon did not respond and was killed." if was_killed else "No daemon is running."
        )
        return
    render.line("The daemon has stopped.")
    for name in pulls:
        render.line(f"The pull of {name} resumes when the daemon starts again: localspec start")
    if Path(client.socket_path).exists() and not autostart.held(default_paths().lock):
        # A daemon removes its own socket, so this one is systemd's.
        render.line("systemd will start it again on demand: localspec service status")
