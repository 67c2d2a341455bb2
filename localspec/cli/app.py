"""The click side of the command line: help, usage errors, and every command but a plain `ask`."""

from __future__ import annotations

import importlib

import click

import localspec
from localspec.cli.formatter import Formatter

click.Context.formatter_class = Formatter  # of every command

# name → (module, what it does). A command is imported when it is run or asked for help.
COMMANDS = {
    "ask": ("localspec.cli.commands.ask", "Ask one question."),
    "chat": ("localspec.cli.commands.chat", "Chat in the terminal."),
    "list": ("localspec.cli.commands.models.list", "List installed pairs."),
    "catalogue": (
        "localspec.cli.commands.models.catalogue",
        "List pairs available to pull.",
    ),
    "pull": ("localspec.cli.commands.models.pull", "Download a pair."),
    "pulls": ("localspec.cli.commands.models.pulls", "Show or cancel pulls."),
    "show": ("localspec.cli.commands.models.show", "Show details of a pair."),
    "verify": ("localspec.cli.commands.models.verify", "Verify the checksums of a pair's files."),
    "rm": ("localspec.cli.commands.models.rm", "Remove pairs."),
    "gc": ("localspec.cli.commands.models.gc", "Delete files that no pair needs."),
    "add": ("localspec.cli.commands.models.add", "Create a pair from your own files."),
    "import": (
        "localspec.cli.commands.models.import_",
        "Find models on this disk and create pairs from them.",
    ),
    "drafts": (
        "localspec.cli.commands.models.drafts",
        "Find draft models for a target on this disk.",
    ),
    "unload": ("localspec.cli.commands.daemon.unload", "Unload the pair and free its memory."),
    "start": ("localspec.cli.commands.daemon.start", "Start the daemon."),
    "service": ("localspec.cli.commands.daemon.service", "Run the daemon as a user service."),
    "complete": ("localspec.cli.commands.complete", "Complete code at a position in a file."),
    "cmd": ("localspec.cli.commands.shell.cmd", "Propose a shell command."),
    "commit": ("localspec.cli.commands.shell.commit", "Write a commit message."),
    "explain": ("localspec.cli.commands.shell.explain", "Explain a failed command or an error."),
    "history": ("localspec.cli.commands.history", "List, show, search and remove conversations."),
    "templates": (
        "localspec.cli.commands.templates",
        "List, show, edit and remove saved prompts.",
    ),
    "stats": ("localspec.cli.commands.stats", "Show tokens, speed and time saved over days."),
    "config": ("localspec.cli.commands.config", "Show and change the configuration."),
    "logs": ("localspec.cli.commands.daemon.logs", "Show the daemon's log."),
    "status": ("localspec.cli.commands.daemon.status", "Show the daemon's status."),
    "stop": (
        "localspec.cli.commands.daemon.stop",
        "Stop the daemon.",
    ),
    "doctor": (
        "localspec.cli.commands.daemon.doctor",
        "Diagnose problems.",
    ),
    "completion": (
        "localspec.cli.commands.completion",
        "Print the completion script for bash, zsh or fish.",
    ),
}


class Commands(click.Group):
    """A group that reads `COMMANDS` instead of importing every command for its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, and a word that is nearly a command's name is told which."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            if close := difflib.get_close_matches(args[0], COMMANDS, 1):
                ctx.fail(f"No such command '{args[0]}'; did you mean {close[0]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=Commands,
    help="A local assistant with speculative decoding.",
    epilog='Example: localspec ask "What does shutil.copytree do?"',
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(localspec.__version__, prog_name="localspec", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback on errors.")
def app(debug: bool) -> None:
    del debug  # `cli.main` looks for it before click does


def run(arguments: list[str]) -> int:
    """Run a command line; click's own errors print themselves."""
    try:
        code = app.main(arguments, prog_name="localspec", standalone_mode=False)
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        import io

        from localspec.cli.terminal import render

        shown = io.StringIO()
        error.show(shown)
        render.usage(shown.getvalue())
        return error.exit_code
    return code if isinstance(code, int) else 0
