"""`localspec load`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from localspec import ended
from localspec.cli import inputs, suggest
from localspec.cli.app import NumberOption
from localspec.cli.terminal import figures, progress, render
from localspec.client import autostart
from localspec.client.api import Client
from localspec.client.pairs import PairsClient
from localspec.config import load_config
from localspec.errors import Conflict, LocalspecError, NoAnswer, NoDaemon, NotFound, UsageError
from localspec.paths import default_paths, read_file


@click.command(
    help="Load a pair now, so that the first question to it does not wait; without NAME, the one that "
    "answers by default.",
    epilog="Examples:\n\n\b\n  localspec load\n  localspec load coder-7b",
)
@click.argument("name", required=False, default="", shell_complete=suggest.pairs)
def load_command(name: str) -> int:
    client = PairsClient()
    indicator = progress.Spinner(client, "loading") if render.is_drawn_on(sys.stderr) else None
    try:
        with closing(client.load(inputs.resolve_pair(name) if name else "")) as states:
            *_, final_state = states
    finally:
        if indicator:
            indicator.stop()
    render.line(f"{final_state['name']} is loaded.")
    return 0


# ------------------------------------------------------------------------ unload
# `localspec unload`.


@click.command(
    help="Unload a pair, or all, and free their memory; the next question loads its pair again.",
    epilog="Examples:\n\n\b\n  localspec unload\n  localspec unload coder-7b",
)
@click.argument("name", required=False, default="", shell_complete=suggest.pairs)
def unload_command(name: str) -> int:
    unloaded = PairsClient(autostart=False).unload(inputs.resolve_pair(name) if name else "")
    for pair_name in unloaded:
        render.line(f"{pair_name} has been unloaded.")
    if not unloaded:
        render.line(f"{name} is not loaded." if name else "No pair is loaded.")
    return 0


# ------------------------------------------------------------------------ start
# `localspec start`.


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
def start_command(reset: bool, listen: str | None, listen_anywhere: bool, as_json: bool) -> int:
    client = Client()
    if listen:
        flags = {"listen": listen, **({"listen_anywhere": True} if listen_anywhere else {})}
        # A mistyped address is reported here, before anything starts.
        load_config(default_paths().config_file, flags=flags)
        arguments = ["--listen", listen, *(["--listen-anywhere"] if listen_anywhere else [])]
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
        return 0
    render.line(f"The daemon is running (pid {status['pid']}).")
    if status["listen"]:
        render.line(f"It listens on {status['listen']}; the token is in {status['token_file']}.")
    return 0


# ------------------------------------------------------------------------ restart
# `localspec restart`.


@click.command(
    help="Stop the daemon, which lets answers in progress finish, and start it again.",
    epilog="Example: localspec restart",
)
def restart_command() -> int:
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


# ------------------------------------------------------------------------ stop
# `localspec stop`.


@click.command(
    help="Stop the daemon. Answers in progress get a few seconds to finish.",
    epilog="Example: localspec stop",
)
def stop_command() -> int:
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
    if Path(client.socket_path).exists() and not autostart.is_lock_held(default_paths().lock):
        # A daemon removes its own socket, so this one is systemd's.
        render.line("systemd will start it again on demand: localspec service status")


# ------------------------------------------------------------------------ status
# `localspec status`.


_REFRESH_INTERVAL_S = 1.0


@click.command(
    help="Show the configured pair and the others that are loaded, their memory and what is running. Exits "
    "with 3 if the daemon is not running.",
    epilog="Examples:\n\n\b\n  localspec status\n  localspec status -v\n  localspec status --watch\n"
    "  localspec status --json",
)
@click.option("-v", "--verbose", is_flag=True, help="Show everything: models, figures, paths.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
@click.option("-w", "--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
def status_command(verbose: bool, as_json: bool, watch: bool) -> int:
    client = Client(autostart=False)
    if watch:
        _watch(client, as_json=as_json, verbose=verbose)
    else:
        _show(_fetch_status(client), as_json=as_json, verbose=verbose)
    return 0


def _show(status: dict[str, Any], *, as_json: bool, verbose: bool) -> None:
    if as_json:
        render.record(status)
    else:
        figures.status(status, verbose=verbose)


def _fetch_status(client: Client) -> dict[str, Any]:
    """Return the daemon's status. Raises NoDaemon, which says how the last daemon ended."""
    try:
        return client.status()
    except NoAnswer:
        raise
    except NoDaemon as error:
        paths = default_paths()
        ending = (
            "" if autostart.is_lock_held(paths.lock) else ended.describe_last_end(paths.last_run)
        )
        raise NoDaemon(f"{error.message}\n{ending}" if ending else error.message) from error


