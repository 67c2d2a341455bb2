"""`localspec uninstall`: undo what localspec installed on this machine, and show what it stored."""

from __future__ import annotations

import click

from localspec import extras
from localspec.cli.app import flag, require_consent, yes_option
from localspec.cli.commands.start import stop_daemon
from localspec.cli.terminal import render
from localspec.errors import LocalspecError
from localspec.files import format_size
from localspec.paths import default_paths, remove_tree


@click.command(
    help="Stop the daemon, and remove the service and what was installed for editors. What localspec stored "
    "stays unless an option names it, and is listed.",
    epilog="Examples:\n\n\b\n  localspec uninstall\n  localspec uninstall --models --history",
)
@flag("--models", help="Delete the models that were pulled, and tuned drafts.")
@flag("--history", help="Delete all conversations, and tuned drafts, which learned from them.")
@yes_option
def command(models: bool, history: bool, yes: bool) -> int:
    paths, code = default_paths(), 0
    stored = {
        "models": [paths.store, paths.tuned],
        "history": [
            *paths.data.glob("conversations.sqlite*"),
            paths.typed_lines,
            paths.model_states,
        ],
        "settings": [paths.config],
        "logs and figures": [paths.state],
        "built": sorted({*paths.cache.glob("*")} - {paths.model_states}),
    }
    named = ["models"] * models + ["history"] * history
    question = f"Delete all {' and '.join(named)} permanently?" if named else ""
    require_consent(yes=yes, question=question)
    for extra in extras.WITH_INSTALLATION:
        try:
            if module := extras.load(extra, "commands"):
                module.remove_installed()
        except LocalspecError as error:  # the others are removed all the same
            render.error(error.message)
            code = error.exit_code
    stop_daemon()
    for path in [path for name in named for path in stored[name]] + [paths.tuned] * history:
        remove_tree(path)
    rows = [("kept", "size", "where")]
    for name, places in stored.items():
        files = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
        if files:
            size = format_size(sum(file.lstat().st_size for file in files))
            folder = next(place for place in places if place.exists())
            rows.append((name, size, str(folder)))
    render.table(rows)
    return code
