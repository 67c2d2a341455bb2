"""Reading and changing config.toml, keeping its comments."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from localspec import config, files
from localspec.cli import inputs
from localspec.cli.terminal import render
from localspec.client.pairs import PairsClient
from localspec.errors import NoDaemon, UsageError
from localspec.paths import default_paths, read_file

_HEAD = "# The configuration of localspec; `localspec config` shows every key with its value.\n\n"


def show(*, as_json: bool = False) -> None:
    """Every key, its value and its origin."""
    loaded = config.load_config(default_paths().config_file)
    values = {key: getattr(loaded, key) for key in config.KEYS}
    if as_json:
        origins = {key: loaded.origin.get(key, "default") for key in config.KEYS}
        render.record({k: {"value": v, "origin": origins[k]} for k, v in values.items()})
        return
    rows = [["KEY", "VALUE", "FROM"]]
    rows += [
        [key, _toml(value), loaded.origin.get(key, "default")] for key, value in values.items()
    ]
    render.table(rows)


def _toml(value: Any) -> str:
    """A string, number or boolean; JSON writes them as TOML does, but for one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def change(key: str, text: str | None) -> None:
    """Set `key` in the file, or take it out with `text` None.

    Raises:
        UsageError: the key or value is wrong, or the file was before; nothing was changed.
    """
    file = default_paths().config_file
    loaded = config.load_config(file, environ={})  # refuses a file that is wrong already
    value = None if text is None else config.from_text(key, text, "localspec config set")
    if key == "pair" and value is not None:
        value = inputs.pair(value)
        _check_pair(value)
    if key not in config.KEYS:
        config.from_text(key, "", "localspec config set")
    old = read_file(file).decode() if file.exists() else ""
    new = changed(old, key, value)
    wanted = {name: getattr(loaded, name) for name in loaded.origin if name != key}
    if value is not None:
        wanted[key] = value
    if tomllib.loads(new) != wanted:
        raise UsageError(
            f"{file} is written in a way that is better edited by hand: localspec config edit"
        )
    _write(file, new)
    variable = f"LOCALSPEC_{key.upper()}"
    if variable in os.environ:
        render.error(f"{variable} is set in this environment and comes before the file.")
    if key != "pair":
        render.dim(
            "The daemon uses it when it loads a pair anew: localspec stop && localspec start"
        )


def _check_pair(name: str) -> None:
    """Refuse a pair that nobody knows; say it when one is known and has to be pulled yet."""
    named = name.split(",")
    if missing := [each for each in named if each.startswith("/") and not Path(each).is_file()]:
        raise UsageError(f"{missing[0]} is not there.")
    if all(each.startswith("/") for each in named):
        return
    if any(":" in each for each in named):
        with contextlib.suppress(NoDaemon):
            PairsClient(autostart=False).pair(name)  # refuses what Ollama does not have
        return
    try:
        listed = PairsClient(autostart=False).pairs(everything=True)["pairs"]
    except NoDaemon:
        render.dim(f"No daemon runs to ask whether there is a pair '{name}'.")
        return
    here = {each["name"]: each["here"] for each in listed}
    if name not in here:
        close = difflib.get_close_matches(name, here, 1)
        meant = f"did you mean {close[0]}?" if close else "to see them: localspec list --all"
        raise UsageError(f"There is no pair '{name}'; {meant}")
    if not here[name]:
        render.error(f"{name} is not here yet: localspec pull {name}")


def changed(old: str, key: str, value: Any) -> str:
    """The file's text with one line changed, added or taken out; everything else as it was."""
    line = re.compile(
        rf"^[ \t]*{re.escape(key)}[ \t]*=[^\n#]*(?P<comment>#[^\n]*)?\n?", re.MULTILINE
    )
    match = line.search(old)
    if value is None:
        return old[: match.start()] + old[match.end() :] if match else old
    comment = f"  {match['comment']}" if match and match["comment"] else ""
    entry = f"{key} = {_toml(value)}{comment}\n"
    if match:
        return old[: match.start()] + entry + old[match.end() :]
    start = old if not old or old.endswith("\n") else f"{old}\n"
    return f"{start or _HEAD}{entry}"


def _write(file: Path, text: str) -> None:
    """In one step: the daemon watches the file and must not read half of it."""
    file = file.resolve()  # a link into somebody's dotfiles stays one
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(file, text.encode())


def edit() -> None:
    """Edit a copy; it becomes the file when it is right.

    Raises:
        UsageError: it was left as it is, because the copy is wrong.
    """
    file = default_paths().config_file
    old = read_file(file).decode() if file.exists() else _HEAD + _defaults()
    text = inputs.edited(old, _problem, f"{file} is as it was.")
    if text is None or text == old:
        render.line("Nothing was changed.")
        return
    _write(file, text)
    render.line(f"Saved {file}.")


def _defaults() -> str:
    default = config.Config()
    return "".join(f"# {key} = {_toml(getattr(default, key))}\n" for key in config.KEYS)


def _problem(text: str) -> str:
    """Why `text` is no configuration; nothing when it is one."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "config.toml")
        copy.write_text(text, encoding="utf-8")
        try:
            config.load_config(copy, environ={})
        except UsageError as error:
            return error.message
    return ""
