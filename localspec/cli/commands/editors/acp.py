"""`localspec acp`."""

from __future__ import annotations

import click

from localspec.cli import inputs
from localspec.cli.commands.editors import pair_option
from localspec.cli.editors import servers


@click.command(
    help="Run an agent of the Agent Client Protocol on standard input and output, for an editor to start. It "
    "is a chat: it runs nothing and changes no file.",
    epilog="Examples:\n\n\b\n  localspec editor config jetbrains\n  localspec acp -m coder-7b",
)
@pair_option
def command(model: str | None) -> int:
    servers.require("acp")
    from localspec.cli.acp import agent

    agent.serve(inputs.resolve_pair(model) if model else "")
    return 0
