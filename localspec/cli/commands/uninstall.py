"""`localspec uninstall`: undo what localspec installed on this machine, and show what it stored."""

from __future__ import annotations

from pathlib import Path

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
    conversations = [*paths.data.glob("conversations.sqlite*")]
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
    history_files = [*conversations, paths.typed_lines, paths.model_states, paths.tuned]
    for path in [paths.store, paths.tuned] * models + history_files * history:
        remove_tree(path)
    kept = {"models": [paths.store, paths.tuned], "history": conversations, "cache": [paths.cache]}
    kept |= {"settings": [paths.config], "logs and figures": [paths.state]}
    rows = [("kept", "size", "where")]
    for name, places in kept.items():
        files = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
        if files:
            size = format_size(sum(file.lstat().st_size for file in files))
            rows.append((name, size, str(next(filter(Path.exists, places)))))
    render.table(rows)
    return code
