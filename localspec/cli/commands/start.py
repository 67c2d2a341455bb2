"""`localspec start`, `localspec stop` and `localspec restart`: the daemon's process."""

from __future__ import annotations

from pathlib import Path

import click

from localspec.cli.app import flag
from localspec.cli.terminal import render
from localspec.client import autostart
from localspec.client.api import Client
from localspec.config import load_config
from localspec.errors import Conflict, LocalspecError, NoDaemon
from localspec.paths import default_paths


@click.command(
    help="Start the daemon if it is not running.",
    epilog="Examples:\n\n\b\n  localspec start\n  localspec start --listen 127.0.0.1:8080",
)
@flag("--reset", help="Retry a pair that was set aside after crashes.")
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    help="Also serve TCP, with a bearer token; to keep it, set `listen` in config.toml.",
)
@flag("--listen-anywhere", help="Allow an address that other machines can reach.")
@flag("--json", "as_json", help="Output its status as one line of JSON.")
def start_command(reset: bool, listen: str | None, listen_anywhere: bool, as_json: bool) -> None:
    client = Client()
    if listen:
        flags = {"listen": listen, **({"listen_anywhere": True} if listen_anywhere else {})}
        # A mistyped address is reported here, before anything starts.
        load_config(default_paths().config_file, flags=flags)
        arguments = ["--listen", listen, *["--listen-anywhere"] * listen_anywhere]
        if not autostart.start(client.socket_path, arguments):
            raise Conflict(
                "The daemon is already running, and --listen applies only when it starts. To listen "
                f"from now on, without a restart: localspec config set listen {listen}"
            )
    status = client.status()
    if reset:
        client.reset()
    if as_json:
        render.record(status)
        return
    render.line(f"The daemon is running (pid {status['pid']}).")
    if status["listen"]:
        render.line(f"It listens on {status['listen']}; the token is in {status['token_file']}.")


@click.command(
    help="Stop the daemon, which lets answers in progress finish, and start it again.",
    epilog="Example: localspec restart",
)
def restart_command() -> None:
    flags = _listen_flags()
    stop_daemon()
    client = Client()
    if flags:
        autostart.start(client.socket_path, flags)
    render.line(f"The daemon is running (pid {client.status()['pid']}).")


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
    anywhere = ["--listen-anywhere"] * (origin.get("listen_anywhere") == "flag")
    return ["--listen", address.removeprefix("http://"), *anywhere]


@click.command(
    help="Stop the daemon. Answers in progress get a few seconds to finish.",
    epilog="Example: localspec stop",
)
def stop_command() -> None:
    stop_daemon()


def stop_daemon() -> None:
    """Stop the daemon, also one that does not respond, and print what happened."""
    client = Client(autostart=False)
    try:
        with autostart.until_gone():
            ending = client.shutdown()
            if running := ending.get("running"):
                answers = f"{running} answer{'s' * (running > 1)}"
                render.note(f"Waiting for {answers} in progress, 10 s at most …")
    except NoDaemon:
        # A daemon that hangs, has lost its socket or is ending for another client still holds its lock.
        ended = autostart.end_unresponsive()
        render.line(f"The daemon {ended}." if ended else "No daemon is running.")
        return
    render.line("The daemon has stopped.")
    for name in ending.get("pulls", []):
        render.line(f"The pull of {name} resumes when the daemon starts again: localspec start")
    if Path(client.socket_path).exists() and not autostart.is_lock_held(default_paths().lock):
        # A daemon removes its own socket, so this one is systemd's.
        render.line("systemd will start it again on demand: localspec service status")
