"""Read and change config.toml, keep its comments, and notify the daemon."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localspec import config, files, literals
from localspec.cli import inputs
from localspec.cli.terminal import render
from localspec.client.api import Client
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError, NoAnswer, NoDaemon, UsageError
from localspec.paths import default_paths, read_file, split_model_names

_FILE_HEADER = (
    "# The configuration of localspec; `localspec config` shows every key with its value.\n\n"
)
# A [table] up to the next one, or a line before the first of them.
_PARTS = re.compile(r"[ \t]*\[[^\n]*\n?(?:(?![ \t]*\[)[^\n]*\n?)*|[^\n]+\n?|\n")
# Only the daemon knows what these cost on this machine, or whether they are possible at all. It is started
# if it is not running.
_NEEDS_DAEMON = ("context", "kv_type", "kv_type_v", "parallel", "listen", "listen_anywhere")


def show(*, as_json: bool = False) -> None:
    """Print every key with its value and origin. Problems in the file are printed on stderr."""
    current = config.load_config(default_paths().config_file)
    origins = current.origin
    shown = {key: (getattr(current, key), origins.get(key, "default")) for key in config.KEYS}
    if as_json:
        render.record({key: {"value": each[0], "origin": each[1]} for key, each in shown.items()})
    else:
        rows = [[key, _format_toml(value), origin] for key, (value, origin) in shown.items()]
        render.table([["KEY", "VALUE", "FROM"], *rows])
    _print_problems(current)


def get(key: str) -> None:
    """Print the value of one key that is in effect. Raises UsageError if there is no such key."""
    current, key = config.load_config(default_paths().config_file), config.resolve_key(key)
    _require_known_key(key)
    value = getattr(current, key)
    render.line(value if isinstance(value, str) else _format_toml(value))


def use(name: str) -> None:
    """Make an installed pair the configured one. A daemon is started to check whether it is installed.

    Raises:
        LocalspecError: it is not installed, or the daemon cannot be reached; nothing was changed.
    """
    name = inputs.resolve_pair(name)
    # For a file the daemon would read its whole header, and `change` checks it anyway.
    if not name.startswith("/"):
        name = PairsClient().pair(name)["name"]
    change("pair", name)


def _print_problems(current: config.Config) -> None:
    for problem in current.problems:
        render.error(f"{problem.sentence} To correct it: {problem.cure}")


def _require_known_key(key: str) -> None:
    if key not in config.KEYS:
        _validate(key, "")


def _validate(key: str, text: str) -> Any:
    try:
        return config.check_value(key, config.parse_value(key, text))
    except ValueError as error:
        message = str(error)
        raise UsageError(f"{message[:1].upper()}{message[1:]}.") from None


def _format_toml(value: Any) -> str:
    try:
        return literals.toml(value)
    except ValueError:
        raise UsageError("A value must be text; this is not UTF-8.") from None


def change(key: str, text: str | None) -> None:
    """Set `key` in the file to `text`, or remove it if `text` is None.

    A running daemon uses the new value when this returns.

    Raises:
        UsageError: the key or value is wrong, or conflicts with others; nothing was changed.
    """
    file, key = default_paths().config_file, config.resolve_key(key)
    value = None if text is None else _parse_value(key, text)
    with _lock_file(file):
        old = _read_bytes(file)
        new = _changed_bytes(old, key, value)
        if new == old and value is None:
            _require_known_key(key)
        old_config, new_config = _parse_config(file, old), _parse_config(file, new)
        _refuse_conflicts(file, old_config, new_config, key, value)
        if new != old:
            _write(file, new)
    response = _notify_daemon(key)
    is_address = key in ("listen", "listen_anywhere")
    if response and new_config.listen and is_address and not response["listen"]:
        with _lock_file(file):
            old_value = getattr(old_config, key) if key in old_config.origin else None
            _write(file, _changed_bytes(_read_bytes(file), key, old_value))
        _notify_daemon(key)
        raise UsageError(f"{' '.join(response['problems'])} Nothing was changed.")
    _print_change(key, old_config, new_config, response)


def _changed_bytes(old: bytes, key: str, value: Any) -> bytes:
    return changed(config.decode_file(old), key, value).encode("utf-8", "surrogateescape")


def _parse_config(file: Path, data: bytes) -> config.Config:
    return config.load_config(file, {}, data=data)


def _parse_value(key: str, text: str) -> Any:
    parsed = config.parse_value(key, text)
    if key == "threads" and type(parsed) is int and parsed > (cores := usable_cores()):
        raise UsageError(
            f"This machine has {cores} cores, and more threads than cores only slow it down: "
            f"'threads' must be between 0 (auto) and {cores}, not {config.shorten(text)}."
        )
    value = _validate(key, text)
    if key in config.PAIR_ROLES and value:
        value = _validate(key, inputs.resolve_pair(value))
        _check_pair(value)
    return value


def usable_cores() -> int:
    """Return the number of cores that this process may use. More threads than that slow it down."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return allowed or 1


