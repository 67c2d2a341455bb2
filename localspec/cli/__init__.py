"""The command line. The program `localspec` calls `main`, and the program `ask` calls `short`.

A plain `ask` takes a short way that imports neither click nor anything else it can do without:
every import is time before the first word. Whatever that way does not understand goes to click, so
that there is one behaviour.

ask.py        one question, one answer: options → request → what is printed
options.py    the names of the commands, and the options of `ask`, for the short way and for click
inputs.py     what a command line names or is given: stdin, files, schemas
templates.py  saved prompts
prompts.py    those that come with localspec
app.py        click: help, usage errors, the table of commands
command_names.py  synonyms of commands, and what a mistyped one may mean
documents/    folders, notebooks and PDF documents, as text
commands/     one click command per file
chat/         the conversation at a terminal
shell/        what `cmd`, `commit` and `explain` consist of
editors/      what `editor` writes and prints
acp/          a chat in an editor's agent panel
lsp/          the language server
stats/        what `stats` shows
bench/        what `bench` measures and shows
terminal/     all that is drawn
suggest.py    what Tab offers
topics.py     the pages of the documentation: finding, searching and showing them
settings.py   config.toml, read and changed with its comments kept
doctor.py     what keeps localspec from working well here
services.py   the daemon as a service of the system
streams.py    stdin, stdout and stderr, whatever the shell made of them

It speaks to a daemon by `localspec.client` alone. Here only the files import `terminal/`; `commands/`,
`chat/` and `shell/` import both.
"""

from __future__ import annotations

import sys

from localspec.cli import streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1, 2 (usage), 3 (no daemon) or 130 (interrupted)."""
    streams.prepare()
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    return _guarded(lambda: _dispatch(arguments), debug=debug)


def short() -> int:
    """Run `localspec ask`, which the program `ask` is, whatever its first word is."""
    return main(["ask", *sys.argv[1:]])


def _dispatch(arguments: list[str]) -> int:
    from localspec.cli import options

    if arguments and arguments[0] not in options.COMMANDS:
        from localspec.cli import command_names

        arguments = command_names.expand(arguments)
    if arguments[:1] in (["ask"], ["chat"], ["explain"]):
        arguments = options.with_files(arguments)
    if arguments[:1] == ["ask"]:
        plain = options.parse(options.ASK, arguments[1:])
        if plain is not None:
            from localspec.cli import ask

            return ask.run(plain)
    elif arguments == ["--version"]:
        import localspec

        sys.stdout.write(f"localspec {localspec.__version__}\n")
        return 0
    from localspec.cli import app

    return app.run(arguments)


def _guarded(command: Callable[[], int], *, debug: bool) -> int:
    """`command`'s exit code; errors become one sentence, an interrupt or a closed pipe nothing."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:
        from localspec.cli.terminal import render

        code, message = _explained(error)
        streams.drop_output()
        if message and debug:
            render.traceback()
        elif message:
            render.error(message)
        return code


def _explained(error: BaseException) -> tuple[int, str]:
    """The exit code of a command that ended so, and what a person is told."""
    from localspec.errors import LocalspecError

    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    if isinstance(error, streams.Unread):
        return 0, ""  # `| head -1` has what it wants
    if isinstance(error, LocalspecError):
        return error.exit_code, error.message
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename is not None else ""
        return 1, f"{name}{error.strerror or error}. `localspec doctor` may tell more."
    return 1, (
        f"This is a bug in localspec ({type(error).__name__}: {error}). Run the same "
        "command with --debug for a traceback."
    )
