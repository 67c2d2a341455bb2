"""Ask the question of a template, and take a command or a commit message out of the answer.

The prompt requests nothing else, but models also greet, explain, number, quote and fence. Nothing here
decides whether a command is safe, because a person reads the result before it is used.
"""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, takewhile
from typing import Any, NamedTuple

from localspec.cli import ask, base_models, templates
from localspec.cli.options import AskOptions
from localspec.cli.terminal import extract, figures, hints, render
from localspec.client.api import Client
from localspec.errors import ContextExceeded, LocalspecError, TemplateFailed

_SHELL_PROMPT = re.compile(r"\s*(?:[\w.-]+@[\w.-]+[^$%#❯]*)?[$%❯] +(?=\S)")
_FENCE_PREFIX = re.compile(r"(?m)^[ \t>*+.\d-]+(?=```|~~~)")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_LABEL = re.compile(r"(?i)^\**(?:shell |bash |zsh |fish )?(?:command|answer)\**\s*:\**\s*")
_LANGUAGE = re.compile(r"(?i)^(?:bash|zsh|fish|sh|shell|console)$")
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*[,.:;!?]*")
# Words that begin sentences and that no command begins with.
_SENTENCE_STARTS = frozenset(
    "here here's this that these you your to use using sure the try run note i i'm it it's certainly "
    "okay ok of and explanation output in as below above following".split()
)
# Characters that terminals show as nothing or as a blank, although str.isprintable is true for them.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def extract_command(answer: str) -> str:
    """Return the first command in an answer, which may have several lines; empty if there is none."""
    text = re.sub(r"\r\n?", "\n", answer)
    blocks = [block for block in extract.blocks(_FENCE_PREFIX.sub("", text)) if block.strip()]
    lines = blocks[0].split("\n") if blocks else _outside_fences(text)
    # Without prompts, output, and comments before the first command.
    lines = textwrap.dedent("\n".join(lines)).split("\n")
    while lines and (not lines[0].strip() or lines[0].lstrip().startswith("#")):
        lines.pop(0)
    if lines and _SHELL_PROMPT.match(lines[0]):
        lines = _drop_output(lines)
    command = "\n".join(lines).strip()
    # Text that begins with a dash is a list item, which a shell would take for an option of its own.
    return "" if command.startswith("-") else command


def _outside_fences(text: str) -> list[str]:
    """Return the first lines that are no sentence, or else the first code span within a sentence."""
    lines = (_LABEL.sub("", line) for line in text.strip().split("\n"))
    rest = dropwhile(lambda line: not line.strip() or _is_sentence(line), lines)
    command = list(takewhile(lambda line: line.strip() and not _is_sentence(line), rest))
    if len(command) > 1 and _LANGUAGE.match(command[0].strip()):
        command = command[1:]
    if not command:
        return [match[2] for match in _CODE_SPAN.finditer(text)][:1]
    span = _CODE_SPAN.fullmatch(command[0].strip())
    return [span[2]] if span else command


def _is_sentence(line: str) -> bool:
    """Return whether a line is prose and not a command, judged by its words and punctuation."""
    words = [word.strip("*_") for word in line.split()]
    is_plain_word = [bool(_WORD.fullmatch(word)) for word in words]
    if len(words) > 3 and words[-1].endswith((".", "!", "?")) and all(is_plain_word[-3:]):
        return True
    if not is_plain_word[0]:
        return False
    if words[0].rstrip(",.:;!?").lower().replace("’", "'") in _SENTENCE_STARTS:
        return True
    if len(words) > 2 and words[-1].endswith(":"):
        return all(is_plain_word)
    # "Find all files" is prose, but "find all files" may be a command.
    return words[0][0].isupper() and len(words) > 2 and is_plain_word[1]


def _drop_output(lines: list[str]) -> list[str]:
    """Return the typed lines of a session: those after a prompt, and their continuation lines."""
    typed_lines: list[str] = []
    continues = False
    for line in lines:
        match = _SHELL_PROMPT.match(line)
        if match or continues:
            line = line[match.end() :] if match else line.removeprefix("> ")
            typed_lines.append(line)
            continues = line.endswith("\\")
    return typed_lines


def find_invisible(command: str) -> str:
    """Return the first character that a terminal would not show as itself; empty if there is none."""
    hidden = (char for char in command if not char.isprintable() or _INVISIBLE.match(char))
    return next((char for char in hidden if char not in "\n\t"), "")


_MIN_REPEATED_LETTERS = 8  # a shorter subject may be repeated by chance
_MAX_COLUMNS = 72  # width of a message's lines that git's manual recommends
_INTRODUCTION = re.compile(
    r"(?i)^(?:sure|certainly|okay|here|the|a|this|commit message|\**commit)\b.*:\**$"
)
_TITLE = re.compile(r"(?i)^\**(?:(?:git )?commit message|subject|title|message|body)\**\s*:\**\s*")
_BULLET = re.compile(r"^(\s*(?:[-*+]|\d+[.)])\s+|\s*)")


