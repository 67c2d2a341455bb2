"""Everything that draws. Answers go to stdout and nothing else does; the rest goes to stderr.

What comes from elsewhere passes `harmless` on its way to a terminal. In a pipe an answer is what the
model wrote, byte by byte; lists and messages are harmless there too, for a terminal may follow.
"""

from __future__ import annotations

import os
import sys

from localspec.errors import visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

harmless = visible

_last = "\n"
_last_thought = "\n"


class Printer:
    """Shows an answer as it comes; this one as it is."""

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        """`drafted`: from and to of what the draft proposed, in characters."""
        del drafted
        text(piece)

    def close(self) -> None:
        end_of_text()


class Tinted(Printer):
    """Colours what came from the draft; underlines it where colours are not wanted."""

    def __init__(self) -> None:
        from localspec.cli.terminal import layout

        self._style = "4" if os.environ.get("NO_COLOR") else "32"
        self._flow = layout.Flow(layout.width(sys.stdout))

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        done = 0
        for start, end in [*drafted, [len(piece), len(piece)]]:
            _answer(self._flow.text(harmless(piece[done:start])))
            _answer(self._flow.text(harmless(piece[start:end]), self._style))
            done = end

    def close(self) -> None:
        _answer(f"{self._flow.word()}\n")  # a style's end hides what the last character was
        how = "Underlined" if self._style == "4" else "Green"
        dim(f"{how}: tokens proposed by the draft.")


class Drawn(Printer):
    """Markdown, drawn while it is being written."""

    def __init__(self, begun: str = "") -> None:
        """`begun` is the beginning of the text, which was shown before."""
        from localspec.cli.terminal.markdown.screen import Screen

        self._screen = Screen(harmless(begun))

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        del drafted
        end_of_thought()
        self._screen.text(harmless(piece))

    def close(self) -> None:
        self._screen.close()


def printer(*, plain: bool = False, tinted: bool = False, begun: str = "") -> Printer:
    """What suits stdout: Markdown is drawn on a terminal only. `begun`: as Drawn has it."""
    if not is_drawn_on(sys.stdout):
        return Printer()
    if tinted:
        return Tinted()
    if plain:
        return Printer()
    return Drawn(begun)


def reasoning(piece: str) -> None:
    """What a model thinks before it answers: beside the answer, dim on a terminal."""
    global _last_thought
    if piece:
        _last_thought = piece[-1]
        stderr(_dimmed(harmless(piece)) if sys.stderr.isatty() else piece)


def end_of_thought() -> None:
    """An empty line between what was thought and the answer."""
    global _last_thought
    if _last_thought != "\n":
        _last_thought = "\n"
        stderr("\n\n" if sys.stderr.isatty() else "\n")


def is_drawn_on(stream: TextIO) -> bool:
    """Whether it is a terminal that knows escape codes."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _dimmed(shown: str) -> str:
    return f"\x1b[2m{shown}\x1b[0m" if is_drawn_on(sys.stderr) else shown


def dim(message: str) -> None:
    """A line of small importance, for a person at a terminal only."""
    if sys.stderr.isatty():
        sys.stdout.flush()
        stderr(f"{_dimmed(_laid_out(sys.stderr, message))}\n")


def note(message: str) -> None:
    """A line beside the answer."""
    stderr(f"{_laid_out(sys.stderr, message)}\n")


def _laid_out(stream: TextIO, message: str) -> str:
    """`message` in lines that fit the terminal; in a pipe as it is."""
    shown = harmless(message)
    if not stream.isatty():
        return shown
    from localspec.cli.terminal import layout

    return "\n".join(layout.wrapped(shown, layout.width(stream)))


def stderr(message: str) -> None:
    """As it is, beside the answer. Where that cannot be written nobody can be told either."""
    try:
        _write(sys.stderr, message)
        sys.stderr.flush()
    except OSError:  # a full disk, a pipe whose reader left; not tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 2)


def _write(stream: TextIO, text_: str) -> None:
    """`text_`, with question marks for what the stream's encoding does not have."""
    try:
        stream.write(text_)
    except UnicodeEncodeError:  # a terminal that is not UTF-8, or half a surrogate pair
        stream.write(text_.encode(stream.encoding, "replace").decode(stream.encoding))


def text(piece: str) -> None:
    """A piece of the answer, shown at once."""
    _answer(harmless(piece) if sys.stdout.isatty() else piece)


def _answer(piece: str) -> None:
    """The same with escape codes of our own in it."""
    global _last
    if not piece:
        return
    if _last_thought != "\n":
        end_of_thought()
    _last = piece[-1]
    _write(sys.stdout, piece)
    sys.stdout.flush()


def end_of_text() -> None:
    """The shell's prompt belongs on a line of its own."""
    if _last != "\n":
        text("\n")


def record(value: object) -> None:
    """One line of JSON; what is not harmless in it is written as JSON can, with its number."""
    import json
    import re

    def escaped(found: re.Match[str]) -> str:
        return f"\\u{ord(found[0]):04x}"

    written = json.dumps(value, ensure_ascii=False)
    unsafe = "[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    sys.stdout.write(re.sub(unsafe, escaped, written) + "\n")


def line(message: str) -> None:
    """A result that is no answer of a model: of `start`, `stop`, `rm`."""
    _write(sys.stdout, f"{_laid_out(sys.stdout, message)}\n")


def verbatim(text_: str) -> None:
    """Lines of something else, a log or a script: in a terminal of any width as they are."""
    _write(sys.stdout, f"{harmless(text_)}\n")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Columns under the headings of the first row."""
    from localspec.cli.terminal import layout

    shown = [[harmless(cell, lines=False) for cell in row] for row in rows]
    for each in layout.table(shown, layout.width(sys.stdout)):
        _write(sys.stdout, f"{each}\n")


def fields(rows: Sequence[tuple[str, str]]) -> None:
    """Names with their texts beside them."""
    for each in fields_in_lines(rows):
        _write(sys.stdout, f"{each}\n")


def fields_in_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """The same, for whoever draws them in place."""
    from localspec.cli.terminal import layout

    shown = [(harmless(name, lines=False), harmless(text_, lines=False)) for name, text_ in rows]
    return layout.fields(shown, layout.width(sys.stdout))


def highlighted(before: str, text: str, start: int, end: int) -> None:
    """A line of `before` and `text`, whose characters from `start` to `end` stand out on a terminal."""
    text = harmless(text, lines=False)
    if is_drawn_on(sys.stdout):
        style = "4" if os.environ.get("NO_COLOR") else "1;31"
        text = f"{text[:start]}\x1b[{style}m{text[start:end]}\x1b[0m{text[end:]}"
    _write(sys.stdout, f"{harmless(before, lines=False)}{text}\n")


def path(name: object) -> None:
    """A path alone on its line, for a program that uses it; harmless on a terminal."""
    shown = str(name)
    _write(sys.stdout, f"{harmless(shown) if sys.stdout.isatty() else shown}\n")


def error(message: str) -> None:
    stderr(f"{_laid_out(sys.stderr, f'localspec: {message}')}\n")


def traceback() -> None:
    """Of the error that is being handled."""
    import traceback as standard

    stderr(harmless(standard.format_exc()))


def usage(message: str) -> None:
    """What click says about a command line, as it is but harmless."""
    stderr(_laid_out(sys.stderr, message))
