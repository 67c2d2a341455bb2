"""Test the next edit in a real Vim and a real Neovim with typed keys, and in the language server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.daemons import Home, temporary_home, wait_for
from tests.support.editors import (
    EDITORS,
    Editor,
    Scripted,
    editing,
    infill,
    json_response,
    scripted,
)

CODE = [f"line {number}" for number in range(1, 61)]
PATH = "/localspec/next-edit"


class Desk:
    """An editor with a scripted daemon. `edits` is what the daemon proposes; None: nothing comes."""

    def __init__(self, name: str, home: Home, stack: ExitStack) -> None:
        self.edits: list[dict[str, Any]] | None = []
        self.suggestion = ""
        self.server: Scripted = stack.enter_context(scripted(home.root / "s", self._reply))
        self.file = home.root / "code.txt"
        self.opened = 0
        settings = (
            f"let g:localspec_socket = '{self.server.server_address!s}'\nlet g:localspec_start = 0\n"
            "let g:localspec_next_edit = 1\n"
        )
        self.editor: Editor = stack.enter_context(
            editing(name, home.root, home.environment, settings=settings)
        )

    def _reply(self, target: str, _: dict[str, Any]) -> list[bytes] | None:
        if target != PATH:
            return infill(self.suggestion)
        if self.edits is None:
            return None
        return json_response({"object": "next_edit", "model": "scripted", "edits": self.edits})

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [body for target, body in self.server.requests if target == PATH]

    def open(self) -> Editor:
        """Open the file anew, and forget what was changed and rejected before."""
        self.edits, self.suggestion, self.opened = [], "", self.opened + 1
        self.file.write_text("".join(f"{line}\n" for line in CODE))
        self.editor.type(
            f"\x1b\x1b:noautocmd %bwipeout! | call localspec#next#stop() | let g:opened = {self.opened}\r"
        )
        self.editor.until("get(g:, 'opened')", self.opened)
        self.editor.type(f":edit! {self.file} | call cursor(1, 1)\r")
        self.editor.until("[mode(), line('$'), localspec#next#shown()]", ["n", 60, []])
        self.server.requests.clear()
        return self.editor

    def shows(self, *edits: list[Any], mode: str = "n") -> None:
        """Wait until these edits are shown. What was shown before a mode ended is shown anew after it."""
        self.editor.until("[mode(), localspec#next#shown()]", [mode, list(edits)])


@pytest.fixture(scope="module", params=EDITORS)
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with temporary_home() as home, ExitStack() as stack:
        yield Desk(request.param, home, stack)


def change(start: int, old: list[str], new: list[str]) -> dict[str, Any]:
    return {"start": start, "end": start + len(old), "old": old, "new": new}


REPLACED, REMOVED = ["line 7"], ["line 9", "line 10"]


def test_a_change_is_shown_and_taken_with_tab(desk: Desk) -> None:
    """The edits of a window are taken from top to bottom, each with one key, and undone like any change."""
    editor = desk.open()
    desk.edits = [
        change(6, REPLACED, ["LINE 7", "and more"]),
        change(8, REMOVED, []),
        change(11, [], ["new"]),
    ]
    editor.type(":5\rcwLINE\x1b")
    desk.shows([7, REPLACED, ["LINE 7", "and more"]], [9, REMOVED, []], [12, [], ["new"]])
    wait_for(lambda: "and more" in editor.shown(), "the change")
    shown = editor.shown()
    at = shown.index("line 7")
    after = ["LINE 7", "and more", "line 8", "line 9", "line 10", "line 11", "new", "line 12"]
    assert shown[at + 1 : at + 9] == after
    assert editor.lines == [*CODE[:4], "LINE 5", *CODE[5:]]
    body = desk.asked[-1]
    assert body["before"] + body["after"] == "".join(
        f"{line}\n" for line in [*CODE[:4], "LINE 5", *CODE[5:15]]
    )
    assert (body["above"], body["first_line"], body["below"][:8]) == ("", 1, "line 16\n")
    (edit,) = body["edits"]
    assert (edit["old"], edit["new"], edit["line"]) == ("line 5\n", "LINE 5\n", 5)
    editor.type("\t")
    desk.shows([10, REMOVED, []], [13, [], ["new"]])
    editor.until("[getline(7, 9), line('.')]", [["LINE 7", "and more", "line 8"], 8])
    editor.type("\t")
    desk.shows([11, [], ["new"]])
    desk.edits = []
    editor.type("\t")
    desk.shows()
    editor.until("getline(9, 12)", ["line 8", "line 11", "new", "line 12"])
    assert not editor.value("get(maparg('<Tab>', 'n', 0, 1), 'buffer')")
    editor.type("uuu")
    editor.until("getline(1, '$')", [*CODE[:4], "LINE 5", *CODE[5:]])
    assert editor.wrong == []


def test_a_rejected_change_is_not_shown_again(desk: Desk) -> None:
    editor = desk.open()
    desk.edits = [change(6, REPLACED, ["rejected"])]
    editor.type(":5\rcwLINE\x1b")
    desk.shows([7, REPLACED, ["rejected"]])
    editor.type("\x1d")  # <C-]>
    desk.shows()
    asked = len(desk.asked)
    editor.type("x")
    wait_for(lambda: len(desk.asked) > asked, "the next request")
    desk.edits = [*desk.edits, change(9, ["line 10"], ["other"])]
    editor.type("x")
    desk.shows([10, ["line 10"], ["other"]])
    assert "rejected" not in editor.shown()
    assert editor.wrong == []


def test_a_change_gives_way_to_what_is_typed(desk: Desk) -> None:
    """A key closes a request under way, and takes away what is shown. The same holds in Insert mode."""
    editor = desk.open()
    desk.edits = None
    editor.type(":5\rcwLINE\x1b")
    wait_for(lambda: desk.asked, "a request")
    left = desk.server.left
    desk.edits = [change(6, REPLACED, ["typed"])]
    editor.type("x")
    wait_for(lambda: desk.server.left > left, "its connection's end")
    desk.shows([7, REPLACED, ["typed"]])
    desk.edits = []
    editor.type("ihello")
    desk.shows(mode="i")
    desk.edits = [change(6, REPLACED, ["inserted"])]
    editor.type("!")  # Nothing is suggested at the cursor, so the next edit is asked for.
    desk.shows([7, REPLACED, ["inserted"]], mode="i")
    editor.type("\t")
    editor.until("[mode(), getline(7)]", ["i", "inserted"])
    desk.edits, desk.suggestion = [], " ghost"
    editor.type("?")
    editor.ghost(" ghost")
    desk.shows(mode="i")
    editor.type("\x1b")
    assert editor.wrong == []


def test_tab_goes_to_a_change_beyond_the_screen_first(desk: Desk) -> None:
    editor = desk.open()
    desk.edits = [change(10, ["line 40"], ["forty"])]
    editor.type(":40\rAx\x1b")
    desk.shows([40, ["line 40"], ["forty"]])
    editor.type("gg")
    editor.until("line('.')", 1)
    editor.type("\t")
    editor.until("[line('.'), getline(40)]", [40, "line 40x"])
    desk.shows([40, ["line 40"], ["forty"]])
    editor.type("\t")
    editor.until("getline(40)", "forty")
    assert editor.wrong == []


def test_edits_at_two_places_are_two_edits(desk: Desk) -> None:
    editor = desk.open()
    for number, line in enumerate((3, 40), start=1):
        editor.type(f":{line}\rAx\x1b")
        wait_for(lambda number=number: any(len(b["edits"]) == number for b in desk.asked), "it")  # type: ignore[misc]
    edits = [(edit["line"], edit["old"], edit["new"]) for edit in desk.asked[-1]["edits"]]
    assert edits == [(3, "line 3\n", "line 3x\n"), (40, "line 40\n", "line 40x\n")]
    assert editor.wrong == []


def test_nothing_is_asked_unless_it_is_wanted(desk: Desk) -> None:
    editor = desk.open()
    editor.type(":let g:localspec_next_edit = 0\r:5\rcwLINE\x1b")
    editor.until("[mode(), getline(5)]", ["n", "LINE 5"])
    assert desk.asked == []
    editor.type(":Localspec next\r")  # It is from now on.
    editor.until("g:localspec_next_edit", 1)
    wait_for(lambda: desk.asked, "a request")
    assert editor.wrong == []
