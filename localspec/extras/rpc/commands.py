"""`localspec rpc-worker`."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

import click

from localspec import paths, relay
from localspec.children import engine_environment
from localspec.cli.app import number_option
from localspec.cli.settings import usable_cores
from localspec.cli.terminal import render
from localspec.errors import UsageError

PORT = 50052  # llama.cpp's default
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]*")


@click.command(
    "rpc-worker",
    help="Lend this machine's memory to localspec on another one: its GPUs' or, without any, its main "
    "memory. It listens on its loopback. It runs until Ctrl-C and serves one pair at a time.",
    epilog="Examples:\n\n\b\n  localspec rpc-worker              # where the memory is\n"
    "  localspec rpc-worker --ssh tower  # where you ask: starts it on tower, through a tunnel\n\n"
    'Then in models.toml, where you ask: [pairs.NAME] with rpc = ["127.0.0.1:50052"].',
)
@number_option(
    "--port",
    low=1,
    high=65_535,
    default=PORT,
    show_default=True,
    help="Port, here and at the tunnel's other end.",
)
@number_option(
    "--threads",
    low=1,
    high=512,
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
def command(
    port: int, threads: int | None, ssh: str | None, listen_insecure: str | None
) -> int | None:
    if ssh is not None:
        if threads or listen_insecure:
            raise UsageError("--ssh goes with --port alone.")
        return _run_through_ssh(ssh, port)
    host = listen_insecure or "127.0.0.1"
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise UsageError("--listen-insecure needs an IPv4 address, such as 192.168.1.5.") from None
    if listen_insecure and not ipaddress.IPv4Address(host).is_loopback:
        render.note(f"DANGER: whoever reaches {host}:{port} can take over this account.")
    render.stderr(f"Serving layers on {host}:{port}; Ctrl-C ends it.\n")
    sys.stderr.flush()
    words = ["-P", "-m", "localspec.engine", "--rpc-worker", host, str(port)]
    words.append(str(threads or usable_cores()))
    os.execve(sys.executable, [sys.executable, *words], engine_environment())
    return None


def _run_through_ssh(host: str, port: int) -> int:
    """Start the worker on `host` by ssh, with a tunnel to it, and return ssh's exit code.

    ssh gets a terminal there, so that the worker ends with the connection. A port that ssh listens on is open
    to every user of this machine. So ssh listens on a socket in our runtime folder instead, and this process
    forwards those connections to the port that belong to this user.
    """
    if not _HOST.fullmatch(host):
        raise UsageError("--ssh needs a host, as ssh knows it.")
    program = shutil.which("ssh")
    if not program:
        raise UsageError("There is no ssh on this machine.")
    tables = relay.SocketTables()
    if not tables.available:
        render.note(
            f"DANGER: every user of this machine can reach 127.0.0.1:{port}, and with it take over your "
            f"account on {host}. This system does not show whose a connection is."
        )
        os.execv(program, _ssh_command(host, port, f"127.0.0.1:{port}"))
    folder = paths.make_private_directory(paths.default_paths().runtime)
    tunnel_path = str(folder / f"rpc-{port}.sock")
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UsageError(f"127.0.0.1:{port} cannot be listened on ({error.strerror}).") from None

    def connect() -> socket.socket:
        tunnel = socket.socket(socket.AF_UNIX)
        tunnel.connect(tunnel_path)
        return tunnel

    with listener, subprocess.Popen([program, *_ssh_command(host, port, tunnel_path)[1:]]) as ssh:
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signal_number, lambda number, _: ssh.send_signal(number))
        accepted = listener, connect, tables, {0, os.getuid()}
        threading.Thread(target=relay.forward, args=accepted, daemon=True).start()
        return ssh.wait()


def _ssh_command(host: str, port: int, end: str) -> list[str]:
    """Return the ssh command for a tunnel from `end`, a port or a socket of this machine."""
    options = ["-tt", "-o", "ExitOnForwardFailure=yes"]
    if end.startswith("/"):
        options += ["-o", "StreamLocalBindUnlink=yes", "-o", "StreamLocalBindMask=0177"]
    options += ["-L", f"{end}:127.0.0.1:{port}"]
    return ["ssh", *options, host, f"localspec rpc-worker --port {port}"]
