"""`localspec export`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import Limited
from localspec.cli.export import compose, pair, script
from localspec.cli.export.engines import ENGINES, Place
from localspec.cli.terminal import render
from localspec.client.conversations import ConversationsClient
from localspec.client.pairs import PairsClient
from localspec.errors import UsageError

_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:-]*")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_EVER = 10_000  # days


@click.command(
    help="Generate a launch script, or a compose file, with which vLLM, SGLang, TensorRT-LLM or llama-server "
    "serves the same target with the same draft, and the `localspec add` line that connects to it. Nothing "
    "is run or contacted.",
    epilog="Examples:\n\n\b\n  localspec export coder-32b --to vllm --host tower > serve.sh\n"
    "  localspec export llama33-70b --to vllm --host tower --nodes 2 --gpus 4\n"
    "  localspec export coder-7b --to compose > compose.yaml",
)
@click.argument("name", metavar="PAIR", shell_complete=suggest.pairs)
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice([*ENGINES, "compose"]),
    help="The engine, or a compose file for one.",
)
@click.option(
    "--engine",
    type=click.Choice([*ENGINES]),
    help="The engine in a compose file (default: vllm).",
)
@click.option(
    "--host",
    metavar="NAME",
    default="",
    help="The name by which others reach its machine; without it, it listens on its loopback alone.",
)
@click.option(
    "--port",
    cls=Limited,
    type=click.IntRange(1, 65_535),
    metavar="N",
    help="Its port, if not the engine's usual one.",
)
@click.option(
    "--nodes",
    cls=Limited,
    type=click.IntRange(1, 64),
    metavar="N",
    default=1,
    help="Machines that share the target (vllm, sglang).",
)
@click.option(
    "--gpus",
    cls=Limited,
    type=click.IntRange(1, 64),
    metavar="N",
    default=1,
    help="GPUs of each machine.",
)
@click.option(
    "--context",
    cls=Limited,
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Context of one answer (default: all that the model has).",
)
@click.option(
    "--weights",
    metavar="REPO",
    help="Original weights of the target (OWNER/REPO or a folder), for an engine that reads no GGUF.",
)
@click.option("--draft-weights", metavar="REPO", help="The same of the draft.")
def command(
    name: str,
    form: str,
    engine: str | None,
    weights: str | None,
    draft_weights: str | None,
    port: int | None,
    context: int | None,
    **place: Any,
) -> int:
    if engine and form != "compose":
        raise UsageError("--engine is for --to compose.")
    where = Place(**place, port=port or 0, context=context or 0)
    if where.host and not _HOST.fullmatch(where.host):
        raise UsageError("--host must be the name or address of a machine, without a port.")
    if where.nodes > 1 and not where.host:
        raise UsageError(
            "--nodes needs --host: the name by which the others reach the first machine."
        )
    found = _named(_pair(inputs.pair(name)), weights, draft_weights)
    if form == "compose":
        render.verbatim(compose.compose(found, where, engine or "vllm").removesuffix("\n"))
    else:
        render.verbatim(script.script(found, where, ENGINES[form](found, where)).removesuffix("\n"))
    return 0


def _pair(name: str) -> pair.Pair:
    """As the daemon has it, or the catalogue."""
    client = PairsClient()
    listed = client.pairs(everything=True)["pairs"]
    wanted = name.strip().lower()
    called = [each for each in listed if wanted in (each["name"], *each["aliases"])]
    entry = called[0] if called else {}
    view = None if called and not entry["here"] else client.pair(entry.get("name", name))
    if view and view["name"] != entry.get("name"):
        entry = next((each for each in listed if each["name"] == view["name"]), {})
    told = str((view or entry)["name"])
    return pair.read(name, entry, view, ConversationsClient().statistics(_EVER, told)["total"])


def _named(found: pair.Pair, target: str | None, draft: str | None) -> pair.Pair:
    """With the original weights that were named, whose vocabularies nobody has compared."""
    if target:
        found = replace(found, target=replace(found.target, original=_place(target), vocabulary=0))
    if draft:
        if not found.draft:
            raise UsageError(f"'{found.name}' has no draft in a file of its own.")
        found = replace(found, draft=replace(found.draft, original=_place(draft), vocabulary=0))
    return found


def _place(weights: str) -> str:
    if weights.startswith((".", "/", "~")):
        return inputs.absolute(weights)
    if not _REPO.fullmatch(weights):
        raise UsageError("Weights are a repository (OWNER/REPO) or a folder (./FOLDER).")
    return weights
