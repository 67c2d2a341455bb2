"""`localspec restart`."""

from __future__ import annotations

import click

from localspec.cli.commands.daemon.stop import stop_daemon
from localspec.cli.terminal import render
from localspec.client import autostart
from localspec.client.api import Client
from localspec.errors import LocalspecError


@click.command(
    help="Stop the daemon, which lets answers in progress finish, and start it again.",
    epilog="Example: localspec restart",
)
def command() -> int:
    flags = _listen_flags()
    stop_daemon()
    client = Client()
    if flags:
        autostart.start(client.socket_path, flags)
    render.line(f"The daemon is running (pid {client.status()['pid']}).")
    return 0


def _listen_flags() -> list[str]:
    """Return the options that the running daemon was started with, for the next start."""
    client = Client(autostart=False)
    try:
        origin, address = client.configure()["origin"], client.status()["listen"]
    except LocalspecError:
        # No daemon is running, or it does not respond. The next one starts without options then.
        return []
    if origin.get("listen") != "flag" or not address:
        return []
    anywhere = ["--listen-anywhere"] if origin.get("listen_anywhere") == "flag" else []
    return ["--listen", address.removeprefix("http://"), *anywhere]
