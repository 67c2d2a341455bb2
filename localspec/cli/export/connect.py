"""The command with which this localspec connects to an exported engine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from localspec.cli.export.engines import Place, Served
from localspec.cli.export.pair import Pair

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def lines(pair: Pair, place: Place, served: Served) -> Iterator[str]:
    """Yield the `localspec add` line, after what it requires."""
    if place.host:
        yield "Then, where you ask from (so can whoever reaches the port, unless a firewall closes it):"
    else:
        tunnel = f"ssh -N -L {served.port}:127.0.0.1:{served.port} HOST"
        yield f"Then, where you ask from (it listens on its own machine alone: {tunnel}):"
    yield shlex.join(command(pair, place, served))


def command(pair: Pair, place: Place, served: Served) -> list[str]:
    """Return the words of the `localspec add` command."""
    host = f"[{place.host}]" if ":" in place.host else place.host or "127.0.0.1"
    name = f"{pair.served}-{served.short}"
    words = ["localspec", "add", name, "--upstream", f"http://{host}:{served.port}/v1"]
    words += ["--upstream-kind", served.kind]
    if served.model:
        words += ["--upstream-model", served.model]
    # Another server may have its own chat template for a base model, so that it can chat.
    roles = ["chat" if role == "text" else role for role in pair.roles]
    if roles != ["chat"]:
        for role in roles:
            words += ["--role", role]
    if pair.here and _NAME.fullmatch(pair.name):
        words += ["--fallback", pair.name]
    return words
