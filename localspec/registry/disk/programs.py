"""Where other programs keep models, found as these programs find their folders, and the names of files."""

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
_SETTINGS_LIMIT = 1 << 20
# Files of every repository are called this, so they go by the folder they are in.
_NAMELESS = re.compile(r"(model|ggml-model.*)\.gguf", re.IGNORECASE)
_FLAT = re.compile(r"[^_]+_.+?-GGUF_(?P<file>.+\.gguf)", re.IGNORECASE)
_GPT4ALL_PATH = re.compile(r"^modelPath=(?P<path>.+)$", re.MULTILINE)
_JAN_PATH = re.compile(r"^model_path:\s*[\"']?(?P<path>.+?)[\"']?\s*$", re.MULTILINE)


def folders(
    environ: Mapping[str, str] = os.environ, platform: str = sys.platform
) -> Iterator[tuple[str, Path]]:
    """(program, folder) for all that keep GGUF files under names; Ollama does not (ollama.py)."""
    home = Path(environ.get("HOME") or Path.home())
    support = home / "Library" / "Application Support"
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    mac = platform == "darwin"
    yield HUB, hf_cache(environ)
    own = environ.get("LLAMA_CACHE")
    if own:
        yield LLAMA, Path(own).expanduser()
    yield LLAMA, (home / "Library" / "Caches" if mac else cache) / "llama.cpp"
    yield from (("LM Studio", each) for each in _lm_studio(home))
    jan = (support / "Jan",) if mac else (data / "Jan", config / "Jan")
    yield from (("Jan", each) for each in _jan(home, jan))
    nomic = (support,) if mac else (data, home / ".cache")
    settings = config / "nomic.ai" / "GPT4All.ini"
    if stated := _GPT4ALL_PATH.search(_text(settings)):
        yield "GPT4All", Path(stated["path"].strip())
    yield from (("GPT4All", each / "nomic.ai" / "GPT4All") for each in nomic)
    yield "GPT4All", home / ".cache" / "gpt4all"  # its Python package


def elsewhere(model_yml: Path) -> Path | None:
    """The model of Jan that lies outside its own folder: its model.yml says where."""
    stated = _JAN_PATH.search(_text(model_yml))
    path = Path(stated["path"]) if stated else None
    return path if path and path.is_absolute() else None


def name_of(path: Path, root: Path, origin: str) -> str:
    """What to call a file: its own name, or the model's where the file's says nothing."""
    folder = path.parent
    if _NAMELESS.fullmatch(path.name):
        for each in path.parents:
            if each.name.startswith("models--"):  # of the hub, OWNER--NAME
                return each.name.rpartition("--")[2]
        return path.name if folder == root else folder.name
    if origin == LLAMA and folder == root:
        return _flat_name(path)
    return path.name


def _flat_name(path: Path) -> str:
    """Of llama.cpp's OWNER_REPOSITORY_FILE, as it named them before it took the hub's own layout."""
    for manifest in path.parent.glob("manifest=*.json"):
        owner, _, rest = manifest.name.removeprefix("manifest=").partition("=")
        prefix = f"{owner}_{rest.partition('=')[0]}_"
        if path.name.startswith(prefix):
            return path.name.removeprefix(prefix)
    flat = _FLAT.fullmatch(path.name)
    return flat["file"] if flat else path.name


def _lm_studio(home: Path) -> Iterator[Path]:
    pointed = _text(home / ".lmstudio-home-pointer").strip()
    own = [Path(pointed)] if pointed.startswith("/") else []
    for each in dict.fromkeys([*own, home / ".lmstudio", home / ".cache" / "lm-studio"]):
        if stated := _stated(each / "settings.json", "downloadsFolder"):
            yield Path(stated).expanduser()
        yield each / "models"


def _jan(home: Path, places: tuple[Path, ...]) -> Iterator[Path]:
    stated = [_stated(each / "settings.json", "data_folder") for each in places]
    data = [Path(each) for each in stated if each] + [each / "data" for each in places]
    for each in [*data, home / "jan"]:
        yield each / "llamacpp" / "models"
        yield each / "models"


def _stated(settings: Path, key: str) -> str:
    """A path in a program's settings; "" where there is none."""
    try:
        found = json.loads(_text(settings) or "{}").get(key)
    except (ValueError, AttributeError, RecursionError):
        return ""
    return found if isinstance(found, str) and found.startswith(("/", "~")) else ""


def _text(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _SETTINGS_LIMIT:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
