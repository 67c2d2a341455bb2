"""Reading and changing config.toml, keeping its comments, and telling the daemon."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from localspec import config, files, literals
from localspec.cli import inputs
from localspec.cli.terminal import render
from localspec.client.api import Client
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NoAnswer, NoDaemon, UsageError
from localspec.paths import default_paths, model_files, read_file

_HEAD = "# The configuration of localspec; `localspec config` shows every key with its value.\n\n"
# What they cost here, or whether they can be had, the daemon alone can say: one is started for it.
_ASKED = ("context", "kv_type", "kv_type_v", "parallel", "listen", "listen_anywhere")


def show(*, as_json: bool = False) -> None:
    """Every key, its value and its origin; what is wrong in the file on stderr."""
    loaded = config.load_config(default_paths().config_file)
    values = {key: getattr(loaded, key) for key in config.KEYS}
    origins = {key: loaded.origin.get(key, "default") for key in config.KEYS}
    if as_json:
        render.record({k: {"value": v, "origin": origins[k]} for k, v in values.items()})
    else:
        rows = [["KEY", "VALUE", "FROM"]]
        render.table(rows + [[key, _toml(value), origins[key]] for key, value in values.items()])
    _tell_problems(loaded)


def get(key: str) -> None:
    """One value, as it counts here.

    Raises:
        UsageError: there is no such key.
    """
    loaded, key = config.load_config(default_paths().config_file), config.key_of(key)
    _known(key)
    value = getattr(loaded, key)
    render.line(value if isinstance(value, str) else _toml(value))


def use(name: str) -> None:
    """Make an installed pair the configured one; a daemon is started to see whether it is installed.

    Raises:
        LocalspecError: it is not installed, or the daemon cannot be reached; nothing was changed.
    """
    name = inputs.pair(name)
    if not name.startswith(
        "/"
    ):  # a file's view would read its whole header, and `change` looks at it
        name = PairsClient().pair(name)["name"]
    change("pair", name)


def _tell_problems(loaded: config.Config) -> None:
    for problem in loaded.problems:
        render.error(f"{problem.what} To correct it: {problem.cure}")


def _known(key: str) -> None:
    if key not in config.KEYS:
        _checked(key, "")


def _checked(key: str, text: str) -> Any:
    """Raises UsageError: what is allowed."""
    try:
        return config.checked(key, config.parsed(key, text))
    except ValueError as error:
        said = str(error)
        raise UsageError(f"{said[:1].upper()}{said[1:]}.") from None


def _toml(value: Any) -> str:
    try:
        return literals.toml(value)
    except ValueError:
        raise UsageError("A value must be text; this is not UTF-8.") from None


def change(key: str, text: str | None) -> None:
    """Set `key` in the file, or take it out with `text` None; a daemon uses it when this returns.

    Raises:
        UsageError: the key or value is wrong, or does not go with the others; nothing was changed.
    """
    file, key = default_paths().config_file, config.key_of(key)
    value = None if text is None else _wanted(key, text)
    with _alone(file):
        old = _bytes_of(file)
        new = changed(config.as_text(old), key, value).encode("utf-8", "surrogateescape")
        if new == old and value is None:
            _known(key)
        before = _loaded(file, old)
        after = _loaded(file, new)
        _refuse(file, before, after, key, value)
        if new != old:
            _write(file, new)
    told = _tell(key)
    if told and after.listen and key in ("listen", "listen_anywhere") and not told["listen"]:
        with _alone(file):
            was = getattr(before, key) if key in before.origin else None
            text = changed(config.as_text(_bytes_of(file)), key, was)
            _write(file, text.encode("utf-8", "surrogateescape"))
        _tell(key)
        raise UsageError(f"{' '.join(told['problems'])} Nothing was changed.")
    _say(key, before, after, told)


def _loaded(file: Path, data: bytes) -> config.Config:
    return config.load_config(file, {}, data=data)


def _wanted(key: str, text: str) -> Any:
    """The value to set. Raises UsageError: nobody can use it."""
    typed = config.parsed(key, text)
    if key == "threads" and type(typed) is int and typed > (cores := usable_cores()):
        raise UsageError(
            f"This machine has {cores} cores, and more threads than cores only slow it down: "
            f"'threads' must be between 0 (auto) and {cores}, not {config.short(text)}."
        )
    value = _checked(key, text)
    if key in config.PAIRS and value:
        value = _checked(key, inputs.pair(value))
        _check_pair(value)
    return value


def usable_cores() -> int:
    """Of this machine; more threads than these wait for each other."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def _refuse(file: Path, before: config.Config, after: config.Config, key: str, value: Any) -> None:
    """Raises UsageError: the file would say something else than was wanted, or that goes with nothing."""
    known = {problem.reason for problem in before.problems}
    fresh = [each.reason for each in after.problems if each.conflict and each.reason not in known]
    if fresh:
        reason = fresh[0]
        raise UsageError(f"{reason[:1].upper()}{reason[1:]}.")
    others = [each for each in config.KEYS if each != key]
    if any(getattr(before, each) != getattr(after, each) for each in others) or (
        value is not None and getattr(after, key) != value
    ):
        raise UsageError(
            f"{file} cannot be changed automatically; edit it by hand: localspec config edit"
        )


def _tell(key: str) -> dict[str, Any] | None:
    """Have the daemon read the file; None where there is none, or one that cannot."""
    try:
        return Client(autostart=key in _ASKED).configure()
    except NoAnswer:
        render.error("The daemon does not respond; see: localspec doctor")
    except NoDaemon as error:
        if key in _ASKED:
            render.error(error.message)
    except LocalspecError as error:
        render.error(f"The running daemon could not be notified: {error.message}")
    return None


