"""`localspec chat`."""

from __future__ import annotations

from localspec.cli import options
from localspec.cli.commands.ask import Asking, click_option


def _run(**values: object) -> int:
    from localspec.cli.chat import chat

    lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
    return chat.run({**values, **lists})


command = Asking(
    "chat",
    callback=_run,
    params=list(map(click_option, options.CHAT)),
    help='Chat with a pair. Alt-Enter adds a line, """ begins and ends a multi-line message, '
    "/ starts a command, Tab completes. Ctrl-C stops the answer, Ctrl-D ends the chat.",
    epilog="Examples:\n\n\b\n  localspec chat\n  localspec chat -m coder-7b -s 'Be brief.'\n"
    "  localspec chat -c\n  localspec chat -f notes.md -t review --temperature 0.3",
)
