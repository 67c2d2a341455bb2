"""`localspec rpc-worker`."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import sys

import click

from localspec.cli.app import Limited
from localspec.cli.settings import usable_cores
from localspec.cli.terminal import render
from localspec.errors import UsageError

PORT = 50052  # llama.cpp's usual one
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]*")


@click.command(
    "rpc-worker",
    help="Hold layers of a target for a localspec on another machine, in this one's GPUs or, without "
    "any, its main memory. It listens on its loopback. It runs until Ctrl-C and serves one pair at a time.",
    epilog="Examples:\n\n\b\n  localspec rpc-worker              # where the memory is\n"
    "  localspec rpc-worker --ssh tower  # where you ask: starts it on tower, through a tunnel\n\n"
    'Then in models.toml, where you ask: [pairs.NAME] with rpc = ["127.0.0.1:50052"].',
)
@click.option(
    "--port",
    cls=Limited,
    type=click.IntRange(1, 65_535),
    metavar="N",
    default=PORT,
    show_default=True,
    help="Port, here and at the tunnel's other end.",
)
@click.option(
    "--threads",
    cls=Limited,
    type=click.IntRange(1, 512),
    metavar="N",
    help="Threads for a processor without a GPU; one per core unless given.",
)
@click.option(
    "--ssh",
    metavar="HOST",
    help="Start it on HOST, where localspec is installed, and open a tunnel to it from here.",
)
@click.option(
    "--listen-insecure",
    metavar="ADDRESS",
    help="Listen on this address and not on the loopback. DANGER: there is no password and no encryption, "
    "and whoever reaches the port can take over this user's account.",
)
def command(port: int, threads: int | None, ssh: str | None, listen_insecure: str | None) -> int:
    if ssh is not None:
        if threads or listen_insecure:
            raise UsageError("--ssh goes with --port alone.")
        return _through_a_tunnel(ssh, port)
    host = listen_insecure or "127.0.0.1"
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise UsageError("--listen-insecure needs an IPv4 address, such as 192.168.1.5.") from None
    if listen_insecure and not ipaddress.IPv4Address(host).is_loopback:
        render.note(f"DANGER: whoever reaches {host}:{port} can take over this account.")
    render.stderr(f"Serving layers on {host}:{port}; Ctrl-C ends it.\n")
    sys.stderr.flush()
    words = [
        "-P",
        "-m",
        "localspec.engine",
        "--rpc-worker",
        host,
        str(port),
        str(threads or usable_cores()),
    ]
    _become(sys.executable, [sys.executable, *words])
    return 0


def _through_a_tunnel(host: str, port: int) -> int:
    """As ssh: with a terminal there, so that the worker ends with the connection."""
    if not _HOST.fullmatch(host):
        raise UsageError("--ssh needs a host, as ssh knows it.")
    program = shutil.which("ssh")
    if not program:
        raise UsageError("There is no ssh on this machine.")
    tunnel = ["-tt", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{port}:127.0.0.1:{port}"]
    words = ["ssh", *tunnel, host, f"localspec rpc-worker --port {port}"]
    _become(program, words)
    return 0


def _become(program: str, words: list[str]) -> None:
    """What runs from here on has this process, and with it the terminal and every signal."""
    os.execv(program, words)
