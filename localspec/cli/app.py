"""The click side of the command line: help, usage errors, and every command but a plain `ask`."""

from __future__ import annotations

import importlib
import math
from typing import Any, ClassVar

import click

import localspec
from localspec.cli.options import ALIASES, COMMANDS
from localspec.cli.terminal.formatter import Formatter

click.Context.formatter_class = Formatter  # of every command

# Names that work beside the commands' own in groups.
INNER_ALIASES = {"delete": "rm", "remove": "rm", "ls": "list"}

# What people of git, ollama, llm, gh, docker and pip type, and what it is called here.
SYNONYMS = {
    "rm": ("delete", "remove", "uninstall", "del", "drop"),
    "pull": ("install", "download", "get", "fetch", "clone", "update", "upgrade"),
    "list": ("ls", "pairs", "installed", "images"),
    "catalogue": ("catalog", "available", "browse", "search", "find", "library"),
    "show": ("info", "inspect", "describe", "view", "details"),
    "add": ("create", "new", "make", "register"),
    "gc": ("prune", "clean", "cleanup"),
    "verify": ("fsck", "checksum"),
    "ask": ("prompt", "query", "question", "generate", "q"),
    "chat": ("talk", "repl", "interactive"),
    "embed": ("embedding", "embeddings", "vector", "vectors"),
    "complete": ("fim", "infill", "fill"),
    "editor": ("vim", "nvim", "neovim", "plugin", "vscode", "zed"),
    "cmd": ("command", "shell", "sh"),
    "history": ("conversations", "sessions", "chats"),
    "templates": ("template", "prompts"),
    "bench": ("benchmark", "measure", "experiment", "perf"),
    "config": ("set", "settings", "configure", "options", "keys"),
    "start": ("serve", "server", "daemon", "up"),
    "stop": ("kill", "quit", "exit", "down", "shutdown"),
    "service": ("systemd", "launchd", "enable"),
    "status": ("top", "state"),
    "doctor": ("check", "diagnose", "health"),
    "completion": ("completions",),
    "--version": ("version",),
}

_QUESTIONS = frozenset("what how why who where when which is are can does do".split())
_NOT_ASKED = "A question is not a command. To ask it: localspec ask"


class Group(click.Group):
    """A group of commands that knows their other names, and tells a wrong one which was meant."""

    aliases: ClassVar[dict[str, str]] = INNER_ALIASES
    synonyms: ClassVar[dict[str, tuple[str, ...]]] = {}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises click.UsageError: there is no such command; it names the one that was meant."""
        names = self.list_commands(ctx)
        word, *rest = args
        known = self.aliases.get(word, word)
        if self.get_command(ctx, word) is None and known in names:
            return super().resolve_command(ctx, [known, *rest])
        if self.get_command(ctx, word) is None and not word.startswith("-"):
            ctx.fail(self._unknown(ctx, word, rest))
        return super().resolve_command(ctx, args)

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem[str]]:
        """As click's, with descriptions that are whole."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        offered = [CompletionItem(name, help=self.summary(name)) for name in names]
        return offered + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, with sentences that are whole."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(name)) for name in self.list_commands(ctx)])

    def summary(self, name: str) -> str:
        """What a command does, in a sentence."""
        return self.commands[name].get_short_help_str(200)

    def _unknown(self, ctx: click.Context, word: str, rest: list[str]) -> str:
        """What is said of a word that is no command."""
        if meant := self._meant(ctx, word):
            return f"No such command '{word}'; did you mean {meant}?"
        return f"No such command '{word}'; see: {ctx.command_path} --help"

    def _meant(self, ctx: click.Context, word: str) -> str:
        """The command of that habit, beginning or spelling; empty where none is near."""
        import difflib

        for name, others in self.synonyms.items():
            if word in others:
                return name
        own = self.list_commands(ctx)
        names = [*own, *(alias for alias, name in self.aliases.items() if name in own)]
        begun = [name for name in names if len(word) > 1 and name.startswith(word)]
        near = begun or difflib.get_close_matches(word, names, 1)
        return self.aliases.get(near[0], near[0]) if near else ""


class Limited(click.Option):
    """A number whose limits are said in words, where they say something."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        from localspec.cli.options import UNLIMITED

        extra = super().get_help_extra(ctx)
        if isinstance(self.type, click.IntRange | click.FloatRange):
            low = -math.inf if self.type.min is None else self.type.min
            high = math.inf if self.type.max is None else self.type.max
            extra["range"] = f"{low:g} to {high:g}" if high < UNLIMITED else f"at least {low:g}"
            if low < -UNLIMITED:
                del extra["range"]
        return extra

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().type_cast_value(ctx, value)
        except click.BadParameter as wrong:
            limits = self.get_help_extra(ctx).get("range")
            number = "a number" if isinstance(self.type, click.FloatRange) else "a whole number"
            said = f"must be {number}{f' ({limits})' if limits else ''}, not '{value}'."
            raise click.BadParameter(said, ctx=ctx, param=self) from wrong


class Commands(Group):
    """A group that reads `COMMANDS` instead of importing every command for its help."""

    aliases = ALIASES
    synonyms = SYNONYMS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def summary(self, name: str) -> str:
        return COMMANDS[name][1]

    def _unknown(self, ctx: click.Context, word: str, rest: list[str]) -> str:
        """As of any group; of what is a question, how to ask it."""
        import shlex

        if " " in word or "?" in word:
            return f"{_NOT_ASKED} {shlex.join([word, *rest])}"
        begins = word.lower() in _QUESTIONS or not self._meant(ctx, word)
        if rest and begins and not any(each.startswith("-") for each in rest):
            return f"{_NOT_ASKED} {shlex.quote(' '.join([word, *rest]))}"
        return super()._unknown(ctx, word, rest)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_commands(ctx, formatter)
        with formatter.section("Aliases"):
            formatter.write_dl([(alias, f"Same as {name}.") for alias, name in ALIASES.items()])


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


def is_near(word: str) -> bool:
    """Whether a word that is no command is a slip or another tool's name for one."""
    return bool(app._meant(click.Context(app, info_name="localspec"), word))


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
