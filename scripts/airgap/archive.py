"""Archives that are the same byte for byte whenever they are made of the same files."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

# The oldest time a zip file can name.
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(folder: Path) -> str:
    """One line per file below, as `sha256sum --check` reads it."""
    lines = [f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in files_below(folder)]
    return "".join(lines)


def files_below(folder: Path) -> Iterator[Path]:
    """Every file, in one order on every machine."""
    yield from sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def pack(folder: Path, archive: IO[bytes], modified: int, name: str) -> None:
    """Write `folder` as a tar, below `name`; `modified` (Unix time) stands for every file's own."""

    def neutral(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = modified
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with tarfile.open(fileobj=archive, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in files_below(folder):
            inside = f"{name}/{path.relative_to(folder)}"
            tar.add(path, inside, recursive=False, filter=neutral)


def trim_sdist(sdist: Path, trimmed: Path, keep: Callable[[str], bool]) -> None:
    """Copy a .tar.gz without the entries that `keep` refuses.

    It is asked for each path below the archive's one folder.
    """
    with (
        tarfile.open(sdist) as old,
        trimmed.open("wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as new,
    ):
        for entry in old:
            if entry.isfile() and keep(entry.name.partition("/")[2]):
                new.addfile(entry, old.extractfile(entry))
            elif entry.issym() and keep(entry.name.partition("/")[2]):
                new.addfile(entry)


def unpack_wheel(wheel: Path) -> None:
    """Store the wheel's files uncompressed: the archive around it packs them a third better.

    pip checks the files, which stay the same, by the hashes in the wheel's own RECORD.
    """
    stored = wheel.with_suffix(".stored")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(stored, "w") as new:
        for entry in old.infolist():
            same = zipfile.ZipInfo(entry.filename, ZIP_EPOCH)
            same.external_attr = entry.external_attr
            new.writestr(same, old.read(entry), zipfile.ZIP_STORED)
    stored.replace(wheel)
