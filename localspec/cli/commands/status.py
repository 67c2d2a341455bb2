"""`localspec status`: the pairs, their memory and what is running, once or every second."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import click

from localspec import ended
from localspec.cli.app import flag, json_option
from localspec.cli.terminal import figures, render
from localspec.client import autostart
from localspec.client.api import Client
from localspec.errors import NoAnswer, NoDaemon
from localspec.paths import default_paths

_REFRESH_INTERVAL_S = 1.0


@click.command(
    help="Show the configured pair and the others that are loaded, their memory and what is running. Exits "
    "with 3 if the daemon is not running.",
    epilog="Examples:\n\n\b\n  localspec status\n  localspec status -v\n  localspec status --watch\n"
    "  localspec status --json",
)
@flag("-v", "--verbose", help="Show everything: models, figures, paths.")
@json_option
@flag("-w", "--watch", help="Refresh every second until Ctrl-C.")
def command(verbose: bool, as_json: bool, watch: bool) -> None:
    client = Client(autostart=False)
    if watch:
        _watch(client, as_json=as_json, verbose=verbose)
    else:
        _show(_fetch_status(client), as_json=as_json, verbose=verbose)


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
        if autostart.is_lock_held(paths.lock) or not (
            end := ended.describe_last_end(paths.last_run)
        ):
            raise
        raise NoDaemon(f"{error.message}\n{end}") from error


def _watch(client: Client, *, as_json: bool, verbose: bool) -> None:
    """Show the status every second: on a terminal in place, in a pipe one after the other."""
    in_place = render.is_drawn_on(sys.stdout) and not as_json
    while True:
        status, reason = None, ""
        try:
            status = _fetch_status(client)
        except NoDaemon as error:
            reason = error.message.replace("\n", ". ")
        if in_place:
            rows = figures.rows(status, verbose=verbose) if status else [("daemon", reason)]
            # More rows than the window holds would scroll the first ones out of it.
            text = "\n".join(render.format_fields(rows)[: shutil.get_terminal_size().lines - 1])
            sys.stdout.write(f"\x1b[H\x1b[J{text}\n")
        elif status is not None:
            _show(status, as_json=as_json, verbose=verbose)
        elif not as_json:
            render.line(reason)
        sys.stdout.flush()
        time.sleep(_REFRESH_INTERVAL_S)
