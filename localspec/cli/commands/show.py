"""`localspec show`: a pair with its models, and the memory they need."""

from __future__ import annotations

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import flag, json_option, number_option
from localspec.cli.terminal import pairs, render
from localspec.client.pairs import PairsClient


@click.command(
    help="Show a pair: its models, whether they match, and the memory they need; without NAME, the one that "
    "answers by default.",
    epilog="Examples:\n\n\b\n  localspec show builtin\n  localspec show coder-7b --context 16384\n"
    "  localspec show coder-7b --template",
)
@click.argument("name", required=False, shell_complete=suggest.pairs)
@number_option(
    "--context", metavar="TOKENS", default=0, help="Compute memory for this many tokens of context."
)
@flag("--template", help="Print only the target's chat template.")
@json_option
def command(name: str | None, context: int, template: bool, as_json: bool) -> int:
    client = PairsClient()
    shown = client.pairs()["configured"] if name is None else name
    view = client.pair(inputs.resolve_pair(shown), context)
    if not template:
        (render.record if as_json else pairs.pair)(view)
        return 0
    if chat_template := view["target"]["template"]:
        render.verbatim(chat_template["text"].removesuffix("\n"))
        return 0
    if view["kind"] == "upstream":
        render.error(f"The chat template of '{view['name']}' is on its server.")
    else:
        render.error(f"{view['target']['file']} has no chat template.")
    return 1
