"""`localspec completion`."""

from __future__ import annotations

import click

from localspec.cli.terminal import render


@click.command(
    help="Print the completion script for a shell.",
    epilog='Examples:\n\n\b\n  eval "$(localspec completion bash)"      # in ~/.bashrc\n'
    '  eval "$(localspec completion zsh)"       # in ~/.zshrc\n'
    "  localspec completion fish | source        # in config.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    from click.shell_completion import get_completion_class

    from localspec.cli.app import app

    found = get_completion_class(shell)
    assert found is not None
    render.line(found(app, {}, "localspec", "_LOCALSPEC_COMPLETE").source())
    return 0