def _watch(client: Client, *, as_json: bool, verbose: bool) -> None:
    """Show the status every second: on a terminal in place, in a pipe one after the other."""
    in_place = render.is_drawn_on(sys.stdout) and not as_json
    while True:
        try:
            status = _fetch_status(client)
        except NoDaemon as error:
            status = None
            reason = error.message.replace("\n", ". ")
        if in_place:
            rows = (
                figures.rows(status, verbose=verbose)
                if status is not None
                else [("daemon", reason)]
            )
            _redraw(render.format_fields(rows))
        elif status is not None:
            _show(status, as_json=as_json, verbose=verbose)
        elif not as_json:
            render.line(reason)
        sys.stdout.flush()
        time.sleep(_REFRESH_INTERVAL_S)


def _redraw(rows: list[str]) -> None:
    """Draw as many rows as the window holds. More would scroll the first ones out of it."""
    text = "\n".join(rows[: shutil.get_terminal_size().lines - 1])
    sys.stdout.write(f"\x1b[H\x1b[J{text}\n")


# ------------------------------------------------------------------------ logs
# `localspec logs`.


_POLL_INTERVAL_S = 0.2  # between two looks at a log that is followed


@click.command(
    help="Show the end of the daemon's log. It contains no prompts unless `log_prompts` is set.",
    epilog="Examples:\n\n\b\n  localspec logs -n 50\n  localspec logs --follow\n"
    "  localspec logs --path",
)
@click.option(
    "-n",
    "--lines",
    cls=NumberOption,
    type=click.IntRange(min=0),
    metavar="N",
    default=20,
    show_default=True,
    help="Number of lines.",
)
@click.option("-f", "--follow", is_flag=True, help="Follow the log.")
@click.option("--path", "only_path", is_flag=True, help="Print the path of the log.")
def logs_command(lines: int, follow: bool, only_path: bool) -> int:
    log = default_paths().log
    if only_path:
        render.path(log)
        return 0
    if not log.exists() and not follow:
        raise NotFound(f"There is no log yet ({log}); the daemon has never been started.")
    data, inode = b"", 0
    if log.exists():
        if not log.is_file():
            raise NotFound(f"{log} is not a file, so nothing is logged; remove it.")
        with log.open("rb") as file:
            inode, data = os.fstat(file.fileno()).st_ino, file.read()
    log_lines = _split_lines(data)
    for line in log_lines[-lines:] if lines else []:
        render.verbatim(line)
    if follow:
        _follow(log, len(data), inode)
    return 0


def _split_lines(data: bytes) -> list[str]:
    """Split a log at newlines only. Other line ends are part of a logged text and are shown as such."""
    return data.decode("utf-8", "replace").removesuffix("\n").split("\n") if data else []


def _follow(log: Path, position: int, inode: int) -> None:
    """Print what is appended after byte `position`, until Ctrl-C.

    A log with another inode than `inode` has been rotated and is read from its beginning.
    """
    while True:
        sys.stdout.flush()
        time.sleep(_POLL_INTERVAL_S)
        if not log.exists():
            continue
        info = log.stat()
        if info.st_ino != inode or info.st_size < position:
            position, inode = 0, info.st_ino
        if info.st_size > position:
            with log.open("rb") as file:
                file.seek(position)
                data = file.read()
            complete_lines = data[: data.rfind(b"\n") + 1]
            position += len(complete_lines)
            for line in _split_lines(complete_lines):
                render.verbatim(line)


# ------------------------------------------------------------------------ token
# `localspec token`.


@click.command(
    help="Print the bearer token that TCP clients need.",
    epilog='Examples:\n\n\b\n  localspec token\n  export OPENAI_API_KEY="$(localspec token)"',
)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def token_command(as_json: bool) -> int:
    file = default_paths().token
    try:
        token = read_file(file).decode("ascii", "replace").strip()
    except FileNotFoundError:
        token = ""
    except OSError as error:
        raise UsageError(f"The token file {file} cannot be read: {error.strerror}.") from error
    if not token:
        raise UsageError(
            f"There is no token in {file} yet; it is made when TCP is first served: localspec config set "
            "listen 127.0.0.1:8012"
        )
    if as_json:
        render.record({"token": token, "file": str(file)})
        return 0
    render.verbatim(token)
    if sys.stdout.isatty():
        render.note(f"It is stored in {file}. Whoever has it can do what you can.")
    return 0
