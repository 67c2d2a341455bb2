"""`localspec tune`: train a pair's own draft on what its target has answered."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from localspec.cli import inputs, settings, suggest
from localspec.cli.app import flag, number_option, require_consent, yes_option
from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import format_tuned
from localspec.cli.terminal.progress import Progress
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, UsageError
from localspec.extras.tune import running, tuning
from localspec.extras.tune import texts as collecting
from localspec.paths import default_paths, expand_user
from localspec.protocol.tuned import NEW_DRAFT, tuned_folder

# Kinds of pairs whose draft is trained further.
TUNED_KINDS = ("model", "mtp-embedded", "mtp-sidecar", "eagle3", "dflash", "dspark")
# Answers since the last tuned draft, without which none is made by night.
NEW_ANSWERS = 40
# Parameters of what is done in place of a training, and those of a training.
_ACTIONS = ("auto", "status", "check", "revert", "forget")
_TRAINING_OPTIONS = ("files", "minutes", "method", "new")
# Actions that delete drafts, and what is asked before.
_DELETIONS = {
    "check": "",
    "revert": "Delete the tuned draft?",
    "forget": "Delete the tuned drafts of all pairs?",
}


@click.command(
    help="Train PAIR's own draft (default: the configured pair's) on what its target has answered, so "
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
@number_option(
    "--minutes",
    low=0.1,
    high=10_000,
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
@flag(
    "--new",
    help="Make another draft for the target, a layer that reads its states (EAGLE-3), even where it has "
    "none. Needs PyTorch, and hours for a large model.",
)
@click.option(
    "--auto/--no-auto",
    default=None,
    help="Do this by night from now on, or no longer: between 1 and 6 o'clock, when nobody has asked "
    "for a while and the machine is not on battery.",
)
@flag("--status", help="Show the tuned draft, and what could be learned from.")
@flag(
    "--check",
    help="Compare each tuned draft, or PAIR's, with the pair's own draft on the answers since it was made, "
    "and delete it if it is accepted less often.",
)
@flag("--revert", help="Delete the tuned draft of the pair.")
@flag("--forget", help="Delete the tuned drafts of all pairs.")
@yes_option
@flag("--by-night", hidden=True)
@flag("--json", "as_json", help="Output one line of JSON.")
@click.pass_context
def command(ctx: click.Context, /, pair: str, files: tuple[str, ...], **options: Any) -> int:
    _check_together(ctx, pair)
    if options["auto"] is not None:
        settings.change("tune_by_night", "true" if options["auto"] else "false")
        render.line(
            "The configured pair's draft is tuned by night from now on. To end that: localspec tune --no-auto"
            if options["auto"]
            else "Drafts are not tuned by night."
        )
        return 0
    for action, question in _DELETIONS.items():
        if options[action]:
            require_consent(yes=options["yes"], question=question)
    if options["forget"]:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(default_paths().tuned)
        render.line("All tuned drafts are deleted.")
        return 0
    pairs_client = PairsClient()
    if options["check"]:
        return _check(pairs_client, inputs.resolve_pair(pair) if pair else "")
    name = inputs.resolve_pair(pair) or pairs_client.pairs().get("configured", "")
    view = _find_pair(pairs_client, name)
    folder = _folder(view)
    if options["revert"]:
        if not folder.exists():
            raise LocalspecError(f"The pair {view['name']} has no tuned draft.")
        shutil.rmtree(folder)
        running.unload(view["name"])
        render.line(f"The tuned draft of {view['name']} is deleted; the pair drafts as before.")
        return 0
    if options["status"]:
        return _show_status(view, as_json=options["as_json"])
    _check_kind(view, makes_draft=options["new"])
    if options["by_night"] and (view.get("tuned") or {}).get("method") == NEW_DRAFT:
        raise LocalspecError(f"{name} has a new draft, which no other replaces by night.")
    plan = tuning.Plan(
        view,
        folder,
        options["minutes"] * 60,
        "new" if options["new"] else options["method"],
        _find_places(files),
        NEW_ANSWERS if options["by_night"] else 0,
    )
    return _tune(plan, as_json=options["as_json"])


def _check_together(ctx: click.Context, pair: str) -> None:
    """Refuse what would have no effect on what the other options ask for. Raises UsageError."""
    options = {
        parameter.name: parameter.opts[0]
        for parameter in ctx.command.params
        if ctx.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    }
    if ctx.params["auto"] is False:
        options["auto"] = "--no-auto"
    actions = [options[name] for name in _ACTIONS if name in options]
    training = [options[name] for name in _TRAINING_OPTIONS if name in options]
    if len(actions) > 1 or (actions and training):
        raise UsageError(f"{' and '.join([*actions, *training])} cannot be used together.")
    if pair and ("forget" in options or "auto" in options):
        raise UsageError(f"{actions[0]} is not for a single pair; leave out {pair}.")
    if {"new", "method"} <= options.keys() and ctx.params["method"] != "auto":
        raise UsageError("--method is for training the pair's own draft further, not for --new.")


def _find_places(files: Sequence[str]) -> list[collecting.Place]:
    """Return places in the files and folders of the command line. Raises UsageError if none is usable."""
    paths = [expand_user(name) for name in files]
    for name, path in zip(files, paths, strict=True):
        if not path.exists():
            raise UsageError(f"There is no file or folder {name}.")
    places = collecting.find_places([path.absolute() for path in paths])
    if files and not places:
        raise UsageError(
            f"There is nothing to complete in {', '.join(files)}. Usable are files with "
            f"{collecting.USABLE_FILES}; in folders, those whose name has an ending, but not hidden ones."
        )
    return places


def _find_pair(client: PairsClient, name: str) -> dict[str, Any]:
    """Return a pair that may have a tuned draft, a `PairView`. Raises LocalspecError."""
    view = client.pair(name)
    if view["kind"] == "upstream":
        raise LocalspecError(f"{name} is another server's pair, which drafts by itself.")
    if view["name"] not in _names(client):
        draft = f" --draft {shlex.quote(view['draft']['path'])}" if view["draft"] else ""
        raise LocalspecError(
            "Files that are named by their paths are used as they are. To tune a draft for them, add them "
            f"first: localspec add NAME --target {shlex.quote(view['target']['path'])}{draft}"
        )
    return view


def _names(client: PairsClient) -> list[str]:
    return [pair["name"] for pair in client.pairs()["pairs"]]


def _folder(view: dict[str, Any]) -> Path:
    """Return the folder of the pair's tuned draft."""
    own = view["draft"]["path"] if view["draft"] else ""
    return tuned_folder(default_paths().tuned, view["target"]["path"], own)


