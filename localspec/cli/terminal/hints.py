"""One dim line about what would do better here."""

from __future__ import annotations

from typing import Any

from localspec.cli.terminal import render
from localspec.cli.terminal.pairs import size
from localspec.client.api import Client
from localspec.client.pairs import PairsClient
from localspec.errors import LocalspecError

# Without a GPU a token costs the time to read all weights from memory; more is no joy to wait for.
_ON_CPU = 3 << 30  # bytes


def real_pair(client: Client) -> None:
    """Say on stderr how to get a real pair; nothing when that cannot be found out."""
    try:
        listed = PairsClient(client.socket_path, autostart=False).pairs(everything=True)
    except LocalspecError:
        return
    render.dim(f"That was the small pair that comes with localspec. {_advice(listed)}")


def _advice(listed: dict[str, Any]) -> str:
    others = [each for each in listed["pairs"] if each["name"] != "builtin"]
    chat = [each for each in others if "chat" in each["roles"]]
    here = [each for each in chat if each["here"]]
    if here:
        return f"To use a real one: localspec config set pair {here[0]['name']}"
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
            "The answer was cut off because the context is full. For a larger one: localspec config "
            "set context TOKENS."
        )
    else:
        said = f"The answer was cut off at its limit of {tokens} token{'s' * (tokens != 1)} (-n)."
    render.error(f"{said} To continue the answer: {going_on}" if going_on else said)
