"""`localspec completion`."""

from __future__ import annotations

import click

from localspec.cli.terminal import render


@click.command(
    help="Print the completion script for a shell. With --hook it also lets the shell record its last failed "
    "command, in a file that only you can read, for `localspec explain`.",
    epilog='Examples:\n\n\b\n  eval "$(localspec completion bash)"      # in ~/.bashrc\n'
    '  eval "$(localspec completion zsh)"       # in ~/.zshrc\n'
    "  localspec completion fish | source        # in config.fish\n"
    '  eval "$(localspec completion bash --hook)"',
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--hook", is_flag=True, help="Record the last failed command as well.")
def command(shell: str, hook: bool) -> int:
    from click.shell_completion import get_completion_class

    from localspec.cli.app import app

    found = get_completion_class(shell)
    assert found is not None
    render.verbatim(found(app, {}, "localspec", "_LOCALSPEC_COMPLETE").source())
    if hook:
        from localspec.cli.shell import failures

        render.verbatim(failures.hook(shell))
    return 0
