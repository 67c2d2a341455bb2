"""A home whose daemon pulls from a hub on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.synthetic import write_pair
from tests.support.daemons import Home, temporary_home
from tests.support.hub import TestHub

CATALOGUE = """\
[pairs.tiny]
summary = "two small models"
aliases = ["little"]
licence = "MIT"
[pairs.tiny.target]
repo = "own/target"
file = "target.gguf"
[pairs.tiny.draft]
repo = "own/draft"
file = "draft.gguf"
"""


class PullingHome(Home):
    """A home with a hub; the hub offers `files` under the names of the catalogue's pair `tiny`."""

    def __init__(self, home: Home, hub: TestHub, files: tuple[Path, Path]) -> None:
        super().__init__(home.root)
        self.daemons = home.daemons
        self.hub = hub
        self.files = files
        self.store = self.root / "data" / "models"
        self.catalogue = self.root / "config" / "models.toml"
        self.catalogue.parent.mkdir()
        self.catalogue.write_text(CATALOGUE)
        for name in list(self.environment):
            if name.startswith("HF_") or name.lower().endswith("_proxy"):
                del self.environment[name]
        self.environment["HF_ENDPOINT"] = hub.endpoint
        self.environment["HF_HOME"] = str(self.root / "hf")
        self.environment["HOME"] = str(self.root)  # no models of this machine's user
        for role, file in zip(("target", "draft"), files, strict=True):
            hub.add(f"own/{role}", f"{role}.gguf", file.read_bytes())


@contextlib.contextmanager
def pulling_home(folder: Path) -> Iterator[PullingHome]:
    """Yield a home, a hub that serves, and a tiny matched pair on it (written to `folder`)."""
    files = write_pair(folder)
    with TestHub().running() as hub, temporary_home() as home:
        yield PullingHome(home, hub, files)
