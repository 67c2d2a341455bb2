"""`localspec verify`: compare a pair's files with their checksums."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import json_option
from localspec.cli.terminal import render
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient


@click.command(
    help="Verify the checksums of a pair's files. Exits with 1 if a file is damaged or missing.",
    epilog="Example: localspec verify coder-7b",
)
@click.argument("name", shell_complete=suggest.pairs)
@json_option
def command(name: str, as_json: bool) -> int:
    event: dict[str, Any] = {}
    with Progress(name) as progress:
        for event in PairsClient().verify(inputs.resolve_pair(name)):
            if event["files"] is None and not as_json:
                progress.show("hashing", event["done"], event["size"])
    files = event["files"]
    if as_json:
        render.record(event)
    else:
        render.fields([(file["role"], file["problem"] or _describe_intact(file)) for file in files])
        if event["news"]:
            render.line(event["news"])
    if damaged := sum(bool(file["problem"]) for file in files):
        render.error(f"{damaged} of {len(files)} files are unusable. {event['remedy']}")
    return int(damaged > 0)


def _describe_intact(file: dict[str, Any]) -> str:
    unknown = "readable; there is no checksum to compare it with"
    return f"{file['file']}: {'OK' if file['hashed'] else unknown}"
