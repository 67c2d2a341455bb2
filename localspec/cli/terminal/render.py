"""Print answers and results to stdout, and everything else to stderr.

Text from other sources passes `harmless` on its way to a terminal. In a pipe an answer is byte by byte
what the model generated. Lists and messages are harmless in a pipe too, because their text may end up on
a terminal.
"""

from __future__ import annotations

import os
import sys

from localspec.errors import replace_control_characters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

harmless = replace_control_characters

_last_char = "\n"  # of the answer
_last_reasoning_char = "\n"


class Printer:
    """A printer of an answer while it arrives. This one prints the text as it is."""

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        """Print a piece of the answer.

        `drafted` has the start and end, in characters, of each part that the draft proposed.
        """
        del drafted
        text(piece)

    def close(self) -> None:
        end_of_text()


class DraftPrinter(Printer):
    """A printer that colours text proposed by the draft, or underlines it if NO_COLOR is set."""

    def __init__(self) -> None:
        from localspec.cli.terminal import layout

        self._style = "4" if os.environ.get("NO_COLOR") else "32"
        self._flow = layout.Flow(layout.width(sys.stdout))

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        printed = 0
        for start, end in [*drafted, [len(piece), len(piece)]]:
            _print_answer(self._flow.text(harmless(piece[printed:start])))
            _print_answer(self._flow.text(harmless(piece[start:end]), self._style))
            printed = end

    def close(self) -> None:
        # The last piece ends with an escape code, so the line end is always printed here.
        _print_answer(f"{self._flow.release_word()}\n")
        style_name = "Underlined" if self._style == "4" else "Green"
        dim(f"{style_name}: tokens proposed by the draft.")


class MarkdownPrinter(Printer):
    """A printer that draws Markdown while it is being generated."""

    def __init__(self, beginning: str = "") -> None:
        """Create a printer. The answer continues the last line of `beginning`, which was shown before."""
        from localspec.cli.terminal.markdown import Screen

        self._screen = Screen(harmless(beginning))

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        del drafted
        end_reasoning()
        self._screen.text(harmless(piece))

    def close(self) -> None:
        self._screen.close()


def printer(*, plain: bool = False, tinted: bool = False, beginning: str = "") -> Printer:
    """Return the printer that suits stdout. Markdown is only drawn on a terminal.

    `beginning` is the part of the answer that was shown before.
    """
    if not is_drawn_on(sys.stdout) or (plain and not tinted):
        return Printer()
    return DraftPrinter() if tinted else MarkdownPrinter(beginning)


def reasoning(piece: str) -> None:
    """Print a piece of a model's reasoning on stderr, dimmed on a terminal."""
    global _last_reasoning_char
    if piece:
        _last_reasoning_char = piece[-1]
        stderr(_dim_text(harmless(piece)) if sys.stderr.isatty() else piece)


def end_reasoning() -> None:
    """Print an empty line between the reasoning and the answer."""
    global _last_reasoning_char
    if _last_reasoning_char != "\n":
        _last_reasoning_char = "\n"
        stderr("\n\n" if sys.stderr.isatty() else "\n")


