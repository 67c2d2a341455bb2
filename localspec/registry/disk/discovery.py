"""Models that are already on this disk, wherever other programs put them."""

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

# A disk with a million files is walked through in less; a share on the network may take for ever.
PATIENCE_S = 60.0
# Of two files of one size so many pieces are compared; to hash them would take minutes.
_PIECES, _PIECE = 16, 64 << 10
_NO_MODELS = frozenset({"/proc", "/sys", "/dev"})


@dataclass(frozen=True, slots=True)
class Found:
    """A model file (the first part of a sharded one), what to call it, and who put it there; `pair`: the
    pair here that it is of.
    """

    path: Path
    name: str
    origin: str
    pair: str = ""


def find_models(
    store: Store, folders: Iterable[Path] = (), environ: Mapping[str, str] = os.environ
) -> list[Found]:
    """Every GGUF model on this disk in the places we know and in `folders`, each once."""
    return Search(store, folders, environ).models


@dataclass
class Search:
    """One look at this disk: `models`, each once, and in `problems` a sentence for each place that
    could not be looked into. `told` is called with the folder that is being read; after `patience`
    seconds the search ends where it is.
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
        self._walked: set[tuple[int, int]] = set()
        self._files: dict[tuple[int, int] | Path, Found] = {}
        self._sizes: dict[int, list[Path]] = {}
        for found in self._everywhere():
            key = _identity(found.path)
            known = self._files.get(key)
            if known is None:
                if not self._is_copy(found.path):
                    self.models.append(found)
                self._files[key] = found
            elif known.name.startswith("sha256-") and known in self.models:
                # A pair's file that is Ollama's: it has a name there.
                self.models[self.models.index(known)] = replace(known, name=found.name)

    def _is_copy(self, path: Path) -> bool:
        """Whether a model of this size, and with the same bytes wherever one looks, was found already."""
        try:
            size = path.stat().st_size
        except OSError:
            return False
        others = self._sizes.setdefault(size, [])
        copy = bool(others) and any(_sample(path, size) == _sample(each, size) for each in others)
        others.append(path)
        return copy

    def _everywhere(self) -> Iterator[Found]:
        for record in self.store.listing().records:
            for model in record.models:
                path = self.store.part_path(model.parts[0])
                yield Found(path, model.file, f"pair {record.name}", record.name)
        for origin, folder in programs.folders(self.environ):
            yield from self._in_folder(folder, origin)
        for home in ollama.homes(self.environ):
            yield from self._in_ollama(home)
        for folder in self.folders:
            yield from self._in_folder(folder, str(folder), named=True)

    def _in_folder(self, root: Path, origin: str, *, named: bool = False) -> Iterator[Found]:
        def failed(error: OSError) -> None:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR) or named:
                self.problems.append(f"{error.filename} cannot be read: {error.strerror}.")

        if named and root.is_file():
            yield Found(root, root.name, str(root.parent))
            return
        for place, folders, files in os.walk(root, onerror=failed, followlinks=True):
            here = Path(place)
            if self._is_late(here):
                return
            if named and {"manifests", "blobs"} <= {*folders}:
                yield from self._in_ollama(here)
                folders[:] = [each for each in folders if each not in ("manifests", "blobs")]
            if origin == programs.HUB and here == root:  # data sets have a million files
                folders[:] = [each for each in folders if each.startswith("models--")]
            folders[:] = sorted(each for each in folders if self._is_new(here / each))
            for file in sorted(files):
                path = here / file
                if file.lower().endswith(".gguf") and _is_first_part(file):
                    yield Found(path, programs.name_of(path, root, origin), origin)
                elif file == "model.yml" and (other := programs.elsewhere(path)):
                    yield Found(other, here.name, origin)

    def _is_new(self, folder: Path) -> bool:
        """Whether it was not walked through: links lead in circles, and folders named lie in others."""
        if str(folder) in _NO_MODELS:
            return False
        try:
            info = folder.stat()
        except OSError:
            return False
        key = (info.st_dev, info.st_ino)
        if key in self._walked:
            return False
        self._walked.add(key)
        return True

    def _is_late(self, here: Path) -> bool:
        self.told(here)
        if time.monotonic() < self._end:
            return False
        if not self._stopped:
            self.problems.append(f"The search was stopped after {self.patience:.0f} s, in {here}.")
        self._stopped = True
        return True

    def _in_ollama(self, home: Path) -> Iterator[Found]:
        """Ollama names its files by hash; its manifests say which of them are models."""
        if self._is_late(home):
            return
        try:
            if not (home / "manifests").is_dir():
                return
        except OSError as error:
            self.problems.append(f"{home} cannot be read: {error.strerror}.")
            return
        for each in ollama.tagged(home):
            if each.file:
                yield Found(each.file, each.name, "Ollama")
            else:
                self.problems.append(f"{each.name} (Ollama) cannot be used: {each.problem}.")


def _identity(path: Path) -> tuple[int, int] | Path:
    """The same for all names of one file."""
    try:
        info = path.stat()
    except OSError:  # a link that leads nowhere: whoever reads it says so
        return path
    return info.st_dev, info.st_ino


def _sample(path: Path, size: int) -> list[bytes] | Path:
    """Pieces of a file: its header and some of its weights, which no two models share."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return path
        with path.open("rb", buffering=0) as file:
            return [os.pread(file.fileno(), _PIECE, size * at // _PIECES) for at in range(_PIECES)]
    except OSError:
        return path


def _is_first_part(name: str) -> bool:
    """Not a later part of a sharded model, and not the image half of one."""
    try:
        return shard_names(name)[0] == name and "mmproj" not in name.lower()
    except BadGguf:
        return False