def _refuse_conflicts(
    file: Path, old_config: config.Config, new_config: config.Config, key: str, value: Any
) -> None:
    """Check that the changed file means what was intended.

    Raises UsageError if a value conflicts with others, or if the file is written in a form that this program
    cannot change line by line.
    """
    old_reasons = {problem.reason for problem in old_config.problems}
    for problem in new_config.problems:
        if problem.conflict and problem.reason not in old_reasons:
            raise UsageError(f"{problem.reason[:1].upper()}{problem.reason[1:]}.")
    others = [other for other in config.KEYS if other != key]
    if any(getattr(old_config, other) != getattr(new_config, other) for other in others) or (
        value is not None and getattr(new_config, key) != value
    ):
        raise UsageError(
            f"{file} cannot be changed automatically; edit it by hand: localspec config edit"
        )


def _notify_daemon(key: str) -> dict[str, Any] | None:
    """Let the daemon read the file again and return its response.

    Returns None if no daemon is running or it cannot read the file.
    """
    try:
        return Client(autostart=key in _NEEDS_DAEMON).configure()
    except NoAnswer:
        render.error("The daemon does not respond; see: localspec doctor")
    except NoDaemon as error:
        if key in _NEEDS_DAEMON:
            render.error(error.message)
    except LocalspecError as error:
        render.error(f"The running daemon could not be notified: {error.message}")
    return None


def _print_change(
    key: str, old_config: config.Config, new_config: config.Config, response: dict[str, Any] | None
) -> None:
    if key in config.KEYS:
        old, new = (_format_value(key, getattr(each, key)) for each in (old_config, new_config))
        changes = f"{old} → {new}" if old != new else f"{new}, as before"
        render.line(f"{key}: {changes}. {_describe_start(key, response)}")
    else:
        render.line(f"{key} is no longer in the file.")
    _print_problems(new_config)
    for note in response["notes"] if response and key in _NEEDS_DAEMON else []:
        render.note(f"Note: {note}")
    variable = f"LOCALSPEC_{key.upper()}"
    if variable in os.environ:
        render.error(f"{variable} is set in this environment and overrides the file.")
    elif origin := (response or {}).get("origin", {}).get(key):
        render.error(
            f"The running daemon was started with {'--listen' if origin == 'flag' else origin}, which "
            "overrides the file: localspec stop && localspec start"
        )


def _format_value(key: str, value: Any) -> str:
    description = config.describe_setting(key)
    if description.word and value == description.special:
        return f"{description.special} ({description.word})"
    return (value or "(none)") if isinstance(value, str) else _format_toml(value)


def _describe_start(key: str, response: dict[str, Any] | None) -> str:
    if response is None:
        return "It applies when the daemon starts."
    if key in ("listen", "listen_anywhere"):
        if response["listen"]:
            return f"The daemon listens on {response['listen']}; the token is in {response['token_file']}."
        return "The daemon listens on its own socket only."
    is_at_once = config.describe_setting(key).at_once
    return "It applies now." if is_at_once else "It applies from the next question."


