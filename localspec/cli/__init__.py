"""The command line. The program `localspec` calls `main`, and the program `ask` calls `short`.

A plain `ask` takes a fast path that imports neither click nor any other module it can do without,
because every import delays the first word of the answer. Command lines that the fast path does not
understand go to click. Both paths run the same code, so there is only one behaviour.

ask.py        one question, one answer: options → request → printed answer
options.py    the names of the commands, and the options of `ask`, for the fast path and for click
inputs.py     the inputs of a command line: stdin, files, schemas
templates.py  saved prompts
app.py        click: help, usage errors, the table of commands
command_names.py  synonyms of commands, and corrections of mistyped ones
documents.py  folders, notebooks and PDF documents, converted to text
commands/     one click command per file, or some that belong together
chat/         the conversation at a terminal
terminal/     everything that is drawn
suggest.py    completions for the Tab key
topics.py     the pages of the documentation: finding, searching and showing them
settings.py   reading and changing config.toml while keeping its comments
base_models.py  what to say where a model cannot chat
html.py       HTML documents as text
streams.py    stdin, stdout and stderr, also where the shell closed them

The command line talks to the daemon through `localspec.client` only. The files of this folder may
import `terminal/`; `commands/` and `chat/` may import both.
"""

from __future__ import annotations

import gc
import sys

from localspec.cli import streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = -2  # exit code of a command that Ctrl-C (SIGINT) ended, as `subprocess` reports it


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    The code is 0, 1, 2 (usage error), 3 (no daemon), or that of a program that a signal ended. Without
    `argv` this process is the program, and a signal really ends it: a shell runs the rest of a loop after a
    program that only returns 130.
    """
    if argv is None:
        # Garbage collections during the imports are a twentieth of a short command's time.
        gc.set_threshold(100_000)
    streams.prepare()
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = _run_guarded(lambda: _dispatch(arguments), debug="--debug" in arguments)
    except KeyboardInterrupt:  # a second one, before the first was handled
        code = INTERRUPTED
    api = sys.modules.get("localspec.client.api")
    if api is not None and (
        message := api.version_note()
    ):  # the daemon is older, as after an upgrade
        from localspec.cli.terminal import render

        render.note(message)
        api.Client.daemon_version = None
    if code < 0 and argv is None:
        streams.end_by_signal(-code)
    return code if code >= 0 else 128 - code


def short() -> int:
    """Run `localspec ask` for the program `ask`, whatever its first word is."""
    sys.argv.insert(1, "ask")
    return main()


def _dispatch(arguments: list[str]) -> int:
    from localspec.cli import options

    if arguments and arguments[0] not in options.CORE_NAMES:
        from localspec.cli import command_names

        arguments = command_names.expand(arguments)
    if arguments[:1] in (["ask"], ["chat"], ["explain"]):
        arguments = options.expand_file_arguments(arguments)
    if arguments[:1] == ["ask"] and (plain := options.parse(arguments[1:])) is not None:
        from localspec.cli import ask

        return ask.run(plain)
    if arguments == ["--version"]:
        import localspec

        sys.stdout.write(f"localspec {localspec.__version__}\n")
        return 0
    from localspec.cli import app

    return app.run(arguments)


def _run_guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run `command` and return its exit code, which is negative if a signal ended it.

    An error is printed as one sentence. An interrupt or a closed pipe prints nothing.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt) as error:
        from localspec.cli.terminal import render

        code, message = _describe_error(error)
        streams.drop_output()
        if message:
            render.traceback() if debug else render.error(message)
        return code


def _describe_error(error: BaseException) -> tuple[int, str]:
    from localspec.errors import LocalspecError

    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    if isinstance(error, streams.OutputClosed):
        return 0, ""  # `| head -1` has read all the lines that it needs
    if isinstance(error, LocalspecError):
        return error.exit_code, error.message
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename is not None else ""
        return 1, f"{name}{error.strerror or error}. `localspec doctor` may tell more."
    return 1, (
        f"This is a bug in localspec ({type(error).__name__}: {error}). Run the same "
        "command with --debug for a traceback."
    )
