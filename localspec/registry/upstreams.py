"""Pairs that another server answers for: their tables in models.toml, checked, written and removed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from localspec import literals
from localspec.errors import CatalogueError, Conflict, InvalidRequest, StoreError
from localspec.files import write_whole
from localspec.paths import read_file
from localspec.protocol.settings import Upstream

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"\s*\[")


def problem(name: str, entry: Upstream) -> tuple[str, str]:
    """What is wrong with an entry: its key, and what it should be; two empty texts where nothing is."""
    if what := _address(entry.upstream):
        return "upstream", what
    if entry.key_env and entry.key_file:
        return "key_file", "give either key_env or key_file"
    if entry.key_env and not _VARIABLE.fullmatch(entry.key_env):
        # Not repeated: whoever mistakes it for the key itself has written that.
        return "key_env", "must be the name of an environment variable that holds the key"
    for key, path in (("key_file", entry.key_file), ("ca", entry.ca)):
        if path and not Path(path).expanduser().is_absolute():
            return key, "must be an absolute path"
    if entry.fallback == name:
        return "fallback", "must be another pair"
    return "", ""


def _address(url: str) -> str:
    """What is wrong with a server's address; it may hold a password, so that it is not repeated."""
    example = "must look like http://HOST:PORT/v1"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return example
    if "@" in parts.netloc:
        return "must contain no user or password; name the key by key_env or key_file"
    if not good or parts.query or parts.fragment or not url.isascii() or not url.isprintable():
        return example
    return example if " " in url or "\\" in url else ""


def add(file: Path, name: str, entry: Upstream, *, replace: bool = False) -> None:
    """Write the pair's table into the person's models.toml, and change nothing else there.

    Raises:
        InvalidRequest: what the entry says. Conflict: the name is taken there. CatalogueError: the file
        is broken, or says this pair where it cannot be changed. StoreError: it cannot be written.
    """
    key, what = problem(name, entry)
    if what:
        raise InvalidRequest(f"'{key}' {what}.", param=key)
    text, table = _read(file)
    if name in table.get("pairs", {}):
        if not replace:
            raise Conflict(
                f"{file} has a pair '{name}' already; to replace it: localspec add … --replace"
            )
        text, table = _without(file, text, table, name)
    given = [key for key in entry.__struct_fields__ if getattr(entry, key) != getattr(_PLAIN, key)]
    every = msgspec.json.decode(msgspec.json.encode(entry))  # as TOML has it: lists, no tuples
    said = {key: every[key] for key in given}
    lines = [f"[pairs.{_key(name)}]", *(f"{key} = {_toml(value)}" for key, value in said.items())]
    gap = "\n" * (bool(text) + (bool(text) and not text.endswith("\n")))
    wanted = {**table, "pairs": {**table.get("pairs", {}), name: said}}
    _write(file, f"{text}{gap}{chr(10).join(lines)}\n", wanted)


_PLAIN = Upstream(upstream="-")


def remove(file: Path, name: str) -> None:
    """Take the pair's table out of the person's models.toml. Raises as `add`."""
    text, table = _read(file)
    if name in table.get("pairs", {}):
        _write(file, *_without(file, text, table, name))


def _without(file: Path, text: str, table: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """The file without the pair's table. Raises CatalogueError: it is not written as a table of its own."""
    lines = text.splitlines(keepends=True)
    header = re.compile(rf"\s*\[\s*pairs\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]\s*(#.*)?")
    starts = [at for at, line in enumerate(lines) if header.fullmatch(line.rstrip("\r\n"))]
    rest = {key: each for key, each in table.get("pairs", {}).items() if key != name}
    wanted = {**table, "pairs": rest}
    if len(starts) == 1:
        end = starts[0] + 1
        while end < len(lines) and not _HEADER.match(lines[end]):
            end += 1
        kept = "".join(lines[: starts[0]] + lines[end:]).rstrip("\n")
        kept += "\n" if kept else ""
        if _same(kept, wanted):
            return kept, wanted
    raise CatalogueError(f"{file} says '{name}' in a way that cannot be changed here; edit it.")


def _read(file: Path) -> tuple[str, dict[str, Any]]:
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


def _write(file: Path, text: str, wanted: dict[str, Any]) -> None:
    if not _same(text, wanted):
        raise CatalogueError(f"{file} cannot be changed here without other changes; edit it.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file.resolve(), text.encode())  # what a link leads to, and not the link
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {error.strerror}.") from error


def _same(text: str, wanted: dict[str, Any]) -> bool:
    """Whether a file with this text says that and no more; a table of no pairs is none."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return {"pairs": {}, **found} == {"pairs": {}, **wanted}


def _key(name: str) -> str:
    return f'"{name}"' if "." in name else name


def _toml(value: object) -> str:
    try:
        return literals.toml(value)
    except ValueError:
        raise InvalidRequest("A value must be text; this is not UTF-8.") from None