def is_drawn_on(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that understands escape codes."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _dim_text(text_: str) -> str:
    return f"\x1b[2m{text_}\x1b[0m" if is_drawn_on(sys.stderr) else text_


def dim(message: str) -> None:
    """Print a less important line for a person at a terminal, and nothing in a pipe."""
    if sys.stderr.isatty():
        sys.stdout.flush()
        stderr(f"{_dim_text(_fit_to_terminal(sys.stderr, message))}\n")


def note(message: str) -> None:
    """Print a line beside the answer."""
    stderr(f"{_fit_to_terminal(sys.stderr, message)}\n")


def _fit_to_terminal(stream: TextIO, message: str) -> str:
    """Return `message` in lines that fit the terminal; for a pipe as it is."""
    safe_message = harmless(message)
    if not stream.isatty():
        return safe_message
    from localspec.cli.terminal import layout

    return "\n".join(layout.wrap(safe_message, layout.width(stream)))


def stderr(message: str) -> None:
    """Print a message on stderr as it is. If that fails, there is nobody left to report the error to."""
    try:
        _write(sys.stderr, message)
        sys.stderr.flush()
    except OSError:  # a full disk, or a pipe without a reader; Python must not try again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 2)


def _write(stream: TextIO, text_: str) -> None:
    """Write text, with question marks for characters that the stream's encoding does not have."""
    try:
        stream.write(text_)
    except UnicodeEncodeError:  # the terminal is not UTF-8, or the text has a lone surrogate
        stream.write(text_.encode(stream.encoding, "replace").decode(stream.encoding))


def text(piece: str) -> None:
    """Print a piece of the answer at once."""
    _print_answer(harmless(piece) if sys.stdout.isatty() else piece)


def _print_answer(piece: str) -> None:
    """Print a piece of the answer that may contain escape codes of our own."""
    global _last_char
    if not piece:
        return
    if _last_reasoning_char != "\n":
        end_reasoning()
    _last_char = piece[-1]
    _write(sys.stdout, piece)
    sys.stdout.flush()


def end_of_text() -> None:
    """End the last line of an answer, because the shell's prompt belongs on a line of its own."""
    if _last_char != "\n":
        text("\n")


def whole_text(answer: str) -> None:
    """Print an answer that is complete."""
    text(answer)
    end_of_text()


def answer(text_: str, *, plain: bool = False) -> None:
    """Print an answer of the history as it was shown, or as it is if `plain`."""
    shown = printer(plain=plain)
    shown.text(text_, [])
    shown.close()


def record(value: object) -> None:
    """Print a value as one line of JSON. Characters that are not harmless are written as JSON escapes."""
    import json
    import re

    encoded = json.dumps(value, ensure_ascii=False)
    unsafe = "[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
    escaped = re.sub(unsafe, lambda match: f"\\u{ord(match[0]):04x}", encoded)
    sys.stdout.write(f"{escaped}\n")


def line(message: str) -> None:
    """Print a line of a result that is not a model's answer."""
    _write(sys.stdout, f"{_fit_to_terminal(sys.stdout, message)}\n")


def verbatim(text_: str) -> None:
    """Print lines of a log or a script without wrapping them."""
    _write(sys.stdout, f"{harmless(text_)}\n")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows as aligned columns. The first row has the headings."""
    _write(sys.stdout, "".join(f"{each}\n" for each in table_lines(rows)))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines that `table` prints."""
    from localspec.cli.terminal import layout

    safe_rows = [[harmless(cell, lines=False) for cell in row] for row in rows]
    return layout.table(safe_rows, layout.width(sys.stdout))


def fields(rows: Sequence[tuple[str, str]]) -> None:
    """Print names with their texts beside them."""
    _write(sys.stdout, "".join(f"{each}\n" for each in format_fields(rows)))


def format_fields(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return the lines that `fields` prints, for callers that redraw them."""
    from localspec.cli.terminal import layout

    safe = [(harmless(name, lines=False), harmless(value, lines=False)) for name, value in rows]
    return layout.fields(safe, layout.width(sys.stdout))


def highlighted(label: str, text: str, start: int, end: int) -> None:
    """Print `label` and `text`. On a terminal the characters from `start` to `end` are highlighted."""
    text = harmless(text, lines=False)
    if is_drawn_on(sys.stdout):
        style = "4" if os.environ.get("NO_COLOR") else "1;31"
        text = f"{text[:start]}\x1b[{style}m{text[start:end]}\x1b[0m{text[end:]}"
    _write(sys.stdout, f"{harmless(label, lines=False)}{text}\n")


def path(name: object) -> None:
    """Print a path alone on its line, for programs that read it. On a terminal it is made harmless."""
    text_ = harmless(str(name)) if sys.stdout.isatty() else str(name)
    _write(sys.stdout, f"{text_}\n")


def error(message: str) -> None:
    note(f"localspec: {message}")


def traceback() -> None:
    """Print the traceback of the exception that is being handled."""
    import traceback as standard

    stderr(harmless(standard.format_exc()))


def usage(message: str) -> None:
    """Print a message of click, made harmless."""
    stderr(_fit_to_terminal(sys.stderr, message))
