"""The click side of the command line: help, usage errors, and every command but a plain `ask`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import click

import localspec
from localspec.cli import command_names
from localspec.cli.options import ALIASES, COMMANDS, GROUPS, divided
from localspec.cli.terminal.formatter import Formatter

click.Context.formatter_class = Formatter  # of every command

# Synonyms that work in every group that has the command.
INNER_SYNONYMS = {"delete": ("rm",), "remove": ("rm",), "ls": ("list",)}

_QUESTIONS = frozenset("what how why who where when which is are can does do".split())
_NOT_ASKED = "A question is not a command. To ask it: localspec ask"


class Group(click.Group):
    """A group of commands that runs synonyms, and suggests a command for a mistyped one."""

    aliases: ClassVar[dict[str, str]] = {}
    hints: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(
        self, *args: Any, synonyms: dict[str, tuple[str, ...]] | None = None, **attrs: Any
    ) -> None:
        """Take a click group's arguments, and words with the arguments that each stands for."""
        super().__init__(*args, **attrs)
        self.synonyms = INNER_SYNONYMS | (synonyms or {})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, also by an alias or a synonym.

        Raises click.UsageError if there is no such command.
        """
        word, *rest = args
        if self.get_command(ctx, word) is None:
            meant = (self.aliases[word],) if word in self.aliases else self.synonyms.get(word, ())
            if meant and meant[0] in self.list_commands(ctx):
                return super().resolve_command(ctx, [*meant, *rest])
            if not word.startswith("-"):
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
        """Return what is wrong with a word that is no command, and which one may be meant."""
        if meant := self._meant(ctx, word):
            return f"No such command '{word}'; did you mean {meant}?"
        return f"No such command '{word}'; see: {ctx.command_path} --help"

    def _meant(self, ctx: click.Context, word: str) -> str:
        """Return the command that a word probably means; empty if none is near."""
        names = self.list_commands(ctx)
        habit = self.hints.get(word) or self.synonyms.get(word)
        if habit and (habit[0] in names or habit[0].startswith("-")):
            return " ".join(habit)
        if word in command_names.WITHOUT_COUNTERPART:
            return ""
        others = [alias for alias, name in self.aliases.items() if name in names]
        meant = command_names.closest(word, [*names, *others])
        return self.aliases.get(meant, meant)


class Texts(click.Command):
    """A command whose arguments are text: a number or a quoted text that begins with a dash is one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments as click does, but texts with a dash as arguments."""
        if not ctx.resilient_parsing:  # which completes a line that is not whole
            known = [param for param in self.params if isinstance(param, click.Option)]
            flags = {flag: not param.is_flag for param in known for flag in param.opts}
            args = divided(flags, args)
        return super().parse_args(ctx, args)


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
    hints = command_names.HINTS

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
        """Write the commands by group, with the aliases at the end."""
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.summary(name)) for name in names])
        with formatter.section("Aliases"):
            formatter.write_dl([(alias, f"Same as {name}.") for alias, name in ALIASES.items()])


@click.group(
    cls=Commands,
    synonyms=command_names.SYNONYMS,
    help="A local assistant with speculative decoding.",
    epilog='Example: localspec ask "What does shutil.copytree do?"',
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(localspec.__version__, prog_name="localspec", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback on errors.")
def app(debug: bool) -> None:
    del debug  # `cli.main` looks for it before click does


def _not_opposite(option: str, possibilities: Iterable[str]) -> list[str]:
    """Return the suggestions for a wrong option without its opposite: "--no-log" for "--log"."""
    bare = option.removeprefix("--no-")
    if bare == option:
        bare = option.removeprefix("--")
        return [each for each in possibilities if not each.startswith("--no-")]
    return [each for each in possibilities if each.startswith("--no-")]


def run(arguments: list[str]) -> int:
    """Run a command line; click's own errors print themselves."""
    try:
        code = app.main(arguments, prog_name="localspec", standalone_mode=False)
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        import io

        from localspec.cli.terminal import render

        if isinstance(error, click.NoSuchOption) and error.possibilities:
            near = _not_opposite(error.option_name, error.possibilities)
            error = click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx)
        shown = io.StringIO()
        error.show(shown)
        render.usage(shown.getvalue())
        return error.exit_code
    return code if isinstance(code, int) else 0
