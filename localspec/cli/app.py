"""The click side of the command line: help, usage errors, and every command but a plain `ask`."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, TypeVar

import click

import localspec
from localspec import extras
from localspec.cli import command_names
from localspec.cli.options import ALIASES, CORE_COMMANDS, EXTRAS, UNLIMITED, separate_words
from localspec.cli.terminal.formatter import Formatter
from localspec.errors import LocalspecError, UsageError

click.Context.formatter_class = Formatter  # used by every command

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Synonyms that work in every group that has a command of this name.
INNER_SYNONYMS = {"delete": ("rm",), "remove": ("rm",), "ls": ("list",)}

_GREETINGS = frozenset(("hi", "hello", "hey", "thanks"))
_QUESTION_WORDS = _GREETINGS.union("what how why who where when which is are can does do".split())
_QUESTION_HINT = "A question is not a command. To ask it: localspec ask"


def _grouped() -> dict[str, dict[str, tuple[str, str]]]:
    """Return all commands by group: name → (module:function, summary)."""
    groups: dict[str, dict[str, tuple[str, str]]] = {}
    for title, commands in CORE_COMMANDS.items():
        group = groups.setdefault(title, {})
        for name, (function, summary) in commands.items():
            if name == EXTRAS:
                group |= extras.commands(title)
            else:
                group[name] = f"localspec.cli.commands.{function}", summary
    return groups


_GROUPED = _grouped()
GROUPS = {title: tuple(commands) for title, commands in _GROUPED.items()}
COMMANDS = {name: row for commands in _GROUPED.values() for name, row in commands.items()}


class Group(click.Group):
    """A group of commands that runs synonyms and suggests a command for a mistyped one."""

    aliases: ClassVar[dict[str, str]] = {}
    hints: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(
        self, *args: Any, synonyms: dict[str, tuple[str, ...]] | None = None, **attrs: Any
    ) -> None:
        """Create a click group with synonyms: words, each with the arguments that it stands for."""
        super().__init__(*args, **attrs)
        self.synonyms = INNER_SYNONYMS | (synonyms or {})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, which may be an alias or a synonym.

        Raises click.UsageError if there is no such command.
        """
        word, *others = args
        if self.get_command(ctx, word) is None:
            meant = (self.aliases[word],) if word in self.aliases else self.synonyms.get(word, ())
            if meant and meant[0] in self.list_commands(ctx):
                args = [*meant, *others]
            elif not word.startswith("-"):
                ctx.fail(self._unknown_command_message(ctx, word, others))
        return super().resolve_command(ctx, args)

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem[str]]:
        """Return the completions that click offers, with complete descriptions."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        completions = [CompletionItem(name, help=self.summary(name)) for name in names]
        return completions + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands as click does, without shortening the sentences."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(name)) for name in self.list_commands(ctx)])

    def summary(self, name: str) -> str:
        """Return one sentence that says what a command does."""
        return self.commands[name].get_short_help_str(200)

    def _unknown_command_message(self, ctx: click.Context, word: str, others: list[str]) -> str:
        if suggestion := self._guess_command(ctx, word):
            return f"No such command '{word}'; did you mean {suggestion}?"
        return f"No such command '{word}'; see: {ctx.command_path} --help"

    def _guess_command(self, ctx: click.Context, word: str) -> str:
        names = self.list_commands(ctx)
        known_words = self.hints.get(word) or self.synonyms.get(word)
        if known_words and (known_words[0] in names or known_words[0].startswith("-")):
            return " ".join(known_words)
        if word in command_names.WITHOUT_COUNTERPART:
            return ""
        aliases = [alias for alias, name in self.aliases.items() if name in names]
        match = command_names.closest(word, [*names, *aliases])
        return self.aliases.get(match, match)


class TextCommand(click.Command):
    """A command whose arguments are text.

    A number, or a quoted text that begins with a dash, is an argument and not an option.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments as click does, except that text with a dash is an argument."""
        if not ctx.resilient_parsing:  # Tab completes a line that is still incomplete
            click_options = [param for param in self.params if isinstance(param, click.Option)]
            flags = {flag: not param.is_flag for param in click_options for flag in param.opts}
            args = separate_words(flags, args)
        return super().parse_args(ctx, args)


class NumberOption(click.Option):
    """A numeric option whose limits are shown in words, unless the type itself is the only limit."""

    def get_help_extra(self, ctx: click.Context) -> Any:
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
        except click.BadParameter as error:
            limits = self.get_help_extra(ctx).get("range")
            number = "a number" if isinstance(self.type, click.FloatRange) else "a whole number"
            problem = f"must be {number}{f' ({limits})' if limits else ''}, not '{value}'."
            raise click.BadParameter(problem, ctx=ctx, param=self) from error


def number_option(
    *names: str, low: float = 0, high: float | None = None, metavar: str = "N", **attributes: Any
) -> Callable[[_Function], _Function]:
    """Return a decorator that adds an option for a number from `low` to `high`.

    It is a whole number, unless `low` is not.
    """
    kind = click.IntRange if isinstance(low, int) else click.FloatRange
    limits: Any = low, high
    return click.option(*names, cls=NumberOption, type=kind(*limits), metavar=metavar, **attributes)


flag = partial(click.option, is_flag=True)
json_option = flag("--json", "as_json", help="Output one line of JSON.")
yes_option = flag("-y", "--yes", help="Do not ask first; needed where there is no terminal.")


def require_consent(*, yes: bool, question: str = "") -> None:
    """Return if the user wants what is about to be deleted to be deleted.

    Every command that deletes calls this before it does anything. `yes` is `--yes`. Without it, somebody must
    have typed the command at a terminal. There, `question` is asked, unless it is empty: a thing that was
    named is deleted without a question. Raises UsageError if there is neither `--yes` nor a terminal, and
    LocalspecError if the answer was no.
    """
    if yes:
        return
    if not sys.stdin.isatty() or (question and not sys.stderr.isatty()):
        why = "because there is no terminal at which to confirm it; add --yes."
        raise UsageError(f"Nothing was removed, {why}")
    if question and not click.confirm(question, err=True):
        raise LocalspecError("Nothing was removed.")


class Commands(Group):
    """The top-level group, which reads `COMMANDS` instead of importing every command for its help."""

    aliases = ALIASES
    hints = command_names.HINTED_WORDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def summary(self, name: str) -> str:
        return COMMANDS[name][1]

    def _unknown_command_message(self, ctx: click.Context, word: str, others: list[str]) -> str:
        """Return the error message for an unknown command; for a question, how to ask it."""
        import shlex

        if " " in word or "?" in word:
            return f"{_QUESTION_HINT} {shlex.join([word, *others])}"
        may_be_question = word.lower() in _QUESTION_WORDS or not self._guess_command(ctx, word)
        has_flag = any(other.startswith("-") for other in others)
        if may_be_question and not has_flag and (others or word.lower() in _GREETINGS):
            return f"{_QUESTION_HINT} {shlex.quote(' '.join([word, *others]))}"
        return super()._unknown_command_message(ctx, word, others)

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
@flag("--debug", help="Show a traceback on errors.")
def app(debug: bool) -> None:
    del debug  # `cli.main` has already looked for it in the arguments


def _drop_opposites(option: str, possibilities: Iterable[str]) -> list[str]:
    """Return the suggestions for a mistyped option without its opposite.

    "--no-log" is not suggested for "--log", nor the other way round.
    """
    negative = option.startswith("--no-")
    return [each for each in possibilities if each.startswith("--no-") == negative]


def run(arguments: list[str]) -> int:
    """Run a command line with click and return its exit code.

    Usage errors are printed here and do not propagate.
    """
    try:
        code = app.main(arguments, prog_name="localspec", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort as error:
        if isinstance(error.__context__, EOFError):  # no signal, as Ctrl-D at a question
            return 130
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        import io

        from localspec.cli.terminal import render

        if isinstance(error, click.exceptions.NoArgsIsHelpError) and render.is_drawn_on(sys.stdout):
            from localspec.cli import topics

            topics.show_text(error.format_message())
            return error.exit_code
        habit = command_names.explain_habit(arguments)
        if habit and isinstance(error, click.UsageError):
            problem = error.message if arguments[0] in (*COMMANDS, *ALIASES) else ""
            error = click.UsageError(f"{problem} {habit}".strip(), ctx=error.ctx)
        elif isinstance(error, click.NoSuchOption) and error.possibilities:
            suggestions = _drop_opposites(error.option_name, error.possibilities)
            error = click.NoSuchOption(error.option_name, possibilities=suggestions, ctx=error.ctx)
        output = io.StringIO()
        error.show(output)
        render.usage(output.getvalue())
        return error.exit_code
