"""Read ranges of the file that contains a header: a local file, or any other source."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from localspec.errors import BadGguf


class Source(Protocol):
    """An object with a name and a size that returns byte ranges."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`; fewer only if the file turns out to be shorter."""
        ...


class FileSource:
    """A local file. Symbolic links are followed, since the Hugging Face cache consists of them."""

    def __init__(self, path: Path) -> None:
        """Check the file.

        Raises:
            BadGguf: it is not a regular file, or cannot be read.
        """
        self.path = path
        self.name = path.name
        try:
            info = path.stat()
        except OSError as error:
            raise BadGguf(f"Cannot read {path}: {error.strerror}.") from error
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would block
            raise BadGguf(f"{path} is not a file.")
        self.size = info.st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset`.

        Raises:
            BadGguf: they cannot be read.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise BadGguf(f"Cannot read {self.path}: {error.strerror}.") from error
