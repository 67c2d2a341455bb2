"""Ollama's models: files named by their hash, which its manifests give names.

manifests/HOST/OWNER/MODEL/TAG is JSON that says which of blobs/sha256-… is the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from localspec.paths import read_file

_MANIFEST_LIMIT = 1 << 20
_MODEL = "application/vnd.ollama.image.model"
_HOST = "registry.ollama.ai"
# Where its services keep them on Linux: its own installer's user, and Arch Linux's.
_SERVICES = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models")


@dataclass(frozen=True, slots=True)
class Tagged:
    """A manifest: the name as Ollama shows it; no `file`, and why, where it cannot be made out."""

    name: str
    file: Path | None
    problem: str = ""


def homes(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The folders where Ollama may keep its models; the one that is set comes first."""
    own = environ.get("OLLAMA_MODELS")
    usual = Path(environ.get("HOME") or Path.home(), ".ollama", "models")
    return (*([Path(own).expanduser()] if own else []), usual, *map(Path, _SERVICES))


def tagged(home: Path) -> Iterator[Tagged]:
    """Every model of one such folder."""
    manifests = home / "manifests"
    for place, folders, files in os.walk(manifests):
        folders.sort()
        for file in sorted(files):
            if not file.startswith("."):
                yield _read(home, Path(place, file))


def named(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file of the model that Ollama calls `name`; without a tag the latest is meant."""
    wanted = _short(name if ":" in name.rpartition("/")[2] else f"{name}:latest").lower()
    for home in homes(environ):
        for each in tagged(home):
            if each.file and each.name.lower() == wanted:
                return each.file
    return None


def _short(name: str) -> str:
    """As Ollama shows it: without its own host, and without its library's name."""
    name = name.removeprefix(f"{_HOST}/").removeprefix("library/")
    host, slash, rest = name.partition("/")
    return f"hf.co/{rest}" if slash and host == "huggingface.co" else name


def _read(home: Path, manifest: Path) -> Tagged:
    model = manifest.parent.relative_to(home / "manifests").as_posix()
    name = _short(f"{model}:{manifest.name}")
    try:
        if manifest.stat().st_size > _MANIFEST_LIMIT:
            return Tagged(name, None, "its manifest is too large")
        layers = json.loads(read_file(manifest))["layers"]
        digest = next(each["digest"] for each in layers if each["mediaType"] == _MODEL)
        kind, _, value = digest.partition(":")
        if not (kind.isalnum() and value.isalnum()):
            return Tagged(name, None, "its manifest cannot be read")
    except OSError as error:
        return Tagged(name, None, f"its manifest cannot be read ({error.strerror})")
    except StopIteration:
        return Tagged(name, None, "its manifest names no model")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Tagged(name, None, "its manifest cannot be read")
    for blob in (f"{kind}-{value}", f"{kind}:{value}"):  # as it was called before 2024
        if os.path.exists(home / "blobs" / blob):  # noqa: PTH110 - which raises where one may not look
            return Tagged(name, home / "blobs" / blob)
    return Tagged(name, None, f"its file is missing ({home / 'blobs' / f'{kind}-{value}'})")