def _say(
    key: str, before: config.Config, after: config.Config, told: dict[str, Any] | None
) -> None:
    """What has changed, from when, and what it costs."""
    if key in config.KEYS:
        was, now = (_shown(key, getattr(each, key)) for each in (before, after))
        changes = f"{was} → {now}" if was != now else f"{now}, as before"
        render.line(f"{key}: {changes}. {_from_when(key, told)}")
    else:
        render.line(f"{key} is no longer in the file.")
    _tell_problems(after)
    for note in told["notes"] if told and key in _ASKED else []:
        render.note(f"Note: {note}")
    variable = f"LOCALSPEC_{key.upper()}"
    where = (told or {}).get("origin", {}).get(key)
    if variable in os.environ:
        render.error(f"{variable} is set in this environment and overrides the file.")
    elif where:
        how = "--listen" if where == "flag" else where
        render.error(
            f"The running daemon was started with {how}, which overrides the file: localspec "
            "stop && localspec start"
        )


def _shown(key: str, value: Any) -> str:
    said = config.about(key)
    if said.word and value == said.special:
        return f"{said.special} ({said.word})"
    return (value or "(none)") if isinstance(value, str) else _toml(value)


def _from_when(key: str, told: dict[str, Any] | None) -> str:
    if told is None:
        return "It applies when the daemon starts."
    if key in ("listen", "listen_anywhere"):
        if told["listen"]:
            return f"The daemon listens on {told['listen']}; the token is in {told['token_file']}."
        return "The daemon listens on its own socket only."
    return "It applies now." if config.about(key).at_once else "It applies from the next question."


def _check_pair(name: str) -> None:
    """Refuse a pair that nobody knows; say it when one is known and has to be pulled yet."""
    named = model_files(name)
    if missing := [each for each in named if each.startswith("/") and not Path(each).is_file()]:
        raise UsageError(f"{missing[0]} does not exist.")
    if all(each.startswith("/") for each in named):
        return
    if any(":" in each for each in named):
        with contextlib.suppress(NoDaemon):
            PairsClient(autostart=False).pair(name)  # refuses what Ollama does not have
        return
    try:
        listed = PairsClient(autostart=False).pairs(everything=True)["pairs"]
    except NoDaemon:
        render.dim(
            f"Not checked whether the pair '{name}' exists, because the daemon is not running."
        )
        return
    here = {name: each["here"] for each in listed for name in (each["name"], *each["aliases"])}
    if name not in here:
        close = difflib.get_close_matches(name, here, 1)
        meant = f"did you mean {close[0]}?" if close else "to see all pairs: localspec list --all"
        raise UsageError(f"There is no pair '{name}'; {meant}")
    if not here[name]:
        render.error(f"The pair '{name}' is not pulled yet; run: localspec pull {name}")


def changed(old: str, key: str, value: Any) -> str:
    """The file's text with one key's line changed, added or taken out; everything else as it was."""
    top, tables = _divided(old)
    name = rf"[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*"
    line = re.compile(
        rf"^{name}=[ \t]*(?:\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\n#]*)[ \t]*(?P<comment>#[^\n]*)?[^\n]*\n?",
        re.MULTILINE,
    )
    match = line.search(top)
    if value is None:
        inner = re.compile(rf"^{name}\.[^\n]*\n?", re.MULTILINE)
        table = re.compile(
            rf"^[ \t]*\[\[?{name}[\].][^\n]*\n?(?:(?![ \t]*\[)[^\n]*\n?)*", re.MULTILINE
        )
        return inner.sub("", line.sub("", top)) + table.sub("", tables)
    comment = f"  {match['comment']}" if match and match["comment"] else ""
    entry = f"{key} = {_toml(value)}{comment}\n"
    if match:
        return top[: match.start()] + entry + line.sub("", top[match.end() :]) + tables
    start = top if not top or top.endswith("\n") else f"{top}\n"
    return f"{start or _HEAD}{entry}{tables}"


def _divided(text: str) -> tuple[str, str]:
    """What stands before the first table, where all keys belong, and the rest."""
    found = re.search(r"^[ \t]*\[", text, re.MULTILINE)
    return (text[: found.start()], text[found.start() :]) if found else (text, "")


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Nobody else changes the file in the block: of two at once, each keeps what the other wrote."""
    folder = file.resolve().parent  # a link into somebody's dotfiles stays one
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a network's folder that knows no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _bytes_of(file: Path) -> bytes:
    """Raises UsageError: it cannot be read, so nothing of it can be kept."""
    try:
        return read_file(file)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}. See: localspec doctor"
        ) from error


def _write(file: Path, data: bytes) -> None:
    """In one step: the daemon watches the file and must not read half of it."""
    files.write_whole(file.resolve(), data)


def edit() -> None:
    """Edit a copy; it becomes the file when it is right.

    Raises:
        UsageError: it was left as it is, because the copy is wrong.
    """
    file = default_paths().config_file
    old = _bytes_of(file)
    text = config.as_text(old).encode("utf-8", "replace").decode() or _HEAD + _defaults()
    edited = inputs.edited(text, partial(_problem, file), f"{file} was not changed.")
    if edited is None or edited == text:
        render.line("No changes.")
        return
    with _alone(file):
        _write(file, edited.encode())
    _tell("")
    render.line(f"Saved {file}. It applies from the next question.")


def _problem(file: Path, text: str) -> str:
    """What is wrong in `text`, a line each; nothing when it is a configuration."""
    problems = _loaded(file, text.encode("utf-8", "surrogateescape")).problems
    return "\n".join(f"{each.where.removeprefix(f'{file}, ')}: {each.reason}." for each in problems)


def _defaults() -> str:
    default = config.Config()
    return "".join(f"# {key} = {_toml(getattr(default, key))}\n" for key in config.KEYS)
