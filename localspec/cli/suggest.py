"""Completions for the values of options and arguments.

The Tab key must never wait, fail or start a daemon, so without a running daemon nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from localspec.cli import templates
from localspec.client.conversations import ConversationsClient
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, replace_control_characters

# The type of the functions that click calls to complete a parameter.
Suggest = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _make_completer(values: Callable[[], Iterable[tuple[str, str]]]) -> Suggest:
    """Return a completer for `values`, which yields pairs of a value and its description."""

    def suggest(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
        try:
            return [
                CompletionItem(value, help=replace_control_characters(description, lines=False))
                for value, description in values()
                # A value with invisible characters could not be typed.
                if value.startswith(typed)
                and value == replace_control_characters(value, lines=False)
            ]
        except LocalspecError:
            return []

    return suggest


def files(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Let the shell complete names of files."""
    del context, parameter
    return [CompletionItem(typed, type="file")]


def _list_pairs(*, everything: bool) -> Iterable[tuple[str, str]]:
    entries = PairsClient(autostart=False).pairs(everything=everything)["pairs"]
    return [(entry["name"], entry["summary"] or "") for entry in entries]


def _list_keys() -> Iterable[tuple[str, str]]:
    from localspec import config  # imported here, because no other completion needs it

    return [(key, config.describe_setting(key).text) for key in config.KEYS]


pairs = _make_completer(lambda: _list_pairs(everything=False))
catalogue = _make_completer(lambda: _list_pairs(everything=True))
pulls = _make_completer(
    lambda: [(state["name"], state["state"]) for state in PairsClient(autostart=False).pulls()]
)
saved_templates = _make_completer(lambda: [(name, "") for name in templates.names()])
keys = _make_completer(_list_keys)


def values(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete a value of the configuration key that precedes it on the command line."""
    from localspec import config

    key = config.resolve_key(context.params.get("key") or "")
    if key in config.PAIR_ROLES:
        return pairs(context, parameter, typed)
    allowed = config.list_values(key) if key in config.KEYS else ()
    return _make_completer(lambda: [(value, "") for value in allowed])(context, parameter, typed)


conversations = _make_completer(
    lambda: [
        ("last", "the last conversation"),
        *(
            (kept["id"], kept["title"])
            for kept in ConversationsClient(autostart=False).conversations(50)
        ),
    ]
)