def _check_pair(name: str) -> None:
    """Refuse a pair that does not exist, and note if one still has to be pulled."""
    files = split_model_names(name)
    for file in files:
        if file.startswith("/") and not Path(file).is_file():
            raise UsageError(f"{file} does not exist.")
    if all(file.startswith("/") for file in files):
        return
    client = PairsClient(autostart=False)
    if any(":" in file for file in files):
        with contextlib.suppress(NoDaemon):
            client.pair(name)  # raises if Ollama does not have it
        return
    try:
        entries = client.pairs(everything=True)["pairs"]
    except NoDaemon:
        render.dim(
            f"Not checked whether the pair '{name}' exists, because the daemon is not running."
        )
        return
    here = {each: pair["here"] for pair in entries for each in (pair["name"], *pair["aliases"])}
    if name not in here:
        match = next(iter(difflib.get_close_matches(name, here, 1)), "")
        hint = f"did you mean {match}?" if match else "to see all pairs: localspec list --all"
        raise UsageError(f"There is no pair '{name}'; {hint}")
    if not here[name]:
        render.error(f"The pair '{name}' is not pulled yet; run: localspec pull {name}")


def changed(old: str, key: str, value: Any) -> str:
    """Return the file's text with one key changed, added or removed.

    `value` None removes it. Everything else stays as it was.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    def parse(text: str) -> tomlkit.TOMLDocument | str:
        try:
            return tomlkit.parse(text)
        except (TOMLKitError, RecursionError):
            return text

    parts = [parse(old)]
    if isinstance(parts[0], str):  # `config.load_config` uses those lines of it that are TOML
        named = re.compile(rf"\s*(\[\[?\s*)?[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
        parts = [parse(""), *map(parse, _PARTS.findall(old))]
        parts = [part for part in parts if not (isinstance(part, str) and named.match(part))]
    documents = [part for part in parts if not isinstance(part, str)]
    holders = [document for document in documents if key in document]
    if value is not None:
        first = holders.pop(0) if holders else documents[0]
        first[key] = tomlkit.value(_format_toml(value))
    for document in holders:
        document.remove(key)
    text = "".join(part if isinstance(part, str) else part.as_string() for part in parts)
    return text if old or value is None else _FILE_HEADER + text


@contextlib.contextmanager
def _lock_file(file: Path) -> Iterator[None]:
    """Lock the file's folder, so that concurrent changes do not lose what the other one wrote."""
    folder = file.resolve().parent  # a link, for example into dotfiles, stays a link
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read_bytes(file: Path) -> bytes:
    """Read the file. Raises UsageError if that fails, because its contents could not be preserved."""
    try:
        return read_file(file)
    except FileNotFoundError:
        return b""
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}. See: localspec doctor"
        raise UsageError(message) from error


def _write(file: Path, data: bytes) -> None:
    """Write the file in one step, because the daemon watches it and must not read half of it."""
    files.write_atomically(file.resolve(), data)


def edit() -> None:
    """Let a person edit a copy, which replaces the file when it is valid.

    Raises UsageError if the copy was wrong and the file was not changed.
    """
    file, default = default_paths().config_file, config.Config()
    text = config.decode_file(_read_bytes(file)).encode("utf-8", "replace").decode()
    if not text:
        text = _FILE_HEADER
        text += "".join(f"# {key} = {_format_toml(getattr(default, key))}\n" for key in config.KEYS)

    def problem(text: str) -> str:
        found = _parse_config(file, text.encode("utf-8", "surrogateescape")).problems
        places = (each.where.removeprefix(f"{file}, ") for each in found)
        return "\n".join(f"{at}: {each.reason}." for at, each in zip(places, found, strict=True))

    edited = inputs.edit_text(text, problem, f"{file} was not changed.")
    if edited is None or edited == text:
        render.line("No changes.")
        return
    with _lock_file(file):
        _write(file, edited.encode())
    _notify_daemon("")
    render.line(f"Saved {file}. It applies from the next question.")
