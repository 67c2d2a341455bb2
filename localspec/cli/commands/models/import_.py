"""`localspec import`, and the output of `localspec list --disk`."""

from __future__ import annotations

import sys
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import format_add_command, format_first_use, size
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError


@click.command(
    help="Find models already on this disk: those of the Hugging Face cache, llama.cpp, LM "
    "Studio, Ollama, Jan and GPT4All, and in any FOLDERs. Shows which can draft for "
    "which and how to create pairs from them. The files stay where they are.",
    epilog="Examples:\n\n\b\n  localspec import\n  localspec import ~/models --add",
)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", shell_complete=suggest.files)
@click.option("--add", "adding", is_flag=True, help="Create these pairs; on a terminal, ask first.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def command(folders: tuple[str, ...], adding: bool, as_json: bool) -> int:
    report = look(folders)
    if as_json and not adding:
        render.record(report)
        return 0
    if not as_json:
        show(report)
    return _add(report["pairs"]) if adding and report["pairs"] else 0


def look(folders: tuple[str, ...]) -> dict[str, Any]:
    """Return the models on this disk. A line shows the progress while the search takes its time."""
    report: dict[str, Any] = {}
    with Progress("import") as progress:
        for report in PairsClient().disk([inputs.absolute(folder) for folder in folders]):
            if report["models"] is None:
                progress.show(f"reading {report['looking']}", 0, 0)
    return report


def show(report: dict[str, Any]) -> None:
    """Print the models, why some cannot be used, and the commands that create pairs from them."""
    usable = [model for model in report["models"] if not model["problem"]]
    if usable:
        uses_by_draft: dict[str, int] = {}
        for model in usable:
            for draft in model["drafts"]:
                uses_by_draft[draft] = uses_by_draft.get(draft, 0) + 1
        rows = [["MODEL", "SIZE", "DRAFTS", "DRAFTS FOR", "WHERE"]]
        for model in usable:
            drafts_text = _count(len(model["drafts"]), "draft")
            targets_text = _count(uses_by_draft.get(model["path"], 0), "target")
            rows.append(
                [model["name"], size(model["size"]), drafts_text, targets_text, model["origin"]]
            )
        render.table(rows)
    else:
        render.line("No models found. To search other folders: localspec import FOLDER")
    for model in report["models"]:
        if model["problem"]:
            message = f"cannot use {model['name']} ({model['origin']}): {model['problem']}"
            render.line(render.harmless(message, lines=False))
    for problem in report["problems"]:
        render.error(problem)
    if report["pairs"]:
        render.line("\nTo create pairs from them (or use --add):")
        for pair in report["pairs"]:
            render.line(f"  {format_add_command(pair['name'], pair['target'], pair['draft'])}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}" if number else "-"


def _add(pairs: list[dict[str, Any]]) -> int:
    if sys.stdin.isatty() and not click.confirm(f"Create {_count(len(pairs), 'pair')}?"):
        return 0
    exit_code = 0
    for pair in pairs:
        try:
            # Many of these pairs may never be used. The others are hashed when they are first loaded.
            entry = PairsClient().add(
                pair["name"], pair["target"], pair["draft"], ["chat"], hash_now=False
            )
            advice = format_first_use(pair["name"], entry["roles"])
            render.line(f"{pair['name']} is installed. {advice}")
        except LocalspecError as error:
            exit_code = 1
            render.error(f"{pair['name']}: {error.message}")
    return exit_code
