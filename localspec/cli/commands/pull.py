"""`localspec pull`."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli import render, suggest
from localspec.cli.progress import Progress
from localspec.cli.render_pairs import size
from localspec.client.api import from_code
from localspec.client.pairs import PairsClient

INTERRUPTED = 130


@click.command(
    help="Fetch a pair of the catalogue: checked before, whole and verified after. It goes on in "
    "the daemon when you leave; a pull that was cut off goes on where it was.",
    epilog="Examples:\n\n\b\n  localspec pull coder-7b\n  localspec pull coder-14b --no-wait",
)
@click.argument("name", shell_complete=suggest.catalogue)
@click.option("--no-wait", is_flag=True, help="Return at once; `localspec pulls` shows it.")
@click.option("--json", "as_json", is_flag=True, help="Print its states as lines of JSON.")
def command(name: str, no_wait: bool, as_json: bool) -> int:
    client = PairsClient()
    state = client.start_pull(name)
    if no_wait:
        if as_json:
            render.record(state)
        else:
            render.line(f"{state['name']} is being pulled; to see how far: localspec pulls")
        return 0
    try:
        state = _watch(client, state, as_json)
    except KeyboardInterrupt:
        own = state["name"]
        render.error(
            f"The pull of {own} goes on in the daemon. To watch it: localspec pull {own}; "
            f"to stop it: localspec pulls cancel {own}"
        )
        return INTERRUPTED
    if state["state"] != "done":
        raise from_code(state["code"], state["message"])
    if not as_json:
        _welcome(state)
    return 0


def _watch(client: PairsClient, state: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Show the pull until its end; the last state."""
    name = state["name"]
    with Progress(name) as progress:
        for state in client.watch_pull(name):
            if as_json:
                render.record(state)
            elif state["state"] in ("checking", "downloading", "verifying"):
                progress.show(
                    state["state"],
                    state["done"],
                    state["size"],
                    state["rate"],
                    state["seconds_left"],
                )
    return state


def _welcome(state: dict[str, Any]) -> None:
    for note in state["notes"]:
        render.line(f"note: {note}")
    name = state["name"]
    render.line(f'{name} is here ({size(state["size"])}). Try: localspec ask -m {name} "…"')
