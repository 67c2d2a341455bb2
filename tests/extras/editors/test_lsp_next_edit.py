"""Test the next edit in the language server, with the client of pygls and a scripted daemon."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types

from localspec.client.tasks import AsyncDaemon
from localspec.extras.editors import lsp
from localspec.extras.editors.lsp import Document, Encoding
from localspec.extras.editors.next_edit import Hunk, NextEdits, difference
from tests.extras.editors.test_lsp import Client, count_units
from tests.support.daemons import temporary_home
from tests.support.editors import Scripted, json_response, scripted
from tests.support.patience import PATIENCE

URI = "file:///there/sum.py"
PATH = "/localspec/next-edit"
CODE = [f"line {number}" for number in range(40)]
TEXT = "".join(f"{line}\n" for line in CODE)
lines = st.lists(st.sampled_from(["a", "b", "", "é😀"]), max_size=7)


@given(lines, lines)
def test_a_difference_makes_one_text_of_the_other(old: list[str], new: list[str]) -> None:
    hunk = difference(old, new)
    if hunk is None:
        assert old == new
    else:
        start, before, after = hunk
        assert [*old[:start], *after, *old[start + len(before) :]] == new
        assert not (before and after) or (before[0] != after[0] and before[-1] != after[-1])


@given(lines, st.sampled_from(["\n", "\r\n"]), st.booleans(), lines, st.data())
def test_a_replacement_does_what_the_hunk_says(
    old: list[str], end: str, ended: bool, new: list[str], data: st.DataObject
) -> None:
    """Lines come and go anywhere, also at the end of a text without a last line end."""
    old = [*old, "x"]
    document = Document(URI, end.join(old) + end * ended, "utf-16")
    end = document.line_end
    start = data.draw(st.integers(0, len(old)))
    count = data.draw(st.integers(0, len(old) - start))
    hunk = Hunk(start, tuple(old[start : start + count]), tuple(new))
    if not new and count == len(old):
        return  # the window has some text, and so has the answer
    edit = lsp._replacement(document, hunk)
    at, to = edit["range"].start, edit["range"].end
    places = (
        document.to_position(at.line, at.character),
        document.to_position(to.line, to.character),
    )
    document.replace(*places, text=edit["text"])
    expected = [*old[:start], *new, *old[start + count :]]
    assert [document.content(n) for n in range(len(expected))] == expected
    assert "".join(document.lines).rstrip("\r\n") == end.join(expected).rstrip("\r\n")


class Desk:
    """A language server with a scripted daemon, which proposes `edits`."""

    def __init__(self, stack: ExitStack, encoding: Encoding = "utf-16") -> None:
        home = stack.enter_context(temporary_home())
        (home.root / "run").mkdir()
        self.edits: list[dict[str, Any]] = []
        self.suggestion = ""
        self.server: Scripted = stack.enter_context(scripted(home.socket, self._reply))
        self.client = Client(home, encoding, inline=True)
        stack.callback(self.client.close)
        self.client.open(TEXT)

    def _reply(self, target: str, _: dict[str, Any]) -> list[bytes]:
        if target == PATH:
            return json_response({"edits": self.edits})
        return json_response({"content": self.suggestion})

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [body for target, body in self.server.requests if target == PATH]

    def propose(self, line: int) -> Any:
        params = {
            "textDocument": {"uri": URI, "version": 2},
            "position": {"line": line, "character": 0},
            "context": {"triggerKind": 2},
        }
        return self.client.ask("textDocument/copilotInlineEdit", params).answer

    def settle(self, name: str, edit: Any) -> None:
        params = types.ExecuteCommandParams(name, [*edit.command.arguments])
        assert self.client.ask("workspace/executeCommand", params).answer is None


def change(start: int, old: list[str], new: list[str]) -> dict[str, Any]:
    return {"start": start, "end": start + len(old), "old": old, "new": new}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_edits_have_the_shape_of_copilots(encoding: Encoding) -> None:
    with ExitStack() as stack:
        desk = Desk(stack, encoding)
        assert desk.propose(20).edits == []  # Nothing was changed yet, so nothing is asked.
        assert desk.asked == []
        desk.client.client.protocol.notify("textDocument/didFocus", {"textDocument": {"uri": URI}})
        desk.client.type(20, 0, "😀")
        desk.edits = [change(12, ["line 22"], ["LINE 22", "more"]), change(15, ["line 25"], [])]
        first, second = desk.propose(20).edits
        (body,) = desk.asked
        assert body["before"] == "".join(f"line {n}\n" for n in range(10, 20))
        assert body["after"].startswith("😀line 20\nline 21\n")
        assert body["after"].endswith("line 30\n")
        assert (body["first_line"], body["path"]) == (11, "sum.py")
        assert (body["above"][:7], body["below"][-8:]) == ("line 0\n", "line 39\n")
        assert body["edits"] == [
            {"path": "sum.py", "old": "line 20\n", "new": "😀line 20\n", "line": 21}
        ]
        assert (first.text, first.textDocument.uri, first.textDocument.version) == (
            "LINE 22\nmore",
            URI,
            2,
        )
        assert (first.range.start.line, first.range.start.character) == (22, 0)
        assert (first.range.end.line, first.range.end.character) == (
            22,
            count_units("line 22", encoding),
        )
        assert (second.text, second.range.start.line, second.range.end.line) == ("", 25, 26)
        assert desk.client.messages == []


def test_what_was_refused_is_not_proposed_again() -> None:
    with ExitStack() as stack:
        desk = Desk(stack)
        desk.client.type(20, 0, "x")
        desk.edits = [change(12, ["line 22"], ["a"]), change(13, ["line 23"], ["b"])]
        first, _ = desk.propose(20).edits
        desk.settle("localspec.rejectEdit", first)
        (second,) = desk.propose(20).edits
        assert second.text == "b"
        desk.settle("localspec.acceptEdit", second)
        # Sidekick does not say that somebody went on without it.
        offers = []
        for _ in range(4):
            offers += [len(desk.propose(20).edits) for _ in range(2)]
            desk.client.type(20, 0, "y")
        assert offers == [1, 1, 1, 1, 1, 1, 0, 0]


def test_the_next_edit_of_the_line_is_offered_where_nothing_is_suggested() -> None:
    with ExitStack() as stack:
        desk = Desk(stack)
        desk.client.type(20, 0, "x")
        desk.edits = [
            change(10, ["xline 20"], ["xline 20", "    more"]),
            change(12, ["line 22"], ["a"]),
        ]
        (item,) = desk.client.completion(20, 1).answer.items
        assert (item.insert_text, item.range.start.character, item.range.end.character) == (
            "xline 20\n    more",
            0,
            8,
        )
        desk.suggestion = "abc"
        asked = len(desk.asked)
        (item,) = desk.client.completion(20, 1).answer.items
        assert (item.insert_text, len(desk.asked)) == ("abc", asked)


def test_changes_that_are_far_from_each_other_are_several_edits() -> None:
    edits = NextEdits(AsyncDaemon("/nonexistent"), {})
    document = Document(URI, TEXT, "utf-8")
    edits.note(document)
    for line in (3, 4, 30, 5):
        document.replace(lsp.Position(line, 0), lsp.Position(line, 0), "x")
        edits.note(document)
    recent = [(edit["line"], edit["old"], edit["new"]) for edit in edits._recent()]
    assert recent == [
        (4, "line 3\nline 4\n", "xline 3\nxline 4\n"),
        (31, "line 30\n", "xline 30\n"),
        (6, "line 5\n", "xline 5\n"),
    ]


def test_a_late_answer_is_dropped() -> None:
    """The text has changed while the daemon thought about it."""

    go_on = threading.Event()

    def reply(*_: Any) -> list[bytes]:
        go_on.wait(PATIENCE)
        return json_response({"edits": [change(0, ["line 0"], ["a"])]})

    async def propose(server: Scripted) -> None:
        edits = NextEdits(AsyncDaemon(str(server.server_address)), {})
        document = Document(URI, TEXT, "utf-8")
        edits.note(document)
        document.replace(lsp.Position(3, 0), lsp.Position(3, 0), "x")
        edits.note(document)
        task = asyncio.create_task(edits.propose(document, 3, 1))
        while not server.requests:
            await asyncio.sleep(0.01)
        document.version += 1
        go_on.set()
        assert await task == []

    with temporary_home() as home, scripted(home.root / "s", reply) as server:
        asyncio.run(asyncio.wait_for(propose(server), PATIENCE))
