"""What a shell offers for an option's or an argument's value.

Tab must never wait, fail or start anything: without a running daemon nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from localspec import config
from localspec.cli import templates
from localspec.client.conversations import ConversationsClient
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, visible

# What click calls to complete a parameter.
Suggest = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _offered(values: Callable[[], Iterable[tuple[str, str]]]) -> Suggest:
    """Those of `values` (what to type, what it is) that begin with what was typed."""

    def suggest(
        context: click.Context, parameter: click.Parameter, typed: str
    ) -> list[CompletionItem]:
        del context, parameter
        try:
            return [
                CompletionItem(v, help=visible(about, lines=False))
                for v, about in values()
                if v.startswith(typed) and v == visible(v, lines=False)  # else nobody can type it
            ]
        except LocalspecError:
            return []

    return suggest


def files(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The shell's own."""
    del context, parameter
    return [CompletionItem(typed, type="file")]


def _pairs(*, everything: bool) -> Iterable[tuple[str, str]]:
    listed = PairsClient(autostart=False).pairs(everything=everything)["pairs"]
    return [(each["name"], each["summary"] or "") for each in listed]


pairs = _offered(lambda: _pairs(everything=False))
catalogue = _offered(lambda: _pairs(everything=True))
saved = _offered(lambda: [(name, "") for name in templates.names()])
keys = _offered(lambda: [(key, config.about(key).text) for key in config.KEYS])


def values(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Of the setting that was named before."""
    key = config.key_of(context.params.get("key") or "")
    if key in config.PAIRS:
        return pairs(context, parameter, typed)
    known = config.values(key) if key in config.KEYS else ()
    return _offered(lambda: [(each, "") for each in known])(context, parameter, typed)


conversations = _offered(
    lambda: [
        ("last", "the last conversation"),
        *(
            (each["id"], each["title"])
            for each in ConversationsClient(autostart=False).conversations(50)
        ),
    ]
)
