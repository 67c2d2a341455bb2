"""`localspec lsp`."""

from __future__ import annotations

import click

from localspec.cli import inputs
from localspec.cli.commands.editors import pair_option
from localspec.cli.editors import servers


@click.command(
    help="Run a language server on standard input and output, for an editor to start: completion as you type "
    "(textDocument/inlineCompletion, or plain completion), and the code actions explain and edit.",
    epilog="Examples:\n\n\b\n  localspec editor config helix\n  localspec lsp -m coder-7b",
)
@pair_option
def command(model: str | None) -> int:
    servers.require("lsp")
    from localspec.cli.lsp import server

    server.serve(inputs.resolve_pair(model) if model else "")
    return 0
