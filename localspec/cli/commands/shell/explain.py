"""`localspec explain`: the last failed command, or an error message."""

from __future__ import annotations

import os
from typing import Any

import click

from localspec.cli import ask, options
from localspec.cli.commands.ask import click_option
from localspec.cli.shell import asking, failures, shells
from localspec.cli.terminal import render
from localspec.errors import UsageError

_OPTIONS = options.select_options(
    *(
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
)


def _run(words: tuple[str, ...], **values: Any) -> int:
    if words and all(map(os.path.isfile, words)):
        values["files"], words = (*values["files"], *words), ()
    text = ask.read_question({**values, "words": list(words)}) or _last_failure()
    variables = {"shell": shells.current_shell().language, "system": shells.system()}
    template_options = {**values, "files": [], "about": ask.clean(" ".join(words))}
    asking.ask_and_print("explain", template_options, asking.middle_left_out(text), variables)
    return 0


def _last_failure() -> str:
    """Return the text about the command that failed last in this shell.

    Raises:
        UsageError: no failure is recorded.
    """
    failed = failures.last()
    if failed is None:
        raise UsageError(
            "No failed command is recorded in this shell. Pipe an error in:\n"
            "  make 2>&1 | localspec explain\n"
            "or let the shell record its failed commands:\n"
            '  eval "$(localspec completion bash --hook)"'
        )
    first, *more = failed.command.split("\n")
    render.dim(f"Exit code {failed.code}: {first}{' …' if more else ''}")
    return (
        f"This command ended with exit code {failed.code}{failures.meaning(failed.code)}:\n\n"
        f"```\n{failed.command}\n```"
    )


command = click.Command(
    "explain",
    callback=_run,
    params=[
        click.Argument(["words"], nargs=-1, metavar="[WORDS]..."),
        *map(click_option, _OPTIONS),
    ],
    help="Explain the last command that failed in this shell, or the error message in WORDS, in a file (-f) "
    "or on stdin. Failed commands are known where the shell records them: localspec completion --help.",
    epilog="Examples:\n\n\b\n  localspec explain\n  make 2>&1 | localspec explain\n"
    '  localspec explain "E: Unable to locate package foo"\n  localspec explain < err.txt',
)
