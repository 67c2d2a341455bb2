"""`localspec tune`: train a pair's own draft on what its target has answered."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from localspec import installation
from localspec.cli import inputs, suggest
from localspec.cli.app import NumberOption
from localspec.cli.settings import usable_cores
from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import format_tuned
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, UsageError
from localspec.extras.tune import running
from localspec.extras.tune import texts as collecting
from localspec.paths import default_paths, expand_user, make_private_directory
from localspec.protocol.tuned import tuned_folder

_READING_SHARE = 0.3  # of the time, in which the target completes files


@click.command(
    help="Train PAIR's own draft model (default: the configured pair's) on what its target has answered, so "
    "that more of its drafts are accepted. It learns from the saved conversations and, with --files, from "
    "completions that the target writes in your files. Answers stay what they are; only their speed changes. "
    "The new draft is used if it is faster on the newest answers, which it did not learn from.",
    epilog="Examples:\n\n\b\n  localspec tune --status\n  localspec tune --files ~/src/project\n"
    "  localspec tune coder-7b --minutes 120\n  localspec tune --revert",
)
@click.argument("pair", default="", shell_complete=suggest.pairs)
@click.option(
    "--files",
    multiple=True,
    metavar="PATH",
    shell_complete=suggest.files,
    help="Also learn from completions in this file, or in the files of this folder. Repeatable.",
)
@click.option(
    "--minutes",
    cls=NumberOption,
    type=click.FloatRange(0.1, 10_000),
    metavar="N",
    default=20,
    show_default=True,
    help="Time for reading and training, without pauses.",
)
@click.option(
    "--method",
    type=click.Choice(["auto", "weights", "rows"]),
    default="auto",
    show_default=True,
    help="Train all weights (needs PyTorch) or rows of the output matrix.",
)
@click.option(
    "--status", is_flag=True, help="Show the tuned draft, and what could be learned from."
)
@click.option("--revert", is_flag=True, help="Delete the tuned draft of the pair.")
@click.option("--forget", is_flag=True, help="Delete the tuned drafts of all pairs.")
@click.option("--json", "as_json", is_flag=True, help="Output one line of JSON.")
def command(pair: str, files: tuple[str, ...], **options: Any) -> int:
    actions = [name for name in ("status", "revert", "forget") if options[name]]
    if len(actions) > 1 or (actions and files):
        raise UsageError("--status, --revert, --forget and --files cannot be used together.")
    if options["forget"]:
        shutil.rmtree(default_paths().tuned, ignore_errors=True)
        render.line("All tuned drafts are deleted.")
        return 0
    pairs_client = PairsClient()
    name = inputs.resolve_pair(pair) or pairs_client.pairs().get("configured", "")
    view = pairs_client.pair(name)
    folder = _folder(view)
    if options["revert"]:
        return _revert(view, folder)
    if options["status"]:
        return _show_status(view, as_json=options["as_json"])
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(
            "A draft is written with gguf, which is not installed; run: "
            f"{installation.install_extra_command('tune')}"
        )
    places = collecting.find_places([_existing(name) for name in files])
    return _tune(view, folder, places, options)


def _existing(name: str) -> Path:
    path = expand_user(name)
    if not path.exists():
        raise UsageError(f"There is no file or folder {name}.")
    return path.absolute()


def _folder(view: dict[str, Any]) -> Path:
    """Return the folder of the pair's tuned draft. Raises LocalspecError if the pair cannot have one."""
    if view["kind"] != "model":
        raise LocalspecError(
            f"The pair {view['name']} has no draft model that could be tuned. Only draft models can be; to "
            "add one: localspec drafts"
        )
    return tuned_folder(default_paths().tuned, view["target"]["path"], view["draft"]["path"])


def _revert(view: dict[str, Any], folder: Path) -> int:
    if not folder.exists():
        raise LocalspecError(f"The pair {view['name']} has no tuned draft.")
    shutil.rmtree(folder)
    running.unload(view["name"])
    render.line(f"The tuned draft of {view['name']} is deleted; its own draft is used again.")
    return 0


