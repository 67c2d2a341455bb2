"""The folders in which other programs keep models, and the names of the files there.

The folders are found in the same way as these programs find them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from localspec.paths import hf_cache

HUB = "Hugging Face cache"
LLAMA = "llama.cpp"
_MAX_SETTINGS_BYTES = 1 << 20
# File names that many repositories use, so the folder's name is shown instead.
_GENERIC_NAME = re.compile(r"(model|ggml-model.*)\.gguf", re.IGNORECASE)
_FLAT_NAME = re.compile(r"[^_]+_.+?-GGUF_(?P<file>.+\.gguf)", re.IGNORECASE)
_GPT4ALL_PATH = re.compile(r"^modelPath=(?P<path>.+)$", re.MULTILINE)
_JAN_PATH = re.compile(r"^model_path:\s*[\"']?(?P<path>.+?)[\"']?\s*$", re.MULTILINE)


def folders(
    environ: Mapping[str, str] = os.environ, platform: str = sys.platform
) -> Iterator[tuple[str, Path]]:
    """Yield (program, folder) for all programs that keep GGUF files under their names.

    Ollama does not; see ollama.py.
    """
    home = Path(environ.get("HOME") or Path.home())
    support = home / "Library" / "Application Support"
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    is_mac = platform == "darwin"
    yield HUB, hf_cache(environ)
    configured = environ.get("LLAMA_CACHE")
    if configured:
        yield LLAMA, Path(configured).expanduser()
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


def elsewhere(model_yml: Path) -> Path | None:
    """Return the model of Jan that lies outside Jan's folder, according to its model.yml."""
    match = _JAN_PATH.search(_read_text(model_yml))
    path = Path(match["path"]) if match else None
    return path if path and path.is_absolute() else None


def name_of(path: Path, root: Path, origin: str) -> str:
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
            yield Path(folder).expanduser()
        yield base / "models"


def _jan_folders(home: Path, bases: tuple[Path, ...]) -> Iterator[Path]:
    configured = [_read_setting(folder / "settings.json", "data_folder") for folder in bases]
    data = [Path(folder) for folder in configured if folder] + [folder / "data" for folder in bases]
    for folder in [*data, home / "jan"]:
        yield folder / "llamacpp" / "models"
        yield folder / "models"


def _read_setting(settings: Path, key: str) -> str:
    """Return a path from a program's settings, or "" if there is none."""
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
