"""`localspec cmd`: propose one shell command for a description."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli import ask, options
from localspec.cli.commands.ask import click_option
from localspec.cli.shell import answers, asking, proposal, shells
from localspec.cli.terminal import render
from localspec.errors import LocalspecError, UsageError

_OPTIONS = options.select_options(
    "model",
    "system",
    "tokens",
    "files",
    "template",
    "plain",
    "hide_reasoning",
    "usage",
    "no_log",
    "no_daemon_start",
    "debug",
)


def _run(words: tuple[str, ...], shell: str | None, **values: Any) -> int:
    if not words:
        raise UsageError('Describe the command, as in: localspec cmd "count the lines in *.py"')
    text = ask.read_question({**values, "words": list(words)})
    target_shell = shells.shell_for(shell) if shell else shells.current_shell()
    variables = {"shell": target_shell.language, "system": shells.system()}

    template_options = {**values, "files": [], "about": ask.clean(" ".join(words))}
    answer = asking.ask_for_text("cmd", template_options, asking.uncut(text), variables)
    command = answers.extract_command(answer.text)
    if answer.cut_off:
        raise LocalspecError(
            f"The answer was cut off by the token limit; it began: {answer.text[:200]}"
        )
    if not command:
        raise LocalspecError(f"The answer contains no command: {answer.text.strip()}")
    proposal.require_visible(command)
    if not proposal.at_terminal():
        render.text(command)
        render.end_of_text()
        return 0

    def explain(command: str) -> None:
        fenced = f"```\n{command}\n```"
        asking.ask_and_print(
            "cmd-explain", {**values, "files": []}, asking.uncut(fenced), variables
        )

    return proposal.decide(command, target_shell, explain)


command = click.Command(
    "cmd",
    callback=_run,
    params=[
        click.Argument(["words"], nargs=-1, metavar="WORDS..."),
        click.Option(
            ["--shell"],
            type=click.Choice(["bash", "zsh", "fish", "sh"]),
            help="Shell to write for; by default the one in use.",
        ),
        *map(click_option, _OPTIONS),
    ],
    help="Propose one shell command for what WORDS describe. On a terminal, Enter runs it, e edits it first, "
    "x explains it, and any other key cancels; the exit code is then the command's own. Without a "
    "terminal the command is printed and not run.",
    epilog='Examples:\n\n\b\n  localspec cmd "find files over 1 GB changed this week"\n'
    '  localspec cmd --shell fish "list all variables"\n'
    '  make -pn | localspec cmd "build only the documentation"',
)
