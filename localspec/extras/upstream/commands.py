"""`localspec export`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import click

from localspec.cli import inputs, suggest
from localspec.cli.app import number_option
from localspec.cli.terminal import render
from localspec.client.conversations import ConversationsClient
from localspec.client.pairs import PairsClient
from localspec.errors import UsageError
from localspec.extras.upstream import export
from localspec.extras.upstream.export import ENGINES, Deployment
from localspec.model_traits import emits_layers
from localspec.paths import default_paths
from localspec.protocol.tuned import NEW_DRAFT, tuned_folder

_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:-]*")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ALL_DAYS = 10_000  # days of statistics, which is more than any history has


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
    "--engine", type=click.Choice([*ENGINES]), help="The engine in a compose file (default: vllm)."
)
@click.option(
    "--host",
    metavar="NAME",
    default="",
    help="The name by which others reach its machine; without it, it listens on its loopback alone.",
)
@number_option("--port", low=1, high=65_535, help="Its port, if not the engine's usual one.")
@number_option(
    "--nodes",
    low=1,
    high=64,
    default=1,
    help="Machines that share the target (vllm, sglang).",
)
@number_option("--gpus", low=1, high=64, default=1, help="GPUs of each machine.")
@number_option(
    "--context",
    low=1,
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
) -> None:
    if engine and form != "compose":
        raise UsageError("--engine is for --to compose.")
    location = Deployment(**place, port=port or 0, context=context or 0)
    if location.host and not _HOST.fullmatch(location.host):
        raise UsageError("--host must be the name or address of a machine, without a port.")
    if location.nodes > 1 and not location.host:
        raise UsageError(
            "--nodes needs --host: the name by which the others reach the first machine."
        )
    exported = _load_pair(inputs.resolve_pair(name), with_tuned="llama-server" in (form, engine))
    # Nobody has compared the vocabulary of weights that the command line names, so it counts as unknown.
    if weights:
        original = _check_weights(weights)
        target = replace(exported.target, original=original, vocabulary=0)
        exported = replace(exported, target=target)
    if draft_weights:
        if not exported.draft:
            raise UsageError(f"'{exported.name}' has no draft in a file of its own.")
        original = _check_weights(draft_weights)
        exported = replace(exported, draft=replace(exported.draft, original=original, vocabulary=0))
    if form == "compose":
        text = export.render_compose(exported, location, engine or "vllm")
    else:
        text = export.render_script(exported, location, ENGINES[form](exported, location))
    render.verbatim(text.removesuffix("\n"))


def _load_pair(name: str, *, with_tuned: bool) -> export.ExportedPair:
    """Return a pair as the daemon has it installed, or else as the catalogue describes it.

    with_tuned: its draft is the one of `localspec tune`, if there is one that llama-server can use.
    """
    client = PairsClient()
    entries = client.pairs(everything=True)["pairs"]
    lowered = name.strip().lower()
    named = (pair for pair in entries if lowered in (pair["name"], *pair["aliases"]))
    entry: dict[str, Any] = next(named, {})
    view = None if entry and not entry["here"] else client.pair(entry.get("name", name))
    if view and view["name"] != entry.get("name"):
        entry = next((pair for pair in entries if pair["name"] == view["name"]), {})
    total = ConversationsClient().statistics(_ALL_DAYS, str((view or entry)["name"]))["total"]
    exported = export.read_pair(name, entry, view, total)
    tuned = view.get("tuned") if view and with_tuned else None
    if view is None or not tuned:
        return exported
    own = exported.draft.path if exported.draft else ""
    path = tuned_folder(default_paths().tuned, exported.target.path, own) / tuned["file"]
    draft = export.ExportedModel(path.name, path=str(path))
    if tuned["method"] != NEW_DRAFT:
        return replace(exported, draft=draft)
    architecture = view["target"]["architecture"]
    if emits_layers(architecture):
        return replace(exported, draft=draft, draft_kind="eagle3")
    render.note(
        f"The new draft of {exported.name} is left out: llama-server does not show it the target's states "
        f"({architecture})."
    )
    return exported


def _check_weights(weights: str) -> str:
    """Return a folder's absolute path, or a repository's name. Raises UsageError for anything else."""
    if weights.startswith((".", "/", "~")):
        return inputs.absolute(weights)
    if not _REPO.fullmatch(weights):
        raise UsageError("Weights are a repository (OWNER/REPO) or a folder (./FOLDER).")
    return weights
