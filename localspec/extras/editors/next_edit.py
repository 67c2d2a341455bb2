"""The next edit for a language server: what was changed before, the window that is sent, what was refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from localspec.client.tasks import AsyncDaemon
    from localspec.extras.editors.lsp import Document

_WINDOW_LINES = 10  # above and below the cursor's line
_CONTEXT_LINES = 100  # on both sides of the window
_MAX_SPAN_LINES = 12  # lines between which changes are one edit
_MAX_EDITS = 8
_MAX_OFFERS = 3  # versions of a text for which the same edit is offered, unless it is taken


class Hunk(NamedTuple):
    """Lines of a document from `start` on, as they are and as they become."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


def difference(old: Sequence[str], new: Sequence[str]) -> Hunk | None:
    """Return the lines between those that two texts share at their beginnings and ends."""
    shortest = min(len(old), len(new))
    start = next((n for n in range(shortest) if old[n] != new[n]), shortest)
    left = range(1, shortest - start + 1)
    end = next((n - 1 for n in left if old[-n] != new[-n]), shortest - start)
    hunk = Hunk(start, tuple(old[start : len(old) - end]), tuple(new[start : len(new) - end]))
    return hunk if hunk.old or hunk.new else None


def _file_name(uri: str) -> str:
    return unquote(urlsplit(uri).path).rpartition("/")[2]


class NextEdits:
    """The last changes of an editor's documents, and the edits that were proposed for them."""

    def __init__(self, daemon: AsyncDaemon, model: Mapping[str, str]) -> None:
        self._daemon, self._model = daemon, model
        # Of each document, its text before the edit that is being made, and now.
        self._texts: dict[str, tuple[list[str], list[str]]] = {}
        self._edits: list[tuple[str, Hunk]] = []
        # Of each edit, the versions of the text for which it was offered.
        self._offers: dict[tuple[str, Hunk], set[int]] = defaultdict(set)
        self._refused: set[tuple[str, Hunk]] = set()
        self._offered: list[tuple[str, Hunk]] = []

    def note(self, document: Document) -> None:
        """Note the present text of a document. Changes that are near to each other are one edit."""
        now = [*document.lines]
        before, last = self._texts.pop(document.uri, (now, now))
        edit = difference(before, now)
        if edit and last != before and max(len(edit.old), len(edit.new)) > _MAX_SPAN_LINES:
            if done := difference(before, last):
                self._edits = [*self._edits, (document.uri, done)][-_MAX_EDITS:]
            before = last
        self._texts[document.uri] = before, now

    def _recent(self) -> list[dict[str, Any]]:
        edits = [*self._edits]
        for uri, texts in self._texts.items():
            if edit := difference(*texts):
                edits.append((uri, edit))
        return [
            {
                "path": _file_name(uri),
                "old": "".join(hunk.old).replace("\r", ""),
                "new": "".join(hunk.new).replace("\r", ""),
                "line": hunk.start + 1,
            }
            for uri, hunk in edits[-_MAX_EDITS:]
        ]

    async def propose(self, document: Document, line: int, column: int) -> list[tuple[int, Hunk]]:
        """Return the edits of the lines around the cursor, each with its number.

        Raises LocalspecError if there is no daemon, or it reports an error.
        """
        version, edits, content = document.version, self._recent(), document.content(line)
        first, end = max(line - _WINDOW_LINES, 0), line + 1 + _WINDOW_LINES
        before = document.join(first, line) + content[:column]
        after = content[column:] + document.end_of(line) + document.join(line + 1, end)
        if not edits or not (before + after).strip():
            return []
        request = {
            **self._model,
            "path": _file_name(document.uri),
            "language": document.language,
            "above": document.join(max(first - _CONTEXT_LINES, 0), first),
            "before": before,
            "after": after,
            "below": document.join(end, end + _CONTEXT_LINES),
            "edits": edits,
            "first_line": first + 1,
        }
        answer = await self._daemon.run(lambda client: client.next_edit(request), patient=False)
        if document.version != version:
            return []
        hunks = [
            Hunk(first + edit["start"], tuple(edit["old"]), tuple(edit["new"]))
            for edit in answer["edits"]
        ]
        return [self._offer(document, hunk) for hunk in hunks if self._may_offer(document, hunk)]

    def _may_offer(self, document: Document, hunk: Hunk) -> bool:
        key = document.uri, hunk
        others = self._offers[key] - {document.version}
        return key not in self._refused and len(others) < _MAX_OFFERS

    def _offer(self, document: Document, hunk: Hunk) -> tuple[int, Hunk]:
        self._offers[document.uri, hunk].add(document.version)
        self._offered.append((document.uri, hunk))
        return len(self._offered) - 1, hunk

    def settle(self, number: int, *, refused: bool) -> None:
        """Note that an edit was taken, or refused, after which it is not proposed again."""
        if refused and 0 <= number < len(self._offered):
            self._refused.add(self._offered[number])
