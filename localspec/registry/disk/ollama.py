"""The models of Ollama, whose files are named by their hashes.

The JSON file manifests/HOST/OWNER/MODEL/TAG states which of the files blobs/sha256-… is the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from localspec.paths import read_file

_MAX_MANIFEST_BYTES = 1 << 20
_MODEL_MEDIA_TYPE = "application/vnd.ollama.image.model"
_HOST = "registry.ollama.ai"
# The folders of its system services on Linux: of its own installer, and of Arch Linux.
_SERVICE_FOLDERS = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models")


@dataclass(frozen=True, slots=True)
class Tagged:
    """A model with a manifest, and its name as Ollama shows it. Either `file` or `problem` is set."""

    name: str
    file: Path | None
    problem: str = ""


def homes(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the folders where Ollama may keep its models; the one set by the user comes first."""
    configured = environ.get("OLLAMA_MODELS")
    usual = Path(environ.get("HOME") or Path.home(), ".ollama", "models")
    return (
        *([Path(configured).expanduser()] if configured else []),
        usual,
        *map(Path, _SERVICE_FOLDERS),
    )


def tagged(home: Path) -> Iterator[Tagged]:
    """Yield every model in one of these folders."""
    manifests = home / "manifests"
    for folder, folders, files in os.walk(manifests):
        folders.sort()
        for file in sorted(files):
            if not file.startswith("."):
                yield _read_manifest(home, Path(folder, file))


def named(name: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the model that Ollama calls `name`. A name without a tag means the latest."""
    query = _shorten_name(name if ":" in name.rpartition("/")[2] else f"{name}:latest").lower()
    for home in homes(environ):
        for model in tagged(home):
            if model.file and model.name.lower() == query:
                return model.file
    return None


def _shorten_name(name: str) -> str:
    """Return a name as Ollama shows it, without its own host and library name."""
    name = name.removeprefix(f"{_HOST}/").removeprefix("library/")
    host, slash, path = name.partition("/")
    return f"hf.co/{path}" if slash and host == "huggingface.co" else name


def _read_manifest(home: Path, manifest: Path) -> Tagged:
    model = manifest.parent.relative_to(home / "manifests").as_posix()
    name = _shorten_name(f"{model}:{manifest.name}")
    try:
        if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
            return Tagged(name, None, "its manifest is too large")
        layers = json.loads(read_file(manifest))["layers"]
        digest = next(
            layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_MEDIA_TYPE
        )
        kind, _, value = digest.partition(":")
        if not (kind.isalnum() and value.isalnum()):
            return Tagged(name, None, "its manifest cannot be read")
    except OSError as error:
        return Tagged(name, None, f"its manifest cannot be read ({error.strerror})")
    except StopIteration:
        return Tagged(name, None, "its manifest names no model")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Tagged(name, None, "its manifest cannot be read")
    for blob in (f"{kind}-{value}", f"{kind}:{value}"):  # the second form is older than 2024
        if os.path.exists(home / "blobs" / blob):  # noqa: PTH110 - Path.exists may raise
            return Tagged(name, home / "blobs" / blob)
    return Tagged(name, None, f"its file is missing ({home / 'blobs' / f'{kind}-{value}'})")
