"""The optional parts of localspec: a folder each, which can be deleted with its tests.

The core never imports an extra. It reads the tables below, and imports what they name when it is used. An
entry whose folder is not there is skipped.
"""

from __future__ import annotations

import os
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

# Commands by the group of the help that lists them: name → (extra, function in its `commands`, summary).
COMMANDS = {
    "Ask": {
        "cmd": ("shell", "cmd_command", "Propose a shell command."),
        "commit": ("shell", "commit_command", "Write a commit message."),
        "explain": ("shell", "explain_command", "Explain a failed command or an error."),
        "complete": ("editors", "complete_command", "Complete code at a position in a file."),
    },
    "Daemon": {
        "service": ("service", "service_command", "Run the daemon as a user service."),
        "doctor": ("service", "doctor_command", "Diagnose problems."),
    },
    "Data": {
        "stats": ("stats", "command", "Show tokens, speed and time saved over days."),
        "bench": ("bench", "command", "Measure whether speculation pays, and for what."),
        "tune": ("tune", "command", "Train a pair's draft on what its target has answered."),
    },
    "Integrate": {
        "launch": ("launch", "launch_command", "Start Claude Code, Codex, opencode or pi."),
        "editor": ("editors", "editor_command", "Set up Vim, Neovim, VS Code or another editor."),
        "lsp": ("editors", "lsp_command", "Run a language server for an editor."),
        "acp": ("editors", "acp_command", "Run a chat for an editor's agent panel."),
        "embed": ("embeddings", "command", "Turn texts into embeddings."),
        "export": (
            "upstream",
            "command",
            "Generate a launch script for vLLM, SGLang or llama-server.",
        ),
        "rpc-worker": (
            "rpc",
            "command",
            "Lend this machine's memory to localspec on another machine.",
        ),
    },
}

# Extras with a module `routes`, which adds endpoints: `ROUTES`, and further paths for them, `PATH_ALIASES`.
# A path is matched in this order, and by the core's routes last.
WITH_ROUTES = ("anthropic", "responses", "embeddings", "ollama", "upstream", "next_edit")

# Extras whose `commands` have a function `remove_installed`: it removes what the extra wrote outside of our
# folders. The service is first, since systemd would start a daemon again.
WITH_INSTALLATION = ("service", "editors")

_FOLDER = __file__.rpartition("/")[0]


def is_here(extra: str) -> bool:
    """Return whether this installation has an extra."""
    return os.access(f"{_FOLDER}/{extra}", os.R_OK)


def load(extra: str, module: str) -> ModuleType | None:
    """Import a module of an extra; None where this installation does not have the extra."""
    return import_module(f"{__name__}.{extra}.{module}") if is_here(extra) else None


def route_modules() -> Iterator[ModuleType]:
    """Import the modules that add endpoints, in their order."""
    for extra in WITH_ROUTES:
        if (module := load(extra, "routes")) is not None:
            yield module


def commands(group: str) -> dict[str, tuple[str, str]]:
    """Return a group's commands: name → (module:function, summary)."""
    return {
        name: (f"{__name__}.{extra}.commands:{function}", summary)
        for name, (extra, function, summary) in COMMANDS.get(group, {}).items()
        if is_here(extra)
    }
