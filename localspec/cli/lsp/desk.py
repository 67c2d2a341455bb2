"""One editor's texts and the requests about them, independent of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

from localspec.cli.lsp import context, questions, suggestions
from localspec.cli.lsp.documents import Document, Place
from localspec.client.tasks import Daemon
from localspec.errors import LocalspecError, UsageError

_MAX_SUGGESTION_TOKENS = 64
_MAX_SUGGESTION_MS = 3000
_QUIET_S = 1.0  # time without a request after which visited places are prefilled
_SAMPLING = {"top_k": 40, "top_p": 0.99, "samplers": ["top_k", "top_p", "infill"]}
EDIT_HINT = "Begin the selection with a comment: # localspec: add types"  # short enough for one row


class Suggestion(NamedTuple):
    """Text to insert at a position, and the part of the line before it."""

    document: Document
    place: Place
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
        return questions.fenced(self.text, self.document.language)


class Edit(NamedTuple):
    """Lines, and their replacement."""

    lines: Lines
    text: str


class Desk:
    """The documents and requests of one editor.

    model: the pair that answers; "": the configured one.
    """

    def __init__(self, daemon: Daemon, model: str = "") -> None:
        self.documents: dict[str, Document] = {}
        self._daemon = daemon
        self._model = {"model": model} if model else {}
        self._visited = context.Visited()
        self._cursor: tuple[Document, int] | None = None
        self._pending_completions = 0  # completions that the editor waits for
        self._prefill_task: asyncio.Task[None] | None = None

    def open(self, document: Document) -> None:
        self.documents[document.uri] = document

    def close(self, uri: str) -> None:
        """Forget a document. Its visited places are kept."""
        document = self.documents.pop(uri, None)
        if document and self._cursor and self._cursor[0] is document:
            self._visited.left(*self._cursor)
            self._cursor = None

    def at(self, document: Document, line: int) -> None:
        """Note that the cursor is in this line now."""
        if self._cursor and self._cursor[0] is not document:
            self._visited.left(*self._cursor)
        self._cursor = (document, line)

    # ------------------------------------------------------------------ suggestions

    async def suggest(self, uri: str, line: int, units: int) -> Suggestion | None:
        """Return a continuation at a position; None if there is none.

        Raises:
            LocalspecError: there is no daemon, or it reports an error.
        """
        document = self.documents.get(uri)
        if document is None:
            return None
        place = document.place(line, units)
        content = document.content(place.line)
        before, after = content[: place.column], content[place.column :]
        self.at(document, place.line)
        request = {
            **self._completion_request(document, place),
            **{
                "n_predict": _MAX_SUGGESTION_TOKENS,
                "t_max_predict_ms": _MAX_SUGGESTION_MS,
                **_SAMPLING,
            },
            "stop": ["\n"] if after.strip() else [],
            "response_fields": ["content"],
        }
        text = await self._infill(request)
        below = range(
            place.line + 1, min(place.line + 1 + text.count("\n") + 1, self._count_lines(document))
        )
        text = suggestions.fitting(text, after, [*map(document.content, below)])
        return Suggestion(document, place, before, text) if text else None

    @staticmethod
    def _count_lines(document: Document) -> int:
        """Return the number of lines, without the empty one behind the last line's end."""
        return len(document.lines) - (not document.lines[-1])

    def _completion_request(self, document: Document, place: Place) -> dict[str, Any]:
        request = context.around(document, place)
        request["input_extra"] = self._visited.extra()
        return {**request, **self._model, "localspec": {"kind": "complete"}}

    async def _infill(self, request: dict[str, Any]) -> str:
        if self._prefill_task:
            self._prefill_task.cancel()
        self._pending_completions += 1
        try:
            answer = await self._daemon.ask(lambda client: client.infill(request), patient=False)
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
        self._visited.rests(document, line)
        if self._visited.take():
            place = Place(line, len(document.content(line)))
            request = {
                **self._completion_request(document, place),
                "n_predict": 0,
                "response_fields": [""],
            }
            with contextlib.suppress(LocalspecError):  # the next completion reports the error
                await self._daemon.ask(lambda client: client.infill(request), patient=False)

    # ------------------------------------------------------------------ questions

    def lines(self, uri: str, first: int, last: int) -> Lines:
        """Return lines of a document, limited to those that exist.

        Raises:
            UsageError: the document is not open in the editor.
        """
        document = self.documents.get(uri)
        if document is None:
            raise UsageError(f"{uri} is not open in the editor.")
        last = max(min(last, self._count_lines(document) - 1), 0)
        return Lines(document, max(min(first, last), 0), last)

    async def explain(self, lines: Lines) -> str:
        """Return an explanation of the lines.

        Raises:
            LocalspecError: there is no daemon, or it reports an error.
        """
        name = context.name(lines.document.uri)
        question = questions.about(name, lines.first + 1, lines.last + 1, lines.fenced)
        extensions = {"kind": "explain", "conversation": "new"}
        return (await self._chat(question, extensions))["message"]["content"] or ""

    async def edit(self, lines: Lines, instruction: str = "") -> Edit | None:
        """Return the lines changed by an instruction, or by a comment in the first of them.

        None: the answer changes nothing.

        Raises:
            UsageError: there is no instruction, or the lines were edited meanwhile.
            LocalspecError: there is no daemon, or it reports an error.
        """
        document, first, last = lines
        request, part = instruction, lines
        if not request:
            request = questions.instruction(document.content(first))
            part = lines._replace(first=first + 1)  # the comment itself is removed
            if not request or part.first > last:
                raise UsageError(EDIT_HINT)
        old, old_part, block = lines.text, part.text, part.fenced
        is_whole_file = part.first == 0 and last == self._count_lines(document) - 1
        question = questions.edit(context.name(document.uri), block, request, whole=is_whole_file)
        prediction = {"type": "content", "content": block}
        answer = await self._chat(question, {"kind": "edit"}, temperature=0, prediction=prediction)
        if answer["finish_reason"] == "length":
            raise LocalspecError(
                "The answer does not fit into the pair's context; select fewer lines."
            )
        content = answer["message"]["content"] or ""
        new = questions.code(content, old_part)
        if not new.strip() and content.strip():
            raise LocalspecError(f"The answer has no code: {content.strip()[:200]}")
        if not new.strip() or new == old_part:
            return None
        current = self._locate(document, first, old.split("\n"))
        return Edit(current, new.replace("\n", document.end))

    def _locate(self, document: Document, first: int, old: list[str]) -> Lines:
        """Return where the old lines are now: in the same place, or in the only other place.

        Raises:
            UsageError: they are nowhere, or in several places.
        """
        contents = [*map(document.content, range(len(document.lines)))]
        count = len(old)
        positions = [
            position
            for position in range(len(contents) - count + 1)
            if contents[position] == old[0] and contents[position : position + count] == old
        ]
        if first not in positions and len(positions) == 1:
            first = positions[0]
        if first not in positions or self.documents.get(document.uri) is not document:
            raise UsageError("Nothing was changed: those lines have been edited meanwhile.")
        return Lines(document, first, first + count - 1)

    async def _chat(
        self, question: str, extensions: dict[str, str], **fields: Any
    ) -> dict[str, Any]:
        """Return the only choice of an answer.

        Raises:
            LocalspecError: there is no daemon, or it reports an error.
        """
        request = {
            **{"messages": [{"role": "user", "content": question}], "localspec": extensions},
            **self._model,
            **fields,
        }
        answer = await self._daemon.ask(lambda client: client.chat(request))
        choice: dict[str, Any] = answer["choices"][0]
        return choice
