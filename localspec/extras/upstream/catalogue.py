"""Pairs that another server answers for: check, add and remove their tables in models.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from localspec import literals
from localspec.errors import CatalogueError, Conflict, InvalidRequest, StoreError
from localspec.files import write_atomically
from localspec.paths import expand_user, read_file
from localspec.protocol.settings import Upstream

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TABLE_HEADER = re.compile(r"\s*\[")


def find_problem(name: str, entry: Upstream) -> tuple[str, str]:
    """Return the key of an entry that is wrong and what it must be, or two empty texts."""
    # The address may contain a password, so it is not repeated.
    url, example = entry.upstream, "must look like http://HOST:PORT/v1"
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return "upstream", example
    if "@" in parts.netloc:
        fault = "must contain no user or password; name the key by key_env or key_file"
        return "upstream", fault
    is_plain = url.isascii() and url.isprintable() and not {" ", "\\"} & {*url}
    if not is_valid or parts.query or parts.fragment or not is_plain:
        return "upstream", example
    if entry.key_env and entry.key_file:
        return "key_file", "give either key_env or key_file"
    if entry.key_env and not _VARIABLE_NAME.fullmatch(entry.key_env):
        # The value is not repeated, since it may be the secret key itself, entered by mistake.
        return "key_env", "must be the name of an environment variable that holds the key"
    for key, path in (("key_file", entry.key_file), ("ca", entry.ca)):
        if path and not expand_user(path).is_absolute():
            return key, "must be an absolute path"
    if entry.fallback == name:
        return "fallback", "must be another pair"
    return "", ""


def add_upstream(file: Path, name: str, entry: Upstream, *, replace: bool = False) -> None:
    """Add the pair's table to the user's models.toml and change nothing else there.

    Raises:
        InvalidRequest: the entry is wrong.
        Conflict: the file already has a pair of this name.
        CatalogueError: the file is invalid, or states this pair in a form that cannot be edited.
        StoreError: the file cannot be written.
    """
    key, fault = find_problem(name, entry)
    if fault:
        raise InvalidRequest(f"'{key}' {fault}.", param=key)
    text, table = _read_table(file)
    if name in table.get("pairs", {}):
        if not replace:
            raise Conflict(
                f"{file} has a pair '{name}' already; to replace it: localspec add … --replace"
            )
        text, table = _remove_table(file, text, table, name)
    # The round trip through JSON turns tuples into lists, as TOML has them.
    encoded = msgspec.json.decode(msgspec.json.encode(entry))
    fields = entry.__struct_fields__
    changed = [key for key in fields if getattr(entry, key) != getattr(_DEFAULTS, key)]
    values = {key: encoded[key] for key in changed}
    try:
        lines = [f"{key} = {literals.toml(value)}" for key, value in values.items()]
    except ValueError:
        raise InvalidRequest("A value must be text; this is not UTF-8.") from None
    quoted_name = f'"{name}"' if "." in name else name
    if text:
        text = text.removesuffix("\n") + "\n\n"
    expected = {**table, "pairs": {**table.get("pairs", {}), name: values}}
    table_text = "\n".join([f"[pairs.{quoted_name}]", *lines])
    _write_table(file, f"{text}{table_text}\n", expected)


_DEFAULTS = Upstream(upstream="-")


def remove_upstream(file: Path, name: str) -> None:
    """Remove the pair's table from the user's models.toml, if it is there.

    Raises:
        CatalogueError, StoreError: as `add_upstream`.
    """
    text, table = _read_table(file)
    if name in table.get("pairs", {}):
        _write_table(file, *_remove_table(file, text, table, name))


def _remove_table(
    file: Path, text: str, table: dict[str, Any], name: str
) -> tuple[str, dict[str, Any]]:
    """Return the text and content of the file without the pair's table.

    Raises:
        CatalogueError: the pair is not written as a table of its own.
    """
    lines = text.splitlines(keepends=True)
    header = re.compile(rf"\s*\[\s*pairs\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]\s*(#.*)?")
    starts = [index for index, line in enumerate(lines) if header.fullmatch(line.rstrip("\r\n"))]
    other_pairs = {key: pair for key, pair in table.get("pairs", {}).items() if key != name}
    expected = {**table, "pairs": other_pairs}
    if len(starts) == 1:
        end = starts[0] + 1
        while end < len(lines) and not _TABLE_HEADER.match(lines[end]):
            end += 1
        # Comments directly above the next table belong to that table, or to the file.
        while not (line := lines[end - 1].strip()) or line.startswith("#"):
            end -= 1
        remaining = "".join(lines[: starts[0]] + lines[end:]).rstrip("\n")
        remaining += "\n" if remaining else ""
        if _means(remaining, expected):
            return remaining, expected
    raise CatalogueError(f"{file} says '{name}' in a way that cannot be changed here; edit it.")


def _read_table(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the text and content of the file, both empty if it does not exist."""
    try:
        text = read_file(file).decode()
    except FileNotFoundError:
        return "", {}
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{file} cannot be read: {error}.") from error
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{file}: {error}. Correct it first.") from error


def _write_table(file: Path, text: str, expected: dict[str, Any]) -> None:
    """Write the file if its new text means exactly `expected`.

    Raises:
        CatalogueError: the text means something else. StoreError: the file cannot be written.
    """
    if not _means(text, expected):
        raise CatalogueError(f"{file} cannot be changed here without other changes; edit it.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # This replaces the target of a link, not the link.
        write_atomically(file.resolve(), text.encode())
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {error.strerror}.") from error


def _means(text: str, expected: dict[str, Any]) -> bool:
    """Return whether the text means `expected`. A missing table of pairs counts as an empty one."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return {"pairs": {}, **content} == {"pairs": {}, **expected}
