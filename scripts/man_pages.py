"""What hatchling runs when it builds a wheel: a man page of each command goes into share/man/man1."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManPages(BuildHookInterface[Any]):
    """The text is that of `--help`, so the package is imported from the sources that are built."""

    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        import click

        from localspec.cli.app import app
        from localspec.cli.commands.help import pages

        self._folder = tempfile.TemporaryDirectory(prefix="localspec-man-")
        for name, text in pages(click.Context(app, info_name="localspec")):
            file = Path(self._folder.name, name)
            file.write_text(text, encoding="utf-8")
            build_data["shared_data"][str(file)] = f"share/man/man1/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        del version, build_data, artifact_path
        if self._folder:
            self._folder.cleanup()
