"""An exported pair as a shell script, in which a comment is no longer than its line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from localspec.cli.export import connect
from localspec.cli.export.engines import Place, Served
from localspec.cli.export.pair import Pair

_END = "END_OF_FILE"


def script(pair: Pair, place: Place, served: Served) -> str:
    """What a shell runs; where there are several machines, the first one's."""
    lines = [*comments([f"{pair.name} on {served.title}.", *served.notes])]
    for name, text in served.files.items():
        # In each line there is a key of ours and JSON, so that none of them ends it.
        lines += [f"cat > {shlex.quote(name)} <<'{_END}'", *text.splitlines(), _END]
    for what, command in served.first:
        lines += [*comments([f"{what[:1].upper()}{what[1:]}:"]), shlex.join(command)]
    for what, command in served.rest:
        lines += comments([f"{what[:1].upper()}{what[1:]}:", shlex.join(command)])
    if served.first:
        lines += comments(["Then here again, once `ray status` shows all of them:"])
    lines += [wrapped(served.command, served.program), ""]
    return "\n".join([*lines, *comments(connect.lines(pair, place, served)), ""])


def comments(texts: Iterable[str]) -> Iterator[str]:
    """One line each, whatever a name has in it."""
    for text in texts:
        yield "# " + "".join(char if char.isprintable() else "?" for char in text)


def wrapped(command: Sequence[str], program: int) -> str:
    """A command with a line for each option."""
    lines = [[*command[:program]]]
    for word in command[program:]:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    shown = [shlex.join(each) for each in lines]
    return " \\\n  ".join(shown)
