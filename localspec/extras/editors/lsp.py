"""The language server: completions, explanations and edits of the texts that are open in an editor.

`Document` is a text with its lines and positions. `context_fields` and `VisitedPlaces` choose what is sent
for a completion, `EditorSession` asks the daemon, and `Server` speaks with the editor, by pygls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from lsprotocol import types
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method

import localspec
from localspec.cli.terminal.fences import blocks
from localspec.client.tasks import AsyncDaemon
from localspec.errors import Cancelled, LocalspecError, UsageError
from localspec.extras.editors.next_edit import Hunk, NextEdits

Result = TypeVar("Result")
Encoding = Literal["utf-8", "utf-16", "utf-32"]

# The protocol has these three line ends. str.splitlines splits at many others, too.
_ENDED_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)")
_LINE_END_CHARACTERS = "\r\n"


_UNITS: dict[Encoding, Callable[[str], int]] = {
    "utf-8": lambda char: len(char.encode("utf-8", "surrogatepass")),
    "utf-16": lambda char: 2 if ord(char) > 0xFFFF else 1,
    "utf-32": lambda _: 1,
}


class Position(NamedTuple):
    """A position: a line, and the number of characters before it in that line, both from 0."""

    line: int
    column: int


def split_lines(text: str) -> list[str]:
    """Return the lines with their ends. The last one has none and may be empty."""
    lines = _ENDED_LINE.findall(text)
    return [*lines, text[sum(map(len, lines)) :]]


class Document:
    """A text that is open in the editor, in its current state."""

    def __init__(
        self, uri: str, text: str, encoding: Encoding, language: str = "", version: int = 0
    ) -> None:
        self.uri, self.language, self.version = uri, language, version
        self.lines = split_lines(text)
        self._units = _UNITS[encoding]

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def line_end(self) -> str:
        first = self.lines[0]
        return first[len(first.rstrip(_LINE_END_CHARACTERS)) :] or "\n"

    def content(self, line: int) -> str:
        """Return a line without its end; empty if there is no such line."""
        return self.lines[line].rstrip(_LINE_END_CHARACTERS) if 0 <= line < len(self.lines) else ""

    def to_position(self, line: int, units: int) -> Position:
        """Convert the editor's position: at most the line's end, and never inside a character."""
        if line >= len(self.lines):
            return Position(len(self.lines) - 1, len(self.lines[-1]))
        content = self.content(line)
        if content.isascii():
            return Position(line, min(units, len(content)))
        for column, char in enumerate(content):
            units -= self._units(char)
            if units < 0:
                return Position(line, column)
        return Position(line, len(content))

    def to_units(self, place: Position) -> int:
        """Convert a position to the editor's units before it in its line."""
        return sum(map(self._units, self.content(place.line)[: place.column]))

    def line_range(self, first: int, last: int) -> types.Range:
        """Return the place of whole lines, without the end of the last one."""
        end = self.to_units(Position(last, len(self.content(last))))
        return types.Range(types.Position(first, 0), types.Position(last, end))

    def replace(self, start: Position, end: Position, text: str) -> None:
        """Replace the text between two positions."""
        first, beginning = start.line, self.lines[start.line][: start.column]
        if first and not beginning and self.lines[first - 1].endswith("\r"):
            first -= 1  # a \n inserted here would become a part of the previous line's end
            beginning = self.lines[first]
        lines = split_lines(beginning + text + self.lines[end.line][end.column :])
        if end.line + 1 < len(self.lines):
            lines.pop()  # it is empty, since the text continues with the next line
        self.lines[first : end.line + 1] = lines

    def end_of(self, line: int) -> str:
        """Return "\\n" for every line but the last."""
        return "\n" if line < len(self.lines) - 1 else ""

    def join(self, first: int, end: int) -> str:
        """Return the lines from `first` up to but not including `end`, each ended by "\\n"."""
        numbers = range(first, min(end, len(self.lines)))
        return "".join(self.content(number) + self.end_of(number) for number in numbers)

    def count_lines(self) -> int:
        """Return the number of lines, without the empty one behind the last line's end."""
        return len(self.lines) - (not self.lines[-1])


# The context of a completion, the text around the cursor and pieces of visited places, is byte for byte the
# same as in localspec/extras/editors/vim/autoload/localspec/context.vim, where the reasons are explained.
PREFIX_BYTES, SUFFIX_BYTES = 32768, 8192  # sent from before and after the cursor
BLOCK_LINES = 64