def extract_message(answer: str) -> str:
    """Return a commit message: a subject, and perhaps a body after an empty line.

    Returns an empty string if there is none.
    """
    text = re.sub(r"\r\n?", "\n", answer)
    text = next((block for block in extract.blocks(text) if block.strip()), text)
    text = "".join(char for char in text if char in "\n\t" or char.isprintable())
    lines = [line.rstrip() for line in text.split("\n")]
    subject = ""
    while lines and not subject:
        line = lines.pop(0).strip()
        if line and not _INTRODUCTION.match(line):
            subject = _subject(line)
    body = [wrapped for line in lines for wrapped in _wrapped(_TITLE.sub("", line))]
    text = "\n".join(body).strip("\n")
    return f"{subject}\n\n{text}".strip() if subject else ""


def repeats_subject(message: str, subjects: str) -> bool:
    """Return whether a message begins with one of the earlier subjects, which are one per line.

    Small models copy what the prompt shows them.
    """
    known = (_letters(line) for line in subjects.split("\n"))
    begun = _letters(message)
    return any(len(line) >= _MIN_REPEATED_LETTERS and begun.startswith(line) for line in known)


def _letters(text: str) -> str:
    return "".join(char for char in text.casefold() if char.isalnum())


def _subject(line: str) -> str:
    line = _TITLE.sub("", line.strip()).lstrip("#").strip()
    for sign in ("**", '"', "`", "'"):
        if len(line) > 2 * len(sign) and line.startswith(sign) and line.endswith(sign):
            line = line.removeprefix(sign).removesuffix(sign).strip()
    return line.lstrip("#").strip()


