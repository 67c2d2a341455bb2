"""`localspec ask`, `localspec chat` and `localspec run`, as click sees them: questions to a pair."""

from __future__ import annotations

import sys
from typing import Any

import click

from localspec.cli import ask, options, suggest
from localspec.cli.app import NumberOption, TextCommand

_COMPLETERS = {
    "model": suggest.pairs,
    "conversation": suggest.conversations,
    "template": suggest.saved_templates,
    "files": suggest.files,
    "schema": suggest.files,
}


def click_option(option: options.Option) -> click.Option:
    """Return the click option for an entry of `options.ASK`."""
    names = [*option.flags, option.name]
    if option.kind is bool:
        return click.Option(names, is_flag=True, help=option.help)
    kind: Any = option.kind
    if option.kind is int:
        kind = click.IntRange(int(option.low), int(option.high))
    elif option.kind is float:
        kind = click.FloatRange(option.low, option.high)
    return NumberOption(
        names,
        type=kind,
        metavar=option.metavar,
        help=option.help,
        multiple=option.many,
        shell_complete=_COMPLETERS.get(option.name),
    )


class QuestionCommand(TextCommand):
    """A command that sends WORDS as a question and lists the sampling options last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in two sections, the second of which is for sampling."""
        sampling = {option.name for option in options.SAMPLING}
        records: dict[str, list[tuple[str, str]]] = {"Options": [], "Sampling": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                records["Sampling" if param.name in sampling else "Options"].append(record)
        for title, rows in records.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _run_ask(words: tuple[str, ...], **values: object) -> int:
    return ask.run(options.AskOptions(words=words, **values))


ask_command = QuestionCommand(
    "ask",
    callback=_run_ask,
    params=[
        click.Argument(["words"], nargs=-1, metavar="[WORDS]..."),
        *map(click_option, options.ASK),
    ],
    help="Ask one question. Text from stdin and from files (-f) goes before the question. "
    "Only the answer goes to stdout; Markdown is rendered on a terminal and left as it "
    "is in a pipe.",
    epilog=f"Examples:\n\n\b\n{ask.EXAMPLE}",
)


def _run_chat(**values: object) -> int:
    from localspec.cli.chat import chat

    return chat.run(options.AskOptions(**values))


chat_command = QuestionCommand(
    "chat",
    callback=_run_chat,
    params=list(map(click_option, options.CHAT)),
    help='Chat with a pair. Alt-Enter adds a line, """ begins and ends a multi-line message, '
    "/ starts a command, Tab completes. Ctrl-C stops the answer, Ctrl-D ends the chat.",
    epilog="Examples:\n\n\b\n  localspec chat\n  localspec chat -m coder-7b -s 'Be brief.'\n"
    "  localspec chat -c\n  localspec chat -f notes.md -t review --temperature 0.3",
)


_RUN = tuple(option for option in options.CHAT if option.name not in ("model", "query"))


def _run_pair(pair: str, words: tuple[str, ...], **values: object) -> int:
    if words or not sys.stdin.isatty():
        return _run_ask(words, model=pair, **values)
    return _run_chat(model=pair, **values)


run_command = QuestionCommand(
    "run",
    callback=_run_pair,
    params=[
        click.Argument(["pair"], shell_complete=suggest.pairs),
        click.Argument(["words"], nargs=-1, metavar="[WORDS]..."),
        *map(click_option, _RUN),
    ],
    help="Chat with a pair; with WORDS or piped text, ask it one question. "
    "The same as `localspec chat -m PAIR` and `localspec ask -m PAIR WORDS`.",
    epilog="Examples:\n\n\b\n  localspec run coder-7b\n"
    '  localspec run coder-7b "What does os.walk return?"',
)
