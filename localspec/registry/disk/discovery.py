"""Find the models that are already on this disk, wherever other programs put them."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from localspec.errors import BadGguf
from localspec.paths import expand_user, hf_cache_folder, read_file
from localspec.registry.header.model import shard_names
from localspec.registry.store.store import Store

# Ollama names files by their hashes. The JSON file manifests/HOST/OWNER/MODEL/TAG states what each of the
# files blobs/sha256-… is: the model, a projector, a LoRA adapter, a template, …
_MAX_MANIFEST_BYTES = 1 << 20
_MEDIA_TYPE_PREFIX = "application/vnd.ollama.image."
# Layers that change answers and that localspec does not use, as a sentence names them.
_UNUSED_LAYERS = {
    "template": "template", "prompt": "template", "system": "system prompt", "params": "parameters",
    "messages": "messages",
}  # fmt: skip
_ADAPTER_PROBLEM = (
    "it is a base model with a LoRA adapter, which is not applied here; merge the adapter into the base "
    "model (llama.cpp's llama-export-lora), or add the base model"
)
_HOST = "registry.ollama.ai"
# The folders of its system services on Linux: of its own installer, and of Arch Linux.
_SERVICE_FOLDERS = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models")


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model with a manifest, and its name as Ollama shows it. Either `file` or `problem` is set.

    projectors: the files by which it reads pictures. unused: what else in the manifest changes answers.
    """

    name: str
    file: Path | None
    problem: str = ""
    projectors: tuple[Path, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def has_adapter(self) -> bool:
        """Whether its weights are those of `file` with a LoRA adapter, so that it cannot be used."""
        return self.problem == _ADAPTER_PROBLEM


def model_folders(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the folders where Ollama may keep its models; the one set by the user comes first."""
    configured = environ.get("OLLAMA_MODELS")
    usual = Path(environ.get("HOME") or Path.home(), ".ollama", "models")
    return (*([expand_user(configured)] if configured else []), usual, *map(Path, _SERVICE_FOLDERS))


def list_models(home: Path) -> Iterator[OllamaModel]:
    """Yield every model in one of these folders."""
    manifests = home / "manifests"
    for folder, folders, files in os.walk(manifests):
        folders.sort()
        for file in sorted(files):
            if not file.startswith("."):
                yield _read_manifest(home, Path(folder, file))


def find_model(name: str, environ: Mapping[str, str] = os.environ) -> OllamaModel | None:
    """Return the model that Ollama calls `name`, with a file or an adapter; without a tag, the latest."""
    query = _shorten_name(name if ":" in name.rpartition("/")[2] else f"{name}:latest").lower()
    for home in model_folders(environ):
        for model in list_models(home):
            if (model.file or model.has_adapter) and model.name.lower() == query:
                return model
    return None


def _shorten_name(name: str) -> str:
    """Return a name as Ollama shows it, without its own host and library name."""
    name = name.removeprefix(f"{_HOST}/").removeprefix("library/")
    host, slash, path = name.partition("/")
    return f"hf.co/{path}" if slash and host == "huggingface.co" else name


def _read_manifest(home: Path, manifest: Path) -> OllamaModel:
    model = manifest.parent.relative_to(home / "manifests").as_posix()
    name = _shorten_name(f"{model}:{manifest.name}")
    layers: dict[str, list[Path]] = {}
    try:
        if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
            return OllamaModel(name, None, "its manifest is too large")
        for layer in json.loads(read_file(manifest))["layers"]:
            paths = layers.setdefault(layer["mediaType"].removeprefix(_MEDIA_TYPE_PREFIX), [])
            kind, _, value = layer["digest"].partition(":")
            if kind.isalnum() and value.isalnum():
                # Before 2024 there was a colon in the name of a layer.
                older = home / "blobs" / f"{kind}:{value}"
                is_older = os.path.exists(older)  # noqa: PTH110 - Path.exists may raise
                paths.append(older if is_older else home / "blobs" / f"{kind}-{value}")
            elif paths is layers.get("model") or paths is layers.get("projector"):
                return OllamaModel(name, None, "its manifest cannot be read")
    except OSError as error:
        return OllamaModel(name, None, f"its manifest cannot be read ({error.strerror})")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return OllamaModel(name, None, "its manifest cannot be read")
    files, projectors = layers.get("model", []), layers.get("projector", [])
    if not files:
        return OllamaModel(name, None, "its manifest names no model")
    if "adapter" in layers:
        return OllamaModel(name, None, _ADAPTER_PROBLEM)
    if len(files) > 1:
        return OllamaModel(name, None, f"it consists of {len(files)} files, which must be merged")
    for file in (*files, *projectors):
        if not os.path.exists(file):  # noqa: PTH110 - Path.exists may raise
            return OllamaModel(name, None, f"its file is missing ({file})")
    unused = dict.fromkeys(words for kind, words in _UNUSED_LAYERS.items() if kind in layers)
    return OllamaModel(name, files[0], projectors=tuple(projectors), unused=tuple(unused))


# The folders of other programs are found in the same way as these programs find them.
HUB = "Hugging Face cache"
LLAMA = "llama.cpp"
_MAX_SETTINGS_BYTES = 1 << 20
# File names that many repositories use, so the folder's name is shown instead.
_GENERIC_NAME = re.compile(r"(model|ggml-model.*)\.gguf", re.IGNORECASE)
_FLAT_NAME = re.compile(r"[^_]+_.+?-GGUF_(?P<file>.+\.gguf)", re.IGNORECASE)
_GPT4ALL_PATH = re.compile(r"^modelPath=(?P<path>.+)$", re.MULTILINE)
_JAN_PATH = re.compile(r"^model_path:\s*[\"']?(?P<path>.+?)[\"']?\s*$", re.MULTILINE)


def program_folders(
    environ: Mapping[str, str] = os.environ, platform: str = sys.platform
) -> Iterator[tuple[str, Path]]:
    """Yield (program, folder) for all programs that keep GGUF files under their names.

    Ollama does not; see `list_models`.
    """
    home = Path(environ.get("HOME") or Path.home())
    support = home / "Library" / "Application Support"
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    is_mac = platform == "darwin"
    yield HUB, hf_cache_folder(environ)
    configured = environ.get("LLAMA_CACHE")
    if configured:
        yield LLAMA, expand_user(configured)
    yield LLAMA, (home / "Library" / "Caches" if is_mac else cache) / "llama.cpp"
    yield from (("LM Studio", folder) for folder in _lm_studio_folders(home))
    jan_bases = (support / "Jan",) if is_mac else (data / "Jan", config / "Jan")
    yield from (("Jan", folder) for folder in _jan_folders(home, jan_bases))
    bases = (support,) if is_mac else (data, home / ".cache")
    settings = config / "nomic.ai" / "GPT4All.ini"
    if match := _GPT4ALL_PATH.search(_read_text(settings)):
        yield "GPT4All", Path(match["path"].strip())
    yield from (("GPT4All", folder / "nomic.ai" / "GPT4All") for folder in bases)
    yield "GPT4All", home / ".cache" / "gpt4all"  # its Python package


def jan_model_path(model_yml: Path) -> Path | None:
    """Return the model of Jan that lies outside Jan's folder, according to its model.yml."""
    match = _JAN_PATH.search(_read_text(model_yml))
    path = Path(match["path"]) if match else None
    return path if path and path.is_absolute() else None


def name_model_file(path: Path, root: Path, origin: str) -> str:
    """Return the name to show for a file: its own, or the model's if the file name is generic."""
    folder = path.parent
    if _GENERIC_NAME.fullmatch(path.name):
        for parent in path.parents:
            if parent.name.startswith("models--"):  # the hub's cache: models--OWNER--NAME
                return parent.name.rpartition("--")[2]
        return path.name if folder == root else folder.name
    if origin == LLAMA and folder == root:
        return _strip_flat_prefix(path)
    return path.name


def _strip_flat_prefix(path: Path) -> str:
    """Return the original file name of a llama.cpp download.

    Older versions of llama.cpp stored files as OWNER_REPOSITORY_FILE, newer ones use the hub's layout.
    """
    for manifest in path.parent.glob("manifest=*.json"):
        owner, _, location = manifest.name.removeprefix("manifest=").partition("=")
        prefix = f"{owner}_{location.partition('=')[0]}_"
        if path.name.startswith(prefix):
            return path.name.removeprefix(prefix)
    match = _FLAT_NAME.fullmatch(path.name)
    return match["file"] if match else path.name


def _lm_studio_folders(home: Path) -> Iterator[Path]:
    pointer = _read_text(home / ".lmstudio-home-pointer").strip()
    pointed_homes = [Path(pointer)] if pointer.startswith("/") else []
    for base in dict.fromkeys([*pointed_homes, home / ".lmstudio", home / ".cache" / "lm-studio"]):
        if folder := _read_setting(base / "settings.json", "downloadsFolder"):
            yield expand_user(folder)
        yield base / "models"


def _jan_folders(home: Path, bases: tuple[Path, ...]) -> Iterator[Path]:
    configured = [_read_setting(folder / "settings.json", "data_folder") for folder in bases]
    data = [Path(folder) for folder in configured if folder] + [folder / "data" for folder in bases]
    for folder in [*data, home / "jan"]:
        yield folder / "llamacpp" / "models"
        yield folder / "models"


def _read_setting(settings: Path, key: str) -> str:
    try:
        value = json.loads(_read_text(settings) or "{}").get(key)
    except (ValueError, AttributeError, RecursionError):
        return ""
    return value if isinstance(value, str) and value.startswith(("/", "~")) else ""


def _read_text(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_SETTINGS_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# A search of a disk with a million files takes less. A network share may take for ever.
MAX_SEARCH_S = 60.0
# Two files of the same size are compared by this many samples, since hashing them would take minutes.
_SAMPLES, _SAMPLE_BYTES = 16, 64 << 10
_SKIPPED_FOLDERS = frozenset({"/proc", "/sys", "/dev"})


@dataclass(frozen=True, slots=True)
class FoundModel:
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
) -> list[FoundModel]:
    """Return every GGUF model in the known folders and in `folders`, each once."""
    return DiskSearch(store, folders, environ).models


@dataclass
class DiskSearch:
    """One search of this disk.

    models: every model, each once. problems: a sentence for each folder that could not be searched. told:
    called with each folder before it is read. patience: the search ends after this many seconds.
    """

    store: Store
    folders: Iterable[Path] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    told: Callable[[Path], None] = lambda _: None
    patience: float = MAX_SEARCH_S
    models: list[FoundModel] = field(default_factory=list, init=False)
    problems: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.patience
        self._stopped = False
        self._visited: set[tuple[int, int]] = set()
        self._files: dict[tuple[int, int] | Path, FoundModel] = {}
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

    def _find_all(self) -> Iterator[FoundModel]:
        for record in self.store.listing().records:
            for model in record.models:
                path = self.store.part_path(model.parts[0])
                yield FoundModel(path, model.file, f"pair {record.name}", record.name)
        for origin, folder in program_folders(self.environ):
            yield from self._search_folder(folder, origin)
        for home in model_folders(self.environ):
            yield from self._search_ollama(home)
        for folder in self.folders:
            yield from self._search_folder(folder, str(folder), named=True)

    def _search_folder(
        self, root: Path, origin: str, *, named: bool = False
    ) -> Iterator[FoundModel]:
        """Yield the models in a folder and its subfolders. `named`: the user named this folder."""

        def report_error(error: OSError) -> None:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR) or named:
                self.problems.append(f"{error.filename} cannot be read: {error.strerror}.")

        if named and root.is_file():
            yield FoundModel(root, root.name, str(root.parent))
            return
        for current, folders, files in os.walk(root, onerror=report_error, followlinks=True):
            folder = Path(current)
            if self._report_folder(folder):
                return
            if named and {"manifests", "blobs"} <= {*folders}:
                yield from self._search_ollama(folder)
                folders[:] = [name for name in folders if name not in ("manifests", "blobs")]
            # Skip data sets, which may have a million files.
            if origin == HUB and folder == root:
                folders[:] = [name for name in folders if name.startswith("models--")]
            folders[:] = sorted(name for name in folders if self._mark_visited(folder / name))
            for file in sorted(files):
                path = folder / file
                if file.lower().endswith(".gguf") and _is_first_part(file):
                    yield FoundModel(path, name_model_file(path, root, origin), origin)
                elif file == "model.yml" and (linked := jan_model_path(path)):
                    yield FoundModel(linked, folder.name, origin)

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

    def _search_ollama(self, home: Path) -> Iterator[FoundModel]:
        """Yield Ollama's models. It names files by hash, and its manifests list the models."""
        if self._report_folder(home):
            return
        try:
            if not (home / "manifests").is_dir():
                return
        except OSError as error:
            self.problems.append(f"{home} cannot be read: {error.strerror}.")
            return
        for model in list_models(home):
            if model.file:
                yield FoundModel(model.file, model.name, "Ollama")
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
