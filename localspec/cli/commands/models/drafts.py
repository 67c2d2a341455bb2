"""`localspec drafts`."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.terminal import pairs, render
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient


@click.command(
    help="Search the models on this disk (the store, the Hugging Face cache, LM Studio, "
    "Ollama, and any FOLDERs) for draft models that match TARGET, a file or a pair.",
    epilog="Examples:\n\n\b\n  localspec drafts big.gguf ~/models\n"
    "  localspec drafts coder-7b --measure",
)
@click.argument("target")
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", shell_complete=suggest.files)
@click.option(
    "--measure",
    is_flag=True,
    help="Load each draft with TARGET and measure the speed-up; best first.",
)
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def command(target: str, folders: tuple[str, ...], measure: bool, as_json: bool) -> int:
    client = PairsClient()
    pair, paths = inputs.resolve_pair(target), [inputs.absolute(folder) for folder in folders]
    report: dict[str, Any] = {}
    with Progress(target) as progress:
        for report in client.drafts(pair, paths, measure=measure):
            if report["measuring"] and not as_json:
                progress.show(f"measuring {report['measuring']}", 0, 0)
    (render.record if as_json else pairs.drafts)(report)
    return 0
