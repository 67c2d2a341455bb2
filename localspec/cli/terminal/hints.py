"""One dim line about what would do better here, or about an answer that was cut off.

The second stands on the way of every short answer: what only the first needs is imported there.
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

# Without a GPU a token costs the time to read all weights from memory; more is no joy to wait for.
_ON_CPU = 3 << 30  # bytes


def real_pair(client: Client) -> None:
    """Say on stderr how to get a real pair, once a day; nothing when that cannot be found out."""
    from localspec.client.pairs import PairsClient
    from localspec.paths import default_paths

    if _said_today(default_paths().state / "real-pair-hint"):
        return
    try:
        listed = PairsClient(client.socket_path, autostart=False).pairs(everything=True)
    except LocalspecError:
        return
    render.dim(f"That was the small pair that comes with localspec. {_advice(listed)}")


def _said_today(file: Path) -> bool:
    """Whether it was; it is from now on. The file has the day. What cannot be remembered is not said."""
    from localspec.files import write_whole

    today = time.strftime("%Y-%m-%d")
    try:
        if file.exists() and file.read_text(encoding="utf-8") == today:
            return True
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, today.encode(), sync=False)
    except (OSError, ValueError):
        return True
    return False


def _advice(listed: dict[str, Any]) -> str:
    from localspec.cli.terminal.pairs import size

    others = [each for each in listed["pairs"] if each["name"] != "builtin"]
    chat = [each for each in others if "chat" in each["roles"]]
    here = [each for each in chat if each["here"]]
    if here:
        return f"To use a real one: localspec use {here[0]['name']}"
    fitting = [each for each in chat if each["fits"] == "yes" and not each["hybrid"]]
    if not listed["vram"]:
        fitting = [each for each in fitting if each["memory"] == "cpu" or _small(each)]
    if not fitting:
        return "For a real one: localspec catalogue"
    best = max(fitting, key=lambda each: each["size"] or 0)
    how_large = f" ({size(best['size'])})" if best["size"] else ""
    return f"A real one that fits this machine{how_large}: localspec pull {best['name']}"


def _small(each: dict[str, Any]) -> bool:
    return 0 < (each["size"] or 0) <= _ON_CPU


def cut_off(last: dict[str, Any], going_on: str) -> None:
    """Say why an answer was cut off; `going_on` is how to continue it, if it can be."""
    tokens = (last.get("usage") or {}).get("completion_tokens", 0)
    if last["localspec"]["limit"] == "context":
        said = (
            "The answer was cut off because the context is full. If the model supports a larger one: "
            "localspec config set context TOKENS."
        )
    else:
        said = f"The answer was cut off at its limit of {tokens} token{'s' * (tokens != 1)} (-n)."
    render.error(f"{said} To continue the answer: {going_on}" if going_on else said)
