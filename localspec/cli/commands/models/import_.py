"""`localspec import`, and what `localspec list --disk` shows."""

from __future__ import annotations

import sys
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import add_line, first_use, size
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
    found = look(folders)
    if as_json and not adding:
        render.record(found)
        return 0
    if not as_json:
        show(found)
    return _add(found["pairs"]) if adding and found["pairs"] else 0


def look(folders: tuple[str, ...]) -> dict[str, Any]:
    """What is on this disk, with a line of progress while that takes its time."""
    found: dict[str, Any] = {}
    with Progress("import") as progress:
        for found in PairsClient().disk([inputs.absolute(each) for each in folders]):
            if found["models"] is None:
                progress.show(f"reading {found['looking']}", 0, 0)
    return found


def show(found: dict[str, Any]) -> None:
    """The models, what keeps some from being used, and the commands that make pairs."""
    usable = [each for each in found["models"] if not each["problem"]]
    if usable:
        uses: dict[str, int] = {}
        for each in usable:
            for draft in each["drafts"]:
                uses[draft] = uses.get(draft, 0) + 1
        rows = [["MODEL", "SIZE", "DRAFTS", "DRAFTS FOR", "WHERE"]]
        for each in usable:
            targets = _count(len(each["drafts"]), "draft")
            drafts = _count(uses.get(each["path"], 0), "target")
            rows.append([each["name"], size(each["size"]), targets, drafts, each["origin"]])
        render.table(rows)
    else:
        render.line("No models found. To search other folders: localspec import FOLDER")
    for each in found["models"]:
        if each["problem"]:
            why = f"cannot use {each['name']} ({each['origin']}): {each['problem']}"
            render.line(render.harmless(why, lines=False))
    for problem in found["problems"]:
        render.error(problem)
    if found["pairs"]:
        render.line("\nTo create pairs from them (or use --add):")
        for each in found["pairs"]:
            render.line(f"  {add_line(each['name'], each['target'], each['draft'])}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}" if number else "-"


def _add(pairs: list[dict[str, Any]]) -> int:
    if sys.stdin.isatty() and not click.confirm(f"Create {_count(len(pairs), 'pair')}?"):
        return 0
    failed = 0
    for each in pairs:
        try:
            # What is used may never be; what is, is hashed when it is loaded first.
            entry = PairsClient().add(
                each["name"], each["target"], each["draft"], ["chat"], hash_now=False
            )
            told = first_use(each["name"], entry["roles"])
            render.line(f"{each['name']} is installed. {told}")
        except LocalspecError as error:
            failed = 1
            render.error(f"{each['name']}: {error.message}")
    return failed
