"""One editor's texts, and what is asked about them, without the protocol that both come by."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

from localspec.cli.lsp import context, questions, suggestions
from localspec.cli.lsp.documents import Document, Place
from localspec.client.tasks import Daemon
from localspec.errors import LocalspecError, UsageError

_TOKENS = 64
_PATIENCE = 3000  # milliseconds that a suggestion may be written
_QUIET = 1.0  # seconds without a request until what was visited is read ahead
_SAMPLING = {"top_k": 40, "top_p": 0.99, "samplers": ["top_k", "top_p", "infill"]}
HOW = "Begin the selection with a comment: # localspec: add types"  # one row of most editors


class Suggestion(NamedTuple):
    """Text for a place, and the line up to there."""

    document: Document
    place: Place
    before: str
    text: str


class Lines(NamedTuple):
    """Whole lines of a document: from the first up to the last."""

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
    """Lines, and what they are to be."""

    lines: Lines
    text: str


class Desk:
    """`model`: the pair that is asked; "": the configured one."""

    def __init__(self, daemon: Daemon, model: str = "") -> None:
        self.documents: dict[str, Document] = {}
        self._daemon = daemon
        self._model = {"model": model} if model else {}
        self._visited = context.Visited()
        self._here: tuple[Document, int] | None = None
        self._asked = 0  # completions that somebody waits for
        self._resting: asyncio.Task[None] | None = None

    def open(self, document: Document) -> None:
        self.documents[document.uri] = document

    def close(self, uri: str) -> None:
        """Forget a document; what was visited in it stays."""
        document = self.documents.pop(uri, None)
        if document and self._here and self._here[0] is document:
            self._visited.left(*self._here)
            self._here = None

    def at(self, document: Document, line: int) -> None:
        """Somebody is at this line now."""
        if self._here and self._here[0] is not document:
            self._visited.left(*self._here)
        self._here = (document, line)

    # ------------------------------------------------------------------ suggestions

    async def suggest(self, uri: str, line: int, units: int) -> Suggestion | None:
        """What to go on with at a position; None where there is nothing.

        Raises:
            LocalspecError: no daemon, or what it answered.
        """
        document = self.documents.get(uri)
        if document is None:
            return None
        place = document.place(line, units)
        content = document.content(place.line)
        before, after = content[: place.column], content[place.column :]
        self.at(document, place.line)
        request = {
            **self._around(document, place),
            **{"n_predict": _TOKENS, "t_max_predict_ms": _PATIENCE, **_SAMPLING},
            "stop": ["\n"] if after.strip() else [],
            "response_fields": ["content"],
        }
        text = await self._infill(request)
        below = range(
            place.line + 1, min(place.line + 1 + text.count("\n") + 1, self._end(document))
        )
        text = suggestions.fitting(text, after, [*map(document.content, below)])
        return Suggestion(document, place, before, text) if text else None

    @staticmethod
    def _end(document: Document) -> int:
        """How many lines it has, without the empty one behind the last line's end."""
        return len(document.lines) - (not document.lines[-1])

    def _around(self, document: Document, place: Place) -> dict[str, Any]:
        request = context.around(document, place)
        request["input_extra"] = self._visited.extra()
        return {**request, **self._model, "localspec": {"kind": "complete"}}

    async def _infill(self, request: dict[str, Any]) -> str:
        if self._resting:
            self._resting.cancel()
        self._asked += 1
        try:
            answer = await self._daemon.ask(lambda client: client.infill(request), patient=False)
        finally:
            self._asked -= 1
        self._resting = asyncio.create_task(self._read_ahead())
        text = answer.get("content")
        return text if isinstance(text, str) else ""

    async def _read_ahead(self) -> None:
        """In a quiet moment the daemon reads what was visited: the next key has only itself to read."""
        await asyncio.sleep(_QUIET)
        if self._asked or not self._here:
            return
        document, line = self._here
        self._visited.rests(document, line)
        if self._visited.take():
            place = Place(line, len(document.content(line)))
            request = {**self._around(document, place), "n_predict": 0, "response_fields": [""]}
            with contextlib.suppress(LocalspecError):  # the next key's request tells what is wrong
                await self._daemon.ask(lambda client: client.infill(request), patient=False)

    # ------------------------------------------------------------------ questions

    def lines(self, uri: str, first: int, last: int) -> Lines:
        """Raises UsageError: the editor has not opened that document."""
        document = self.documents.get(uri)
        if document is None:
            raise UsageError(f"{uri} is not open in the editor.")
        last = max(min(last, self._end(document) - 1), 0)
        return Lines(document, max(min(first, last), 0), last)

    async def explain(self, lines: Lines) -> str:
        """Raises LocalspecError: no daemon, or what it answered."""
        name = context.name(lines.document.uri)
        question = questions.about(name, lines.first + 1, lines.last + 1, lines.fenced)
        ours = {"kind": "explain", "conversation": "new"}
        return (await self._chat(question, ours))["message"]["content"] or ""

    async def edit(self, lines: Lines, instruction: str = "") -> Edit | None:
        """The lines changed as the instruction says, or as a comment in the first of them does; None where
        the answer changes nothing.

        Raises:
            UsageError: there is neither, or somebody has changed the lines meanwhile.
            LocalspecError: no daemon, or what it answered.
        """
        document, first, last = lines
        wanted, part = instruction, lines
        if not wanted:
            wanted = questions.instruction(document.content(first))
            part = lines._replace(first=first + 1)  # the comment goes with what it asked for
            if not wanted or part.first > last:
                raise UsageError(HOW)
        old, asked, block = lines.text, part.text, part.fenced
        whole = part.first == 0 and last == self._end(document) - 1
        question = questions.edit(context.name(document.uri), block, wanted, whole=whole)
        prediction = {"type": "content", "content": block}
        answer = await self._chat(question, {"kind": "edit"}, temperature=0, prediction=prediction)
        if answer["finish_reason"] == "length":
            raise LocalspecError(
                "The answer does not fit into the pair's context; select fewer lines."
            )
        said = answer["message"]["content"] or ""
        new = questions.code(said, asked)
        if not new.strip() and said.strip():
            raise LocalspecError(f"The answer has no code: {said.strip()[:200]}")
        if not new.strip() or new == asked:
            return None
        found = self._found(document, first, old.split("\n"))
        return Edit(found, new.replace("\n", document.end))

    def _found(self, document: Document, first: int, old: list[str]) -> Lines:
        """Where these lines are now: where they were, or the one other place where they stand.

        Raises:
            UsageError: nowhere, or in several.
        """
        contents = [*map(document.content, range(len(document.lines)))]
        number = len(old)
        every = [
            at
            for at in range(len(contents) - number + 1)
            if contents[at] == old[0] and contents[at : at + number] == old
        ]
        if first not in every and len(every) == 1:
            first = every[0]
        if first not in every or self.documents.get(document.uri) is not document:
            raise UsageError("Nothing was changed: those lines have been edited meanwhile.")
        return Lines(document, first, first + number - 1)

    async def _chat(self, question: str, ours: dict[str, str], **fields: Any) -> dict[str, Any]:
        """The answer's one choice. Raises LocalspecError."""
        request = {
            **{"messages": [{"role": "user", "content": question}], "localspec": ours},
            **self._model,
            **fields,
        }
        answer = await self._daemon.ask(lambda client: client.chat(request))
        choice: dict[str, Any] = answer["choices"][0]
        return choice
