"""From a name to files. The one place that knows what a pair may be called."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from localspec.config import Config
from localspec.errors import ModelNotFound
from localspec.paths import Paths
from localspec.protocol.frames import PairFiles

BUILTIN = "builtin"
# Clients that must send some name send one of these.
CONFIGURED = ("", "default", "localspec")


def resolve(name: str, config: Config, paths: Paths) -> PairFiles:
    """The files of the pair `name`: "" for the configured one, "builtin", or absolute paths of
    "target.gguf" or "target.gguf,draft.gguf".

    Raises:
        ModelNotFound: nothing of that name, or a file of it is missing.
    """
    del paths  # the store of pulled pairs, once there is one
    name = config.pair if name in CONFIGURED or name == config.pair else name
    if name == BUILTIN:
        return _builtin()
    if name.endswith(".gguf"):
        return _from_files(name)
    known = " and ".join(f"'{pair}'" for pair in dict.fromkeys((config.pair, BUILTIN)))
    raise ModelNotFound(
        f"There is no pair '{name}'; there is {known}, and any file.gguf by its absolute path.",
        param="model",
    )


def _builtin() -> PairFiles:
    spec = importlib.util.find_spec("localspec")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "builtin"
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    if not target.is_file():
        raise ModelNotFound(f"The shipped pair is missing: no {target}.", param="model")
    return PairFiles(BUILTIN, str(target), str(draft) if draft.is_file() else None)


def _from_files(name: str) -> PairFiles:
    files = [Path(part).expanduser() for part in name.split(",")]
    if len(files) > 2 or not all(file.is_absolute() for file in files):
        raise ModelNotFound(
            f"'{name}' is neither an absolute path nor two with a comma, target and draft.",
            param="model",
        )
    for file in files:
        if not file.is_file():
            raise ModelNotFound(f"There is no file {file}.", param="model")
    return PairFiles(name, str(files[0]), str(files[1]) if len(files) == 2 else None)
