"""An exported pair as a shell script."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from localspec.cli.export import connect
from localspec.cli.export.engines import Place, Served
from localspec.cli.export.pair import Pair

_HEREDOC_END = "END_OF_FILE"


def script(pair: Pair, place: Place, served: Served) -> str:
    """Return a shell script; with several machines, the first one's."""
    lines = [*comments([f"{pair.name} on {served.title}.", *served.notes])]
    for name, text in served.files.items():
        # Each line has a key of ours and JSON, so that none of them ends the here-document.
        lines += [f"cat > {shlex.quote(name)} <<'{_HEREDOC_END}'", *text.splitlines(), _HEREDOC_END]
    for purpose, command in served.first:
        lines += [*comments([f"{purpose[:1].upper()}{purpose[1:]}:"]), shlex.join(command)]
    for purpose, command in served.rest:
        lines += comments([f"{purpose[:1].upper()}{purpose[1:]}:", shlex.join(command)])
    if served.first:
        lines += comments(["Then here again, once `ray status` shows all of them:"])
    lines += [wrap_command(served.command, served.program), ""]
    return "\n".join([*lines, *comments(connect.lines(pair, place, served)), ""])


def comments(texts: Iterable[str]) -> Iterator[str]:
    """Yield one comment line for each text, even if a name contains a line break."""
    for text in texts:
        yield "# " + "".join(char if char.isprintable() else "?" for char in text)


def wrap_command(command: Sequence[str], program: int) -> str:
    """Return a command with one line for each option."""
    lines = [[*command[:program]]]
    for word in command[program:]:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    quoted = [shlex.join(words) for words in lines]
    return " \\\n  ".join(quoted)
