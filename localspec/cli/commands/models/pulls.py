"""`localspec pulls`."""

from __future__ import annotations

import click

from localspec.cli import suggest
from localspec.cli.app import Group
from localspec.cli.terminal import pairs, render
from localspec.client.pairs import PairsClient


@click.group(
    cls=Group,
    invoke_without_command=True,
    help="Show running and recent pulls, or cancel one. Pulls interrupted by stopping the "
    "daemon resume when it starts again.",
    epilog="Examples:\n\n\b\n  localspec pulls\n  localspec pulls cancel coder-7b",
)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> int:
    if context.invoked_subcommand:
        return 0
    states = PairsClient().pulls()
    if as_json:
        render.record(states)
    elif states:
        pairs.pulls(states)
    else:
        render.line("No pulls are running. To start one: localspec pull NAME")
    return 0


@command.command(
    help="Cancel a pull. What was downloaded is kept for the next one.",
    epilog="Example: localspec pulls cancel coder-7b",
)
@click.argument("name", shell_complete=suggest.catalogue)
def cancel(name: str) -> int:
    state = PairsClient().cancel_pull(name)
    render.line(state["message"] or f"The pull of {state['name']} is {state['state']}.")
    return 0