def _check_kind(view: dict[str, Any], *, makes_draft: bool) -> None:
    """Check that the pair can have a tuned draft. Raises LocalspecError if not."""
    if view["kind"] not in TUNED_KINDS and not makes_draft:
        raise LocalspecError(
            f"The pair {view['name']} has no draft that could be tuned. To find one: "
            f"localspec drafts. To make one: localspec tune {view['name']} --new"
        )
    if view.get("rpc"):
        raise LocalspecError(
            f"Layers of the target of {view['name']} are on other machines (`rpc` in models.toml), and "
            "drafts are trained and compared on this one alone."
        )


def _check(client: PairsClient, only: str) -> int:
    """Compare the tuned drafts of all pairs, or of one, with the pairs' own. Return the exit code."""
    views = [_find_pair(client, only)] if only else map(client.pair, _names(client))
    tuned = [view for view in views if view.get("tuned")]
    if not tuned:
        render.line("No pair has a tuned draft." if not only else f"{only} has no tuned draft.")
    failed = False
    for view in tuned:
        name, problem = view["name"], None
        try:
            with Progress(f"check {name}") as progress:
                history = collecting.collect_history(collecting.TuneClient(), name)
                plan = tuning.Plan(view, _folder(view), 0.0)
                problem = tuning.check_present(plan, history, _make_report(progress))
                progress.clear()
        except (LocalspecError, OSError) as error:  # the others are checked all the same
            render.error(f"{name}: {error}")
            failed = True
            continue
        result = "the tuned draft is accepted as often or more, and is kept."
        if problem is None:
            result = f"fewer than {tuning.MIN_CHECKED_TEXTS} answers since, too few to compare."
        elif problem:
            result = f"the tuned draft {problem}, so it is deleted."
        render.line(f"{name}: {result}")
    return int(failed)


def _make_report(progress: Progress) -> running.Report:
    return lambda stage, done: progress.show(f"{stage} {10 * int(10 * done)}%", 0, 0)


def _show_status(view: dict[str, Any], *, as_json: bool) -> int:
    texts = collecting.collect_history(collecting.TuneClient(), view["name"])
    counts = Counter(text.kind for text in texts)
    if as_json:
        render.record({"pair": view["name"], "answers": counts, "tuned": view.get("tuned")})
        return 0
    draft = view["draft"]["file"] if view["draft"] else "none of its own"
    rows = [("pair", view["name"]), ("draft", draft)]
    rows += format_tuned(view["tuned"]) if view.get("tuned") else [("tuned", "no")]
    learnable = ", ".join(f"{kind} {count}" for kind, count in counts.most_common()) or "none"
    rows.append(("answers", learnable))
    if len(texts) < 2 * collecting.MIN_TEXTS:
        rows.append(("", f"about {2 * collecting.MIN_TEXTS} answers are needed, or --files FOLDER"))
    render.fields(rows)
    return 0


def _tune(plan: tuning.Plan, *, as_json: bool) -> int:
    """Check the present tuned draft, and make a new one. Raises LocalspecError if that is not used."""
    with Progress(f"tune {plan.name}") as progress:
        report = _make_report(progress)
        history = collecting.collect_history(collecting.TuneClient(), plan.name)
        try:
            if problem := tuning.check_present(plan, history, report):
                progress.clear()
                render.note(f"The tuned draft of {plan.name} {problem}, so it is deleted.")
        except LocalspecError as error:  # a new draft is compared with the pair's own
            progress.clear()
            render.note(f"The tuned draft of {plan.name} was not checked. {error}")
        try:
            record = tuning.tune(plan, history, report)
        except running.NotBetter as error:
            progress.clear()
            _print_result(plan.name, error.record, adopted=False, as_json=as_json)
            raise
        progress.clear()
    _print_result(plan.name, record, adopted=True, as_json=as_json)
    return 0


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