def _show_status(view: dict[str, Any], *, as_json: bool) -> int:
    client = collecting.TuneClient()
    texts = collecting.collect_history(client, view["name"])
    counts = Counter(text.kind for text in texts)
    if as_json:
        render.record({"pair": view["name"], "answers": counts, "tuned": view.get("tuned")})
        return 0
    rows = [("pair", view["name"]), ("draft", view["draft"]["file"])]
    rows += format_tuned(view["tuned"]) if view.get("tuned") else [("tuned", "no")]
    learnable = ", ".join(f"{kind} {count}" for kind, count in counts.most_common()) or "none"
    rows.append(("answers", learnable))
    if len(texts) < 2 * collecting.MIN_TEXTS:
        rows.append(("", f"{2 * collecting.MIN_TEXTS} answers are needed, or --files FOLDER"))
    render.fields(rows)
    return 0


def _tune(
    view: dict[str, Any], folder: Path, places: list[tuple[str, str]], options: dict[str, Any]
) -> int:
    """Collect, train, compare and adopt. Raises LocalspecError if the new draft is not used."""
    client, name = collecting.TuneClient(), view["name"]
    base, target = view["draft"]["path"], view["target"]["path"]
    seconds = options["minutes"] * 60
    with Progress(f"tune {name}") as progress, _work_folder() as work:

        def report(stage: str, done: float) -> None:
            progress.show(f"{stage} {10 * int(10 * done)}%", 0, 0)

        texts = collecting.collect_history(client, name)
        if places:
            texts += _complete(client, name, places, _READING_SHARE * seconds, report)
            seconds *= 1 - _READING_SHARE
        learned, held_out = collecting.split_by_time(texts)
        trained = work / "draft.gguf"
        job = {
            "target": target,
            "draft": base,
            "output": str(trained),
            "texts": [text.as_job() for text in learned],
            "held_out": [text.as_job() for text in held_out],
            "seconds": seconds,
            "threads": usable_cores(),
            "method": options["method"],
        }
        result = running.Training(job, report).run()
        running.unload(name)
        # A copy, so that both drafts begin with nothing known: what an earlier load has measured would favour
        # one of them.
        copy = shutil.copyfile(base, work / "present.gguf")
        pairs = [f"{target},{copy}", f"{target},{trained}"]
        compared = running.choose_speed_texts(held_out)
        speeds = running.measure_speed(client, pairs, compared, report)
        record = running.make_record(Path(base), target, result, learned, speeds)
        progress.clear()
        try:
            running.check_better(record)
        except running.NotBetter:
            _print_result(name, record, adopted=False, as_json=options["as_json"])
            raise
        running.adopt(folder, trained, record, client)
    running.unload(name)
    _print_result(name, record, adopted=True, as_json=options["as_json"])
    return 0


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    """Make a folder on the disk of the tuned drafts, and delete it afterwards with what is in it."""
    root = default_paths().tuned
    make_private_directory(root)
    with tempfile.TemporaryDirectory(prefix="training-", dir=root) as folder:
        yield Path(folder)


def _complete(
    client: collecting.TuneClient,
    name: str,
    places: list[tuple[str, str]],
    seconds: float,
    report: running.Report,
) -> list[collecting.TrainingText]:
    """Return what the target writes at places in files, as many as the time allows."""
    deadline = time.monotonic() + seconds

    def completed(count: int) -> bool:
        report("completing files", count / len(places))
        return time.monotonic() < deadline

    return collecting.complete_places(client, name, places, completed)


def _print_result(name: str, record: dict[str, Any], *, adopted: bool, as_json: bool) -> None:
    if as_json:
        render.record({"pair": name, "adopted": adopted, "tuned": record})
        return
    rows = format_tuned(record)
    rows[0] = ("trained", f"{record['method']}, from {record['tokens']} tokens of answers")
    render.fields([("pair", name), *rows])
    if adopted:
        render.line(
            f"{name} uses the new draft from its next answer on. To undo: localspec tune --revert"
        )
