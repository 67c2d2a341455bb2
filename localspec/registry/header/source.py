"""Where a header is read from: a file here, or anything else that hands out ranges."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from localspec.errors import BadGguf


class Source(Protocol):
    """Something with a size that hands out byte ranges."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only when the file turns out shorter."""
        ...


class FileSource:
    """A local file. Symbolic links are followed: the Hugging Face cache is made of them."""

    def __init__(self, path: Path) -> None:
        """Raises BadGguf where it is no file that can be read."""
        self.path = path
        self.name = path.name
        try:
            info = path.stat()
        except OSError as error:
            raise BadGguf(f"Cannot read {path}: {error.strerror}.") from error
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
            raise BadGguf(f"{path} is not a file.")
        self.size = info.st_size

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`. Raises BadGguf where they cannot be read."""
        try:
            with self.path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise BadGguf(f"Cannot read {self.path}: {error.strerror}.") from error
