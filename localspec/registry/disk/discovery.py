"""Find the models that are already on this disk, wherever other programs put them."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from localspec.errors import BadGguf
from localspec.registry.disk import ollama, programs
from localspec.registry.header.model import shard_names
from localspec.registry.store.store import Store

# A search of a disk with a million files takes less. A network share may take for ever.
PATIENCE_S = 60.0
# Two files of the same size are compared by this many samples, since hashing them would take minutes.
_SAMPLES, _SAMPLE_BYTES = 16, 64 << 10
_SKIPPED_FOLDERS = frozenset({"/proc", "/sys", "/dev"})


@dataclass(frozen=True, slots=True)
class Found:
    """A model file on this disk; of a sharded model, its first part.

    name: what to call it. origin: the program that put it there. pair: the installed pair that it belongs
    to, or "".
    """

    path: Path
    name: str
    origin: str
    pair: str = ""


def find_models(
    store: Store, folders: Iterable[Path] = (), environ: Mapping[str, str] = os.environ
) -> list[Found]:
    """Return every GGUF model in the known folders and in `folders`, each once."""
    return Search(store, folders, environ).models


@dataclass
class Search:
    """One search of this disk.

    models: every model, each once. problems: a sentence for each folder that could not be searched. told:
    called with each folder before it is read. patience: the search ends after this many seconds.
    """

    store: Store
    folders: Iterable[Path] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    told: Callable[[Path], None] = lambda _: None
    patience: float = PATIENCE_S
    models: list[Found] = field(default_factory=list, init=False)
    problems: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.patience
        self._stopped = False
        self._visited: set[tuple[int, int]] = set()
        self._files: dict[tuple[int, int] | Path, Found] = {}
        self._sizes: dict[int, list[Path]] = {}
        for model in self._find_all():
            key = _file_identity(model.path)
            known = self._files.get(key)
            if known is None:
                if not self._is_copy(model.path):
                    self.models.append(model)
                self._files[key] = model
            elif known.name.startswith("sha256-") and known in self.models:
                # The file of a pair lies in Ollama's folder, where it has a better name.
                self.models[self.models.index(known)] = replace(known, name=model.name)

    def _is_copy(self, path: Path) -> bool:
        """Return whether a model with the same size and the same samples was found already."""
        try:
            size = path.stat().st_size
        except OSError:
            return False
        same_size = self._sizes.setdefault(size, [])
        copy = bool(same_size) and any(
            _read_samples(path, size) == _read_samples(other, size) for other in same_size
        )
        same_size.append(path)
        return copy

    def _find_all(self) -> Iterator[Found]:
        """Yield the models of all folders, which may include duplicates."""
        for record in self.store.listing().records:
            for model in record.models:
                path = self.store.part_path(model.parts[0])
                yield Found(path, model.file, f"pair {record.name}", record.name)
        for origin, folder in programs.folders(self.environ):
            yield from self._search_folder(folder, origin)
        for home in ollama.homes(self.environ):
            yield from self._search_ollama(home)
        for folder in self.folders:
            yield from self._search_folder(folder, str(folder), named=True)

    def _search_folder(self, root: Path, origin: str, *, named: bool = False) -> Iterator[Found]:
        """Yield the models in a folder and its subfolders. `named`: the user named this folder."""

        def report_error(error: OSError) -> None:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR) or named:
                self.problems.append(f"{error.filename} cannot be read: {error.strerror}.")

        if named and root.is_file():
            yield Found(root, root.name, str(root.parent))
            return
        for current, folders, files in os.walk(root, onerror=report_error, followlinks=True):
            folder = Path(current)
            if self._report_folder(folder):
                return
            if named and {"manifests", "blobs"} <= {*folders}:
                yield from self._search_ollama(folder)
                folders[:] = [name for name in folders if name not in ("manifests", "blobs")]
            # Skip data sets, which may have a million files.
            if origin == programs.HUB and folder == root:
                folders[:] = [name for name in folders if name.startswith("models--")]
            folders[:] = sorted(name for name in folders if self._mark_visited(folder / name))
            for file in sorted(files):
                path = folder / file
                if file.lower().endswith(".gguf") and _is_first_part(file):
                    yield Found(path, programs.name_of(path, root, origin), origin)
                elif file == "model.yml" and (linked := programs.elsewhere(path)):
                    yield Found(linked, folder.name, origin)

    def _mark_visited(self, folder: Path) -> bool:
        """Return whether the folder is visited for the first time.

        Links may form circles, and a named folder may lie inside another one.
        """
        if str(folder) in _SKIPPED_FOLDERS:
            return False
        try:
            info = folder.stat()
        except OSError:
            return False
        key = (info.st_dev, info.st_ino)
        if key in self._visited:
            return False
        self._visited.add(key)
        return True

    def _report_folder(self, folder: Path) -> bool:
        """Report the folder that is being read; return whether the time is up."""
        self.told(folder)
        if time.monotonic() < self._end:
            return False
        if not self._stopped:
            self.problems.append(
                f"The search was stopped after {self.patience:.0f} s, in {folder}."
            )
        self._stopped = True
        return True

    def _search_ollama(self, home: Path) -> Iterator[Found]:
        """Yield Ollama's models. It names files by hash, and its manifests list the models."""
        if self._report_folder(home):
            return
        try:
            if not (home / "manifests").is_dir():
                return
        except OSError as error:
            self.problems.append(f"{home} cannot be read: {error.strerror}.")
            return
        for model in ollama.tagged(home):
            if model.file:
                yield Found(model.file, model.name, "Ollama")
            else:
                self.problems.append(f"{model.name} (Ollama) cannot be used: {model.problem}.")


def _file_identity(path: Path) -> tuple[int, int] | Path:
    """Return a key that is the same for all paths of one file."""
    try:
        info = path.stat()
    except OSError:  # a broken link, which is reported when it is read
        return path
    return info.st_dev, info.st_ino


def _read_samples(path: Path, size: int) -> list[bytes] | Path:
    """Return samples of a file, or its path if it cannot be read.

    They contain its header and some weights, which differ between any two models.
    """
    try:
        if not path.is_file():  # opening a pipe would block
            return path
        with path.open("rb", buffering=0) as file:
            return [
                os.pread(file.fileno(), _SAMPLE_BYTES, size * index // _SAMPLES)
                for index in range(_SAMPLES)
            ]
    except OSError:
        return path


def _is_first_part(name: str) -> bool:
    """Return whether the file is neither a later part of a sharded model nor an image projector."""
    try:
        return shard_names(name)[0] == name and "mmproj" not in name.lower()
    except BadGguf:
        return False
