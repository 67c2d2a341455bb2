"""`localspec start`."""

from __future__ import annotations

import click

from localspec.cli.terminal import render
from localspec.client import autostart
from localspec.client.api import Client
from localspec.config import load_config
from localspec.errors import Conflict
from localspec.paths import default_paths


@click.command(
    help="Start the daemon if it is not running.",
    epilog="Examples:\n\n\b\n  localspec start\n  localspec start --listen 127.0.0.1:8080",
)
@click.option("--reset", is_flag=True, help="Retry a pair that was set aside after crashes.")
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    help="Also serve TCP, with a bearer token; to keep it, set `listen` in config.toml.",
)
@click.option(
    "--listen-anywhere", is_flag=True, help="Allow an address that other machines can reach."
)
@click.option("--json", "as_json", is_flag=True, help="Output its status as one line of JSON.")
def command(reset: bool, listen: str | None, listen_anywhere: bool, as_json: bool) -> int:
    client = Client()
    if listen:
        flags = {"listen": listen, **({"listen_anywhere": True} if listen_anywhere else {})}
        # A mistyped address is reported here, before anything starts.
        load_config(default_paths().config_file, flags=flags)
        arguments = ["--listen", listen, *(["--listen-anywhere"] if listen_anywhere else [])]
        if not autostart.start(client.socket_path, arguments):
            raise Conflict(
                "The daemon is already running, and --listen applies only when it starts; run: "
                f"localspec stop && localspec start --listen {listen}"
            )
    status = client.status()
    if reset:
        client.reset()
    if as_json:
        render.record(status)
        return 0
    render.line(f"The daemon is running (pid {status['pid']}).")
    if status["listen"]:
        render.line(f"It listens on {status['listen']}; the token is in {status['token_file']}.")
    return 0
