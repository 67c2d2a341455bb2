"""`localspec import` and `localspec drafts`: the models on this disk, and what can draft for which."""

from __future__ import annotations

import sys
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import flag, json_option
from localspec.cli.terminal import pairs, render
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError

_folders = click.argument("folders", nargs=-1, metavar="[FOLDER]...", shell_complete=suggest.files)


@click.command(
    help="Find models already on this disk: those of the Hugging Face cache, llama.cpp, LM "
    "Studio, Ollama, Jan and GPT4All, and in any FOLDERs. Shows which can draft for "
    "which and how to create pairs from them. The files stay where they are.",
    epilog="Examples:\n\n\b\n  localspec import\n  localspec import ~/models --add",
)
@_folders
@flag("--add", "adding", help="Create these pairs; on a terminal, ask first.")
@json_option
def import_command(folders: tuple[str, ...], adding: bool, as_json: bool) -> int:
    report = look(folders)
    if not as_json:
        pairs.disk(report)
    elif not adding:
        render.record(report)
    return _add(report["pairs"]) if adding and report["pairs"] else 0


def look(folders: tuple[str, ...]) -> dict[str, Any]:
    """Return the models on this disk. A line shows the progress while the search takes its time."""
    report: dict[str, Any] = {}
    with Progress("import") as progress:
        for report in PairsClient().disk(list(map(inputs.absolute, folders))):
            if report["models"] is None:
                progress.show(f"reading {report['looking']}", 0, 0)
    return report


def _add(found: list[dict[str, Any]]) -> int:
    if sys.stdin.isatty() and not click.confirm(f"Create {pairs.count(len(found), 'pair')}?"):
        return 0
    exit_code = 0
    for pair in found:
        name, files = pair["name"], (pair["target"], pair["draft"])
        try:
            # Many of these pairs may never be used. The others are hashed when they are first loaded.
            entry = PairsClient().add(name, *files, ["chat"], hash_now=False)
            render.line(f"{name} is installed. {pairs.format_first_use(name, entry['roles'])}")
        except LocalspecError as error:
            exit_code = 1
            render.error(f"{name}: {error.message}")
    return exit_code


@click.command(
    help="Search the models on this disk (the store, the Hugging Face cache, LM Studio, "
    "Ollama, and any FOLDERs) for what can draft for TARGET, a file or a pair: its own MTP heads, sidecars "
    "and draft models, in the order in which they would be taken.",
    epilog="Examples:\n\n\b\n  localspec drafts big.gguf ~/models\n"
    "  localspec drafts coder-7b --measure",
)
@click.argument("target", shell_complete=suggest.pairs)
@_folders
@flag("--measure", help="Load each draft with TARGET and measure the speed-up; best first.")
@json_option
def drafts_command(target: str, folders: tuple[str, ...], measure: bool, as_json: bool) -> None:
    client = PairsClient()
    pair, paths = inputs.resolve_pair(target), list(map(inputs.absolute, folders))
    report: dict[str, Any] = {}
    with Progress(target) as progress:
        if not as_json:
            progress.show("comparing the models on this disk", 0, 0)
        for report in client.drafts(pair, paths, measure=measure):
            if report["measuring"] and not as_json:
                progress.show(f"measuring {report['measuring']}", 0, 0)
    (render.record if as_json else pairs.drafts)(report)