def _wrapped(line: str) -> list[str]:
    if line.startswith("#"):
        line = f" {line}"  # otherwise git would take it for a comment
    if len(line) <= _MAX_COLUMNS:
        return [line]
    match = _BULLET.match(line)
    indent = " " * len(match[1]) if match else ""
    return textwrap.wrap(
        line, _MAX_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


_MAX_CHARS = 400_000  # a longer text is cut before its tokens are counted
_MAX_ATTEMPTS = 4
# Text of an answer without a limit of its own: what was asked for has a few sentences or lines.
_MAX_ANSWER_CHARS = 3000
# Share of the context for the text. The remainder is for the template and the answer. It also covers
# remaining parts that have more tokens per character than the whole text.
_CONTEXT_SHARE = 0.7
_MIN_CHARS = 1000  # a text is not cut to less because it takes long to read
_FORECAST_TOLERANCE = 1.25  # forecasts of the reading time may be off by this factor


class Cut(NamedTuple):
    """A text shortened to a given length, and a description of what was left out, which may be empty."""

    text: str
    left_out: str = ""


class ShellAnswer(NamedTuple):
    """An answer: its text, whether a token limit cut it off, and the pair that gave it."""

    text: str
    cut_off: bool
    model: str = ""


class _TooMuch(Exception):
    """Raised if an answer has more text than a person will read."""


class _BoundedPrinter(render.Printer):
    """A printer that ends an answer that is too long, or that the built-in pair gives.

    The limit counts text and no thoughts, of which a model may need many for a short answer.
    """

    def __init__(self, printer: render.Printer, response: dict[str, Any], max_chars: float) -> None:
        self._printer, self._response, self._left = printer, response, max_chars

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        if self._response.get("model") == "builtin":
            raise LocalspecError(
                "The built-in demo pair knows only Python's standard library. Use a real one: localspec "
                "catalogue"
            )
        self._left -= len(piece)
        self._printer.text(piece, drafted)
        if self._left < 0:
            raise _TooMuch

    def close(self) -> None:
        self._printer.close()


class CollectingPrinter(render.Printer):
    """A printer that collects the answer instead of showing it."""

    def __init__(self) -> None:
        self.answer = ""

    def text(self, piece: str, drafted: list[list[int]]) -> None:
        del drafted
        self.answer += piece

    def close(self) -> None:
        pass  # no line on the screen has to be ended


class _TooSlow(Exception):
    """Raised if reading the prompt would take `seconds`, which is too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def _watch_reading(limit_s: float) -> Callable[[dict[str, Any]], None]:
    """Return a check of progress reports. It raises _TooSlow if reading will clearly exceed the limit.

    The daemon's forecasts come from the pair's measured costs, so they show that a prompt is too long before
    it has been read.
    """
    began: list[float] = []

    def watch(progress: dict[str, Any]) -> None:
        if progress["state"] == "reading":
            began.append(time.monotonic())
            expected = began[-1] - began[0] + progress.get("seconds", 0)
            if expected > _FORECAST_TOLERANCE * limit_s:
                raise _TooSlow(expected)

    return watch


@dataclass(frozen=True)
class ShellQuestion:
    """A question about a text, which `template` asks, unless the options name another template.

    cut: returns the text shortened to a number of characters. It is called again with fewer characters if the
    text does not fit into the context, or takes longer to read than `reading_s` seconds. options: their words
    are the title in the history. variables: the values of the template's variables.
    """

    template: str
    options: AskOptions
    cut: Callable[[int], Cut]
    variables: dict[str, str]
    reading_s: float = math.inf

    def ask(self, printer: render.Printer) -> dict[str, Any]:
        """Print the answer and return what `ask.stream` returns.

        Raises UsageError if the template is wrong, and LocalspecError if no daemon is running, it answered
        with an error, or the built-in pair answered, which cannot know anything about the question.
        """
        client = Client(autostart=not self.options.no_daemon_start)
        max_chars, reason = _MAX_CHARS, "Too long"
        for attempt in range(_MAX_ATTEMPTS):
            text, left_out = self.cut(max_chars)
            request, merged = self._build_request(text)
            is_last = attempt == _MAX_ATTEMPTS - 1
            is_limited = not is_last and len(text) > _MIN_CHARS and self.reading_s < math.inf
            watch = _watch_reading(self.reading_s) if is_limited else None
            try:
                response = _stream_answer(client, request, merged, printer, watch)
                break
            except _TooSlow as error:
                share = self.reading_s / error.seconds
                max_chars = max(_MIN_CHARS, int(min(len(text), max_chars) * share))
                reason = f"Too long to read in {self.reading_s:.0f} seconds"
            except ContextExceeded as error:
                tokens, context = error.n_prompt_tokens, error.n_ctx
                if is_last or not tokens or not context:
                    raise
                share = _CONTEXT_SHARE * min(1, context / tokens)
                max_chars = int(min(len(text), max_chars) * share)
                reason = "Too long for the pair's context"
        if left_out:
            _note_once(f"{reason}; left out: {left_out}")
        ask.print_notes(response)
        if self.options.usage and "timings" in response:
            figures.statistics(response)
        return response

    def fetch(self) -> ShellAnswer:
        """Return the answer instead of printing it."""
        printer = CollectingPrinter()
        response = self.ask(printer)
        return ShellAnswer(printer.answer, _is_cut_off(response), str(response.get("model", "")))

    def print(self) -> None:
        """Print the answer as `localspec ask` does."""
        response = self.ask(render.printer(plain=self.options.plain))
        if (response.get("localspec") or {}).get("limit"):
            hints.print_cut_off(response, "")
        elif _is_cut_off(response):
            render.note("The answer was ended because it is long. -n sets another limit.")

    def _build_request(self, text: str) -> tuple[dict[str, Any], AskOptions]:
        options = self.options.changed(template=self.options.template or self.template)
        used = templates.Template(options, self.variables)
        request = {**ask.request_for(used.options, used.question(text)), "loop_guard": "all"}
        if ask.is_saved(request):
            kind, title = self.template.partition("-")[0], ask.clean(" ".join(options.words))
            title = f"{kind}: {title}" if title else kind
            request["localspec"] |= {"kind": kind, "title": title[: ask.MAX_TITLE_CHARS]}
        return request, used.options


@cache
def _note_once(message: str) -> None:
    """Print a note, which a second attempt of the same command would repeat."""
    render.note(message)


def _stream_answer(
    client: Client,
    request: dict[str, Any],
    options: AskOptions,
    printer: render.Printer,
    on_progress: Callable[[dict[str, Any]], None] | None,
) -> dict[str, Any]:
    """Print the answer and return what `ask.stream` returns.

    An answer that was ended because it had too much text has the finish reason "length".

    Raises LocalspecError, which for a base model says what it can do instead.
    """
    hide, response = options.hide_reasoning, dict[str, Any]()
    max_chars = _MAX_ANSWER_CHARS if options.tokens == templates.SHELL_TOKENS else math.inf
    bounded = _BoundedPrinter(printer, response, max_chars)
    try:
        return ask.stream(
            client, request, bounded, hide_reasoning=hide, result=response, on_progress=on_progress
        )
    except _TooMuch:
        return {**response, "finish_reason": "length"}
    except TemplateFailed as error:
        raise base_models.explain_error(client, request.get("model", ""), error) from error


def _is_cut_off(response: dict[str, Any]) -> bool:
    limit = (response.get("localspec") or {}).get("limit")
    return response.get("finish_reason") == "length" or bool(limit)


def uncut(text: str) -> Callable[[int], Cut]:
    """Return a `cut` for a text that is never shortened. If it is too long, the daemon refuses it."""
    return lambda max_chars: Cut(text)


def middle_left_out(text: str) -> Callable[[int], Cut]:
    """Return a `cut` for a log, which leaves out the middle.

    The end usually matters most, and the beginning shows what ran.
    """

    def cut(max_chars: int) -> Cut:
        if len(text) <= max_chars:
            return Cut(text)
        head, tail = text[: max_chars // 4], text[len(text) - max_chars + max_chars // 4 :]
        head, tail = head.rpartition("\n")[0] or head, tail.partition("\n")[2] or tail
        lines = text[len(head) : len(text) - len(tail)].strip("\n").count("\n") + 1
        omission = f"{lines} line{'s' * (lines > 1)} in the middle"
        return Cut(f"{head}\n[… {omission} left out …]\n{tail}", f"{omission}.")

    return cut
