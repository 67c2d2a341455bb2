"""Check what `localspec lsp` and `localspec acp` need before they start: a library, and an editor."""

from __future__ import annotations

import os
import stat
from importlib.util import find_spec
from typing import NamedTuple

from localspec import installation
from localspec.errors import UsageError


class _Server(NamedTuple):
    name: str
    package: str  # name for import
    library: str  # name for pip
    editor: str  # an editor whose settings show how the server is started


_SERVERS = {
    "lsp": _Server("language server", "pygls", "pygls", "helix"),
    "acp": _Server("agent", "acp", "agent-client-protocol", "zed"),
}


def missing_library(command: str) -> str:
    """Return what has to be installed first, as a sentence; "" if nothing has to be."""
    server = _SERVERS[command]
    if find_spec(server.package) is not None:
        return ""
    return (
        f"The {server.name} needs {server.library}, which is not installed; run: "
        f"{installation.install_extra_command(command)}"
    )


def require_server(command: str) -> None:
    """Check that a server can start.

    Raises UsageError if its library is missing, or it was not started by an editor.
    """
    if problem := missing_library(command):
        raise UsageError(problem)
    mode = os.fstat(0).st_mode
    if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
        server = _SERVERS[command]
        raise UsageError(
            f"The {server.name} is started by an editor, which talks to it through a pipe; for the editor's "
            f"settings: localspec editor config {server.editor}"
        )
