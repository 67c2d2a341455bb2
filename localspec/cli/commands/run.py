"""`localspec run`: a chat with a pair, or one question to it, like `ollama run`."""

from __future__ import annotations

import sys

import click

from localspec.cli import options, suggest
from localspec.cli.commands.ask import Asking, click_option

_OPTIONS = tuple(option for option in options.CHAT if option.name not in ("model", "query"))


def _run(pair: str, words: tuple[str, ...], **values: object) -> int:
    all_values = {**options.defaults(options.ASK), **values, "model": pair, "words": list(words)}
    all_values = {
        key: list(value) if isinstance(value, tuple) else value for key, value in all_values.items()
    }
    if words or not sys.stdin.isatty():
        from localspec.cli import ask

        return ask.run(all_values)
    from localspec.cli.chat import chat

    return chat.run(all_values)


command = Asking(
    "run",
    callback=_run,
    params=[
        click.Argument(["pair"], shell_complete=suggest.pairs),
        click.Argument(["words"], nargs=-1, metavar="[WORDS]..."),
        *map(click_option, _OPTIONS),
    ],
    help="Chat with a pair; with WORDS or piped text, ask it one question. "
    "The same as `localspec chat -m PAIR` and `localspec ask -m PAIR WORDS`.",
    epilog="Examples:\n\n\b\n  localspec run coder-7b\n"
    '  localspec run coder-7b "What does os.walk return?"',
)