_PIECE_LINES = 48
_MAX_PIECE_BYTES = 4096
_MIN_FILLED_LINES = 4  # lines of a piece that are not blank
_MAX_PIECES = 12


def context_fields(document: Document, place: Position) -> dict[str, Any]:
    """Return the fields of a request for a completion at a position."""
    line, number = document.content(place.line), place.line
    below = _cut_end(document.join(number + 1, number + 1 + BLOCK_LINES), SUFFIX_BYTES)
    line_after = line[place.column :] + document.end_of(number)
    return {
        "input_prefix": _text_above(document, number),
        "prompt": _cut_beginning(line[: place.column], PREFIX_BYTES),
        "input_suffix": _cut_end(line_after + below, SUFFIX_BYTES),
    }


def file_name(uri: str) -> str:
    """Return a file's name without its folders."""
    return unquote(urlsplit(uri).path).rpartition("/")[2]


def _text_above(document: Document, line: int) -> str:
    """Return whole blocks of lines above a line, of at least PREFIX_BYTES bytes if there are as many.

    Whole blocks keep the beginning of the text unchanged while the cursor moves.
    """
    first = (line + 1) // BLOCK_LINES * BLOCK_LINES
    size = len(_encode(document.join(first, line)))
    while first > 0 and (first >= line or size < PREFIX_BYTES):
        first -= BLOCK_LINES
        size += len(_encode(document.join(first, min(first + BLOCK_LINES, line))))
    return _cut_beginning(document.join(first, line), 2 * PREFIX_BYTES)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _cut_beginning(text: str, max_bytes: int) -> str:
    """Return the end of a text, cut at a multiple of half of `max_bytes`.

    So its beginning stays the same for a while as the text grows.
    """
    data, half = _encode(text), max_bytes // 2
    cut = max(-(-(len(data) - max_bytes) // half) * half, 0)
    return data[cut:].decode("utf-8", "ignore")


def _cut_end(text: str, max_bytes: int) -> str:
    return _encode(text)[:max_bytes].decode("utf-8", "ignore")


class Piece(NamedTuple):
    """Some lines around a place that was visited."""

    uri: str
    first: int
    text: str


class VisitedPlaces:
    """The places that were visited. New ones are sent from the next quiet moment on.

    They precede the prompt, so that a change of them requires prefilling it again.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []  # pieces that are sent, oldest first
        self._next: list[Piece] = []  # pieces that wait for the next quiet moment
        self._last_lines: dict[str, int] = {}  # the line that was left last, by document

    def extra(self) -> list[dict[str, str]]:
        """Return the pieces as `input_extra` of a request."""
        return [{"filename": file_name(piece.uri), "text": piece.text} for piece in self._pieces]

    def leave(self, document: Document, line: int) -> None:
        """Note a place that the cursor has left."""
        self._last_lines[document.uri] = line
        first = max(0, line - _PIECE_LINES // 2)
        text = _cut_end(document.join(first, first + _PIECE_LINES), _MAX_PIECE_BYTES)
        if sum(bool(row.strip()) for row in text.split("\n")) >= _MIN_FILLED_LINES:
            piece = Piece(document.uri, first, text)
            self._next = [*_without_overlapping(self._next, piece), piece]

    def rest(self, document: Document, line: int) -> None:
        """Note the place where the cursor rests if it is far from the last one in its document."""
        if abs(line - self._last_lines.get(document.uri, -BLOCK_LINES)) >= BLOCK_LINES:
            self.leave(document, line)

    def send_waiting(self) -> bool:
        """Send the waiting pieces from now on. Return whether there were any."""
        if not self._next:
            return False
        for piece in self._next:
            self._pieces = _without_overlapping(self._pieces, piece)
        self._pieces = [*self._pieces, *self._next][-_MAX_PIECES:]
        self._next = []
        return True


def _without_overlapping(pieces: list[Piece], piece: Piece) -> list[Piece]:
    """Return the pieces that do not show much of what `piece` shows."""
    return [
        other
        for other in pieces
        if other.text != piece.text
        and (other.uri != piece.uri or abs(other.first - piece.first) >= _PIECE_LINES * 3 // 4)
    ]


_MAX_SUGGESTION_TOKENS = 64
_MAX_SUGGESTION_MS = 3000
_QUIET_S = 1.0  # time without a request after which visited places are prefilled
_SETTLE_S = 0.2  # time after which a document that was opened or saved is announced
_MAX_WHOLE_LINES = 160  # of a document that a prompt has from its beginning, wherever the cursor is
_SAMPLING = {"top_k": 40, "top_p": 0.99, "samplers": ["top_k", "top_p", "infill"]}
EDIT_HINT = "Begin the selection with a comment: # localspec: add types"  # short enough for one row


class Suggestion(NamedTuple):
    """Text to insert at a position, and the part of the line before it."""

    document: Document
    place: Position
    before: str
    text: str


class Lines(NamedTuple):
    """Whole lines of a document, including the last one."""

    document: Document
    first: int
    last: int

    @property
    def text(self) -> str:
        return "\n".join(map(self.document.content, range(self.first, self.last + 1)))

    @property
    def fenced(self) -> str:
        return fence(self.text, self.document.language)


class EditorSession:
    """The documents and requests of one editor. `model` answers; if it is "", the configured pair."""

    def __init__(self, daemon: AsyncDaemon, model: str = "") -> None:
        self.documents: dict[str, Document] = {}
        self._daemon = daemon
        self._model = {"model": model} if model else {}
        self._visited = VisitedPlaces()
        self._cursor: tuple[Document, int] | None = None
        self._pending_completions = 0  # completions that the editor waits for
        self._prefill_task: asyncio.Task[None] | None = None
        self.next_edits = NextEdits(daemon, self._model)

    def close(self, uri: str) -> None:
        """Forget a document. Its visited places are kept."""
        document = self.documents.pop(uri, None)
        if document and self._cursor and self._cursor[0] is document:
            self._visited.leave(*self._cursor)
            self._cursor = None

    def move_cursor(self, document: Document, line: int) -> None:
        """Note that the cursor is in this line now."""
        if self._cursor and self._cursor[0] is not document:
            self._visited.leave(*self._cursor)
        self._cursor = (document, line)

    async def suggest(self, uri: str, line: int, units: int) -> Suggestion | None:
        """Return a continuation at a position; None if there is none.

        Raises LocalspecError if there is no daemon, or it reports an error.
        """
        document = self.documents.get(uri)
        if document is None:
            return None
        place = document.to_position(line, units)
        content = document.content(place.line)
        before, after = content[: place.column], content[place.column :]
        self.move_cursor(document, place.line)
        request = {
            **self._completion_request(document, place),
            "n_predict": _MAX_SUGGESTION_TOKENS,
            "t_max_predict_ms": _MAX_SUGGESTION_MS,
            **_SAMPLING,
            "stop": ["\n"] if after.strip() else [],
            "response_fields": ["content"],
        }
        text = await self._infill(request)
        end = min(place.line + 2 + text.count("\n"), document.count_lines())
        below = list(map(document.content, range(place.line + 1, end)))
        text = trim_suggestion(text, after, below)
        return Suggestion(document, place, before, text) if text else None

    def _completion_request(self, document: Document, place: Position) -> dict[str, Any]:
        request = context_fields(document, place)
        request["input_extra"] = self._visited.extra()
        return {**request, **self._model, "localspec": {"kind": "complete"}}

    async def _infill(self, request: dict[str, Any]) -> str:
        if self._prefill_task:
            self._prefill_task.cancel()
        self._pending_completions += 1
        try:
            answer = await self._daemon.run(lambda client: client.infill(request), patient=False)
        finally:
            self._pending_completions -= 1
        self._prefill_task = asyncio.create_task(self._prefill_visited())
        text = answer.get("content")
        return text if isinstance(text, str) else ""

    async def _prefill_visited(self) -> None:
        """Let the daemon prefill visited places in a quiet moment, so that the next request is faster."""
        await asyncio.sleep(_QUIET_S)
        if self._pending_completions or not self._cursor:
            return
        document, line = self._cursor
        self._visited.rest(document, line)
        if self._visited.send_waiting():
            await self._prefill(document, line)

    async def _prefill(self, document: Document, line: int, *, ahead: bool = False) -> None:
        """Let the daemon prefill a completion; `ahead`: in idle time, if a daemon runs."""
        request = self._completion_request(document, Position(line, len(document.content(line))))
        request |= {"n_predict": 0, "response_fields": [""], "localspec": {"ahead": ahead}}
        with contextlib.suppress(LocalspecError):  # the next completion reports the error
            await self._daemon.run(
                lambda client: client.infill(request), patient=False, starts=not ahead
            )

    def announce(self, document: Document) -> None:
        """Have a document that was opened or saved prefilled for its first completion while nobody waits."""
        if self._prefill_task:
            self._prefill_task.cancel()
        self._prefill_task = asyncio.create_task(self._prefill_announced(document))

    async def _prefill_announced(self, document: Document) -> None:
        await asyncio.sleep(_SETTLE_S)
        last = len(document.lines) - 1
        owner, line = self._cursor or (None, last)
        is_known = owner is document  # else it is read to its end, and begins alike if it is short
        if not self._pending_completions and (is_known or last <= _MAX_WHOLE_LINES):
            await self._prefill(document, min(line, last) if is_known else last, ahead=True)

    def lines(self, uri: str, first: int, last: int) -> Lines:
        """Return lines of a document, limited to those that exist.

        Raises UsageError if the document is not open in the editor.
        """
        document = self.documents.get(uri)
        if document is None:
            raise UsageError(f"{uri} is not open in the editor.")
        last = max(min(last, document.count_lines() - 1), 0)
        return Lines(document, max(min(first, last), 0), last)

    async def explain(self, lines: Lines) -> str:
        """Return an explanation of the lines.

        Raises LocalspecError if there is no daemon, or it reports an error.
        """
        name = file_name(lines.document.uri)
        question = explain_question(name, lines.first + 1, lines.last + 1, lines.fenced)
        extensions = {"kind": "explain", "conversation": "new"}
        return (await self._chat(question, extensions))["message"]["content"] or ""

    async def edit(self, lines: Lines, instruction: str = "") -> tuple[Lines, str] | None:
        """Return the lines where they are now, and their text changed by an instruction.

        Without an instruction, that of a comment in the first line counts. None: the answer changes nothing.
        Raises UsageError if there is no instruction, or the lines were edited meanwhile, and LocalspecError
        if there is no daemon, or it reports an error.
        """
        document, first, last = lines
        request, part = instruction, lines
        if not request:
            request = parse_instruction(document.content(first))
            part = lines._replace(first=first + 1)  # the comment itself is removed
            if not request or part.first > last:
                raise UsageError(EDIT_HINT)
        old, old_part, block = lines.text, part.text, part.fenced
        is_whole_file = part.first == 0 and last == document.count_lines() - 1
        question = edit_question(file_name(document.uri), block, request, whole=is_whole_file)
        prediction = {"type": "content", "content": block}
        answer = await self._chat(question, {"kind": "edit"}, temperature=0, prediction=prediction)
        if answer["finish_reason"] == "length":
            cure = "select fewer lines."
            raise LocalspecError(f"The answer does not fit into the pair's context; {cure}")
        content = answer["message"]["content"] or ""
        new = extract_code(content, old_part)
        if not new.strip() and content.strip():
            raise LocalspecError(f"The answer has no code: {content.strip()[:200]}")
        if not new.strip() or new == old_part:
            return None
        return self._locate(document, first, old.split("\n")), new.replace("\n", document.line_end)

    def _locate(self, document: Document, first: int, old: list[str]) -> Lines:
        """Return where the old lines are now: in the same place, or in the only other place.

        Raises UsageError if they are nowhere, or in several places.
        """
        contents, count = [*map(document.content, range(len(document.lines)))], len(old)
        starts = range(len(contents) - count + 1)
        positions = [at for at in starts if contents[at : at + count] == old]
        if first not in positions and len(positions) == 1:
            first = positions[0]
        if first not in positions or self.documents.get(document.uri) is not document:
            raise UsageError("Nothing was changed: those lines have been edited meanwhile.")
        return Lines(document, first, first + count - 1)

    async def _chat(
        self, question: str, extensions: dict[str, str], **fields: Any
    ) -> dict[str, Any]:
        """Return the only choice of an answer.

        Raises LocalspecError if there is no daemon, or it reports an error.
        """
        messages = [{"role": "user", "content": question}]
        request = {"messages": messages, "localspec": extensions, **self._model, **fields}
        answer = await self._daemon.run(lambda client: client.chat(request))
        choice: dict[str, Any] = answer["choices"][0]
        return choice


# The plug-in for Vim uses the same text.
_EDIT_PROMPT = Path(__file__).parent / "vim" / "prompts" / "edit"
_WORDS = re.compile(r"[0-9A-Za-z_]+|[^0-9A-Za-z_\s]")
_INSTRUCTION = re.compile(r"localspec:\s*(?P<text>.*?)\s*(?:\*/|-->|\*\))?\s*$")


def fence(text: str, language: str = "") -> str:
    """Put a text between fences that are longer than any fence in it."""
    fence = "```"
    while re.search(rf"^\s*{fence}", text, re.MULTILINE):
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def explain_question(name: str, first: int, last: int, block: str) -> str:
    """Return a question about lines, which are counted from 1 here."""
    return f"{name or 'Text'}, lines {first} to {last}:\n{block}\n\nExplain this."


def edit_question(name: str, block: str, instruction: str, *, whole: bool) -> str:
    """Return the question for the new version of a fenced text. `whole`: it is the whole file.

    It is worded for small models, which otherwise write only what they change: the number of lines
    comes before the change, and the change comes last.
    """
    file_name = f" {name}" if name else ""
    subject, part = ("the file", "file") if whole else ("a part of the file", "part")
    request = instruction if instruction.endswith((".", "!", "?")) else f"{instruction}."
    line_count = block.count("\n") - 1
    line_phrase = "the one line" if line_count == 1 else f"all {line_count} lines"
    template = _EDIT_PROMPT.read_text(encoding="utf-8").rstrip("\n")
    return template % (subject + file_name, block, line_phrase, part, request)


def extract_code(answer: str, old: str) -> str:
    """Return an answer's code block.

    Without a block it is the whole answer if that shares most of its words and signs with the old text, and
    else nothing, because prose must not replace code.
    """
    answer = answer.replace("\r", "")
    if code_blocks := blocks(answer):
        return code_blocks[0]
    words, old_words = Counter(_WORDS.findall(answer)), Counter(_WORDS.findall(old))
    common = (words & old_words).total()
    is_similar = common > 0 and 10 * common >= 3 * (words.total() + old_words.total())
    return answer.strip("\n") if is_similar else ""


def parse_instruction(line: str) -> str:
    """Return the instruction in a comment such as `# localspec: add types`; empty for other lines."""
    match = _INSTRUCTION.search(line)
    return match["text"] if match else ""


_BLANKS = " \t\n"
_MAX_LABEL_CHARACTERS = 60  # of a line in a menu
_WORD = re.compile(r"\w*$")


def trim_suggestion(text: str, after: str, below: Sequence[str]) -> str:
    """Return a completion without the text that already follows the cursor.

    Such text is removed both in the cursor's line and in the lines below, and blanks at the end as
    well. It is the same as `s:fitting` of localspec/extras/editors/vim/autoload/localspec/ghost.vim.
    """
    text = text.replace("\r", "").rstrip(_BLANKS)
    if after := after.strip():
        return text.partition("\n")[0].removesuffix(after)
    lines = text.split("\n")
    for number in range(min(len(below), len(lines) - 1), 0, -1):
        if lines[-number:] == [*below[:number]] and any(map(str.strip, below[:number])):
            return "\n".join(lines[:-number]).rstrip(_BLANKS)
    return text


def make_menu_item(text: str, before: str) -> tuple[str, str, str]:
    """Return the label and text of a menu's item for a suggestion, and what it replaces before the cursor.

    That is the word that the suggestion continues in its line, which begins with `before`. Editors look for
    items that begin with that word.
    """
    match = _WORD.search(before)
    word = match.group() if match else ""
    first, *following = (word + text).strip().split("\n")
    is_cut = len(first) > _MAX_LABEL_CHARACTERS or bool(following)
    return first[:_MAX_LABEL_CHARACTERS] + "…" * is_cut, word + text, word


EXPLAIN, EDIT = "localspec.explain", "localspec.edit"
ACCEPT_EDIT, REJECT_EDIT = "localspec.acceptEdit", "localspec.rejectEdit"
# Characters behind which a completion is useful although no word has begun.
_TRIGGERS = [*".([{,=:"]
_REWRITE = types.CodeActionKind.RefactorRewrite
INLINE_EDIT = "textDocument/copilotInlineEdit"


class Server(LanguageServer):
    """A language server for one editor. Explanations are files in `folder`, which the caller removes.

    A keystroke never causes an error message. Without a suggestion there is none, and the editor's log says
    why, once.
    """

    def __init__(self, desk: EditorSession, folder: Path) -> None:
        super().__init__("localspec", localspec.__version__, protocol_cls=Protocol)
        self.desk = desk
        self._folder = folder
        self._numbers = itertools.count(1)
        self._last_warning = ""
        self._running: set[asyncio.Task[None]] = set()

    async def suggest(self, uri: str, position: types.Position) -> Suggestion | None:
        """Return the desk's suggestion. Errors are logged and give None."""
        return await self._quietly(self.desk.suggest(uri, position.line, position.character))

    async def propose(self, uri: str, position: Any) -> list[tuple[Hunk, dict[str, Any]]]:
        """Return the next edits around a position, as hunks and as Copilot's server does."""
        document = self.desk.documents.get(uri)
        if document is None:
            return []
        place = document.to_position(position.line, position.character)
        edits = await self._quietly(self.desk.next_edits.propose(document, *place))
        return [
            (
                hunk,
                {
                    **_replacement(document, hunk),
                    "textDocument": {"uri": uri, "version": document.version},
                    "command": {"title": "Accept", "command": ACCEPT_EDIT, "arguments": [number]},
                },
            )
            for number, hunk in edits or ()
        ]

    async def _quietly(self, asked: Awaitable[Result]) -> Result | None:
        try:
            answer = await asked
        except Cancelled:  # a newer keystroke has replaced the request
            return None
        except LocalspecError as error:
            if error.message != self._last_warning:
                self._last_warning = error.message
                message = types.LogMessageParams(types.MessageType.Warning, error.message)
                self.window_log_message(message)
            return None
        self._last_warning = ""
        return answer

    def run(self, name: str, arguments: Sequence[Any]) -> None:
        """Start a command for the lines `{"uri", "first", "last"}`, with an optional instruction.

        It continues after this returns, because some editors do nothing else while they wait, and give up
        soon. Raises JsonRpcInvalidParams if the command or its arguments are invalid.
        """
        if name in (ACCEPT_EDIT, REJECT_EDIT) and len(arguments) == 1:
            self.desk.next_edits.settle(int(arguments[0]), refused=name == REJECT_EDIT)
            return
        try:
            location, *words = arguments
            uri, first, last = str(location["uri"]), int(location["first"]), int(location["last"])
            if name not in (EXPLAIN, EDIT) or not all(isinstance(word, str) for word in words):
                raise ValueError(f"{name} {words}")
        except (KeyError, TypeError, ValueError) as error:
            raise JsonRpcInvalidParams.of(error) from error
        task = asyncio.create_task(self._run(name, uri, first, last, " ".join(words)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, name: str, uri: str, first: int, last: int, words: str) -> None:
        try:
            lines = self.desk.lines(uri, first, last)
            async with _progress(self, name.partition(".")[2]):
                if name == EXPLAIN:
                    await self._show(await self.desk.explain(lines))
                elif edit := await self.desk.edit(lines, words):
                    await self._apply(*edit)
                else:
                    self.say("The answer changes nothing.")
        except (LocalspecError, JsonRpcException) as error:
            self.say(str(error), types.MessageType.Error)

    def say(self, text: str, kind: types.MessageType = types.MessageType.Info) -> None:
        self.window_show_message(types.ShowMessageParams(kind, text))

    async def _show(self, text: str) -> None:
        """Show a text as a document if the editor can open one, else as a message."""
        window = self.client_capabilities.window
        if window and window.show_document and window.show_document.support:
            path = self._folder / f"explanation-{next(self._numbers)}.md"
            path.write_text(text + "\n", encoding="utf-8")
            request = types.ShowDocumentParams(path.as_uri(), external=False, take_focus=False)
            if (await self.window_show_document_async(request)).success:
                return
        self.say(text)

    async def _apply(self, lines: Lines, text: str) -> None:
        document, first, last = lines
        change = types.TextEdit(document.line_range(first, last), text)
        workspace = self.client_capabilities.workspace
        can = workspace.workspace_edit if workspace else None
        edit = types.WorkspaceEdit(changes={document.uri: [change]})
        if (
            can and can.document_changes
        ):  # the editor refuses the edit if the user has typed meanwhile
            name = types.OptionalVersionedTextDocumentIdentifier(document.uri, document.version)
            edit = types.WorkspaceEdit(document_changes=[types.TextDocumentEdit(name, [change])])
        params = types.ApplyWorkspaceEditParams(edit, label="localspec")
        result = await self.workspace_apply_edit_async(params)
        if not result.applied:
            reason = f": {result.failure_reason}" if result.failure_reason else "."
            self.say(f"The editor did not take the change{reason}", types.MessageType.Error)


@contextlib.asynccontextmanager
async def _progress(server: Server, what: str) -> AsyncIterator[None]:
    """Show progress in the editor while an answer is generated, with a way to cancel it."""
    window = server.client_capabilities.window
    if not (window and window.work_done_progress):
        yield
        return
    progress, task = server.work_done_progress, asyncio.current_task()
    token = f"localspec-{id(task)}"
    await progress.create_async(token)
    title = f"localspec: {what}"
    progress.begin(token, types.WorkDoneProgressBegin(title, cancellable=True))
    if task:
        progress.tokens[token].add_done_callback(lambda _: task.cancel())
    try:
        yield
    finally:
        progress.tokens.pop(token, None)
        progress.end(token, types.WorkDoneProgressEnd())


class Protocol(LanguageServerProtocol):
    """pygls' protocol with our own documents and commands.

    pygls splits lines as str.splitlines does, and requires each command to declare its arguments.
    """

    _server: Server

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> None:
        item = params.text_document
        kind = types.PositionEncodingKind(self.workspace.position_encoding or "utf-16")
        document = Document(item.uri, item.text, kind.value, str(item.language_id), item.version)
        self._server.desk.documents[item.uri] = document
        self._server.desk.next_edits.note(document)
        self._server.desk.announce(document)

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self._server.desk.documents.get(params.text_document.uri)
        if document is None:
            return
        for change in params.content_changes:
            if isinstance(change, types.TextDocumentContentChangePartial):
                ends = (change.range.start, change.range.end)
                start, end = (document.to_position(each.line, each.character) for each in ends)
                document.replace(start, end, change.text)
                self._server.desk.move_cursor(document, start.line)
            else:
                document.lines = split_lines(change.text)
        document.version = params.text_document.version
        self._server.desk.next_edits.note(document)

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> None:
        self._server.desk.close(params.text_document.uri)

    # pygls has a generator here that awaits its own commands. Ours return at once.
    @lsp_method(types.WORKSPACE_EXECUTE_COMMAND)
    def lsp_workspace__execute_command(  # type: ignore[override]
        self, params: types.ExecuteCommandParams
    ) -> None:
        self._server.run(params.command, params.arguments or [])


# The handlers that are registered below. pygls passes the server to each of them.


async def suggest_inline(
    ls: Server, params: types.InlineCompletionParams
) -> types.InlineCompletionList:
    """Return a suggestion that the editor shows as ghost text, or the next edit of the cursor's line."""
    uri, position = params.text_document.uri, params.position
    if suggestion := await ls.suggest(uri, position):
        cursor = types.Range(position, position)
        return types.InlineCompletionList(
            [types.InlineCompletionItem(suggestion.text, range=cursor)]
        )
    for hunk, _ in await ls.propose(uri, position):
        if (hunk.start, len(hunk.old)) == (position.line, 1) and hunk.new:
            line = ls.desk.documents[uri].line_range(hunk.start, hunk.start)
            item = types.InlineCompletionItem("\n".join(hunk.new), range=line)
            return types.InlineCompletionList([item])
    return types.InlineCompletionList([])


async def suggest_edits(ls: Server, params: Any) -> dict[str, Any]:
    """Return the next edits, as the language server of GitHub Copilot does."""
    edits = await ls.propose(params.textDocument.uri, params.position)
    return {"edits": [edit for _, edit in edits]}


def _replacement(document: Document, hunk: Hunk) -> dict[str, Any]:
    """Return what a hunk replaces, and by which text. Line ends are among it where lines come or go."""
    first, end, last = hunk.start, hunk.start + len(hunk.old), len(document.lines) - 1
    lines = [*hunk.new]
    if hunk.old and lines:
        place = document.line_range(first, end - 1)
    elif end <= last:
        place = types.Range(types.Position(first, 0), types.Position(end, 0))
        lines += [""] if lines else []
    else:
        place = document.line_range(first - 1, end - 1)
        lines.insert(0, document.content(first - 1))
    return {"range": place, "text": document.line_end.join(lines)}


async def suggest_in_menu(ls: Server, params: types.CompletionParams) -> types.CompletionList:
    """Return a suggestion that the editor shows in its completion menu."""
    items = []
    if suggestion := await ls.suggest(params.text_document.uri, params.position):
        label, text, word = make_menu_item(suggestion.text, suggestion.before)
        place = suggestion.place._replace(column=suggestion.place.column - len(word))
        start = types.Position(place.line, suggestion.document.to_units(place))
        preview = fence(text, suggestion.document.language)
        items = [
            types.CompletionItem(
                label,
                kind=types.CompletionItemKind.Text,
                detail="localspec",
                documentation=types.MarkupContent(types.MarkupKind.Markdown, preview),
                filter_text=text,
                text_edit=types.TextEdit(types.Range(start, params.position), text),
                insert_text_mode=types.InsertTextMode.AsIs,
            )
        ]
    return types.CompletionList(is_incomplete=True, items=items)


def list_code_actions(ls: Server, params: types.CodeActionParams) -> list[types.CodeAction]:
    """Return the actions for the selected lines: explain and edit."""
    uri, (start, end) = params.text_document.uri, (params.range.start, params.range.end)
    last = end.line - (end.character == 0 and end.line > start.line)
    location = {"uri": uri, "first": start.line, "last": last}
    document = ls.desk.documents.get(uri)
    instruction = parse_instruction(document.content(start.line)) if document else ""
    edit_title = f"localspec: edit{f': {instruction}' if instruction else ' as a comment says'}"
    choices = [("localspec: explain", "", EXPLAIN), (edit_title, _REWRITE, EDIT)]
    return [
        types.CodeAction(title, kind=kind, command=types.Command(title, name, arguments=[location]))
        for title, kind, name in choices
        if _is_requested(kind, params.context.only)
    ]


def _is_requested(kind: str, only: Any) -> bool:
    """Return whether an action's kind is one of the requested kinds, or inside one of them."""
    return only is None or any(f"{kind}.".startswith(f"{outer}.") or outer == "" for outer in only)


def create_server(desk: EditorSession, folder: Path) -> Server:
    """Return a server that offers what the editor can show."""
    server = Server(desk, folder)

    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        text_document = params.capabilities.text_document
        if text_document and text_document.inline_completion:
            feature = server.feature(
                types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions()
            )
            feature(suggest_inline)
        else:
            options = types.CompletionOptions(trigger_characters=_TRIGGERS)
            server.feature(types.TEXT_DOCUMENT_COMPLETION, options)(suggest_in_menu)

    options = types.CodeActionOptions(code_action_kinds=["", _REWRITE])
    server.feature(types.TEXT_DOCUMENT_CODE_ACTION, options)(list_code_actions)
    server.feature(INLINE_EDIT)(suggest_edits)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def announce(params: types.DidSaveTextDocumentParams) -> None:
        if document := desk.documents.get(params.text_document.uri):
            desk.announce(document)

    for name in ("textDocument/didFocus", "textDocument/didShowInlineEdit"):
        server.feature(name)(lambda *_: None)
    for name in (EXPLAIN, EDIT, ACCEPT_EDIT, REJECT_EDIT):
        # This only declares the command. The protocol calls `Server.run` instead.
        server.command(name)(lambda *_: None)
    return server


def serve(model: str) -> None:
    """Serve until the editor or its connection ends."""
    # pygls warns about a cancel that comes after its request has ended, which is harmless.
    logging.getLogger("pygls").setLevel(logging.ERROR)
    # pygls closes the stream that it writes to, so it gets a duplicate of standard output.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    with tempfile.TemporaryDirectory(prefix="localspec-lsp-") as folder:
        server = create_server(EditorSession(AsyncDaemon(), model), Path(folder))
        server.start_io(sys.stdin.buffer, stdout)
