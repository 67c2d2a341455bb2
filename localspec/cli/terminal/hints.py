"""One-line hints: on a better pair than the built-in one, and on an answer that was cut off.

Every question to `ask` imports this module, so modules that only the first hint needs are imported there.
"""

from __future__ import annotations

import time

from localspec.cli.terminal import render
from localspec.errors import LocalspecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from localspec.client.api import Client

# Without a GPU every token takes the time to read all weights from memory. A larger model is too slow to
# recommend.
_MAX_CPU_BYTES = 3 << 30


def suggest_real_pair(client: Client) -> None:
    """Print how to get a real pair, at most once a day. Prints nothing if the daemon cannot be asked."""
    from localspec.client.pairs import PairsClient
    from localspec.paths import default_paths

    if _was_shown_today(default_paths().state / "real-pair-hint"):
        return
    try:
        listed = PairsClient(client.socket_path, autostart=False).pairs(everything=True)
    except LocalspecError:
        return
    render.dim(f"That was the small pair that comes with localspec. {_advice(listed)}")


def _was_shown_today(file: Path) -> bool:
    """Return whether the hint was shown today, and record that it is.

    The file has the day. If it cannot be written, the hint counts as shown.
    """
    from localspec.files import write_atomically

    today = time.strftime("%Y-%m-%d")
    try:
        if file.exists() and file.read_text(encoding="utf-8") == today:
            return True
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, today.encode(), sync=False)
    except (OSError, ValueError):
        return True
    return False


def _advice(listed: dict[str, Any]) -> str:
    from localspec.files import format_size

    pairs = [pair for pair in listed["pairs"] if "chat" in pair["roles"]]
    pairs = [pair for pair in pairs if pair["name"] != "builtin"]
    if installed := [pair for pair in pairs if pair["here"]]:
        return f"To use a real one: localspec use {installed[0]['name']}"
    fitting = [
        pair
        for pair in pairs
        if pair["fits"] == "yes" and not pair["hybrid"]
        if listed["vram"] or pair["memory"] == "cpu" or 0 < (pair["size"] or 0) <= _MAX_CPU_BYTES
    ]
    if not fitting:
        return "For a real one: localspec catalogue"
    best = max(fitting, key=lambda pair: pair["size"] or 0)
    size_note = f" ({format_size(best['size'])} to download)" if best["size"] else ""
    return f"A real one that fits this machine{size_note}: localspec pull {best['name']}"


def print_cut_off(response: dict[str, Any], continue_command: str) -> None:
    """Print why an answer was cut off, and the command that continues it, if it can be continued."""
    tokens = (response.get("usage") or {}).get("completion_tokens", 0)
    message = f"The answer was cut off at its limit of {tokens} token{'s' * (tokens != 1)} (-n)."
    if response["localspec"]["limit"] == "context":
        message = (
            "The answer was cut off because the context is full. If the model supports a larger one: "
            "localspec config set context TOKENS."
        )
    elif response["localspec"]["limit"] == "loop":
        message = "The answer was ended because it repeated itself (loop_guard)."
    remedy = f" To continue the answer: {continue_command}" if continue_command else ""
    render.error(f"{message}{remedy}")
