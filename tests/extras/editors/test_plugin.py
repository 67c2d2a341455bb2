"""Test the plug-in in a real Vim and a real Neovim with typed keys."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from localspec.extras.editors import lsp
from localspec.extras.editors.lsp import Document, VisitedPlaces, context_fields
from tests.support.daemons import Home, RunningDaemon, temporary_home, wait_for
from tests.support.editors import (
    CALL,
    EDITORS,
    FITTING,
    Editor,
    Scripted,
    chat,
    editing,
    find_editor,
    infill,
    program,
    scripted,
)
from tests.support.patience import PATIENCE

CODE = "def add(a, b):\n    return\n\n\nprint(add(1, 2))\n"


class Desk:
    """An editor with a scripted daemon and the replies of that daemon."""

    def __init__(self, name: str, home: Home, stack: ExitStack) -> None:
        self.home = home
        self.suggestion = " a + b"
        self.replies: dict[str, Any] = {}  # pieces or None, by request target
        self.opened = 0
        self.server: Scripted = stack.enter_context(scripted(home.root / "s", self._reply))
        self.file = home.root / "sum.py"
        settings = (
            f"let g:localspec_socket = '{self.server.server_address!s}'\nlet g:localspec_start = 0\n"
            "noremap <F12> <Cmd>let g:done = get(g:, 'done') + 1<CR>\n"
            "noremap! <F12> <Cmd>let g:done = get(g:, 'done') + 1<CR>\n"
        )
        self.editor: Editor = stack.enter_context(
            editing(name, home.root, home.environment, str(self.file), settings=settings)
        )

    def _reply(self, target: str, body: dict[str, Any]) -> list[bytes] | None:
        if target in self.replies:
            pieces: list[bytes] | None = self.replies[target]
            return pieces
        if body.get("n_predict") == 0:
            return infill("")
        return infill(f"{self.suggestion}{body['seed']}" if "seed" in body else self.suggestion)

    def type(self, keys: str) -> None:
        """Type keys and wait until the editor has processed them."""
        count = self.editor.value("get(g:, 'done')")
        self.editor.type(keys)
        if keys.endswith("\x1b"):  # the next key must not be part of an escape sequence
            time.sleep(0.15)
        self.editor.type("\x1b[24~")
        self.editor.until("get(g:, 'done')", lambda keys_done: keys_done > count)

    def wait_for_more_than(self, count: int) -> None:
        wait_for(lambda: len(self.server.requests) > count, "a request")

    def open(self, text: str = CODE, settings: str = "") -> Editor:
        """Open the file with this text, the cursor on its first line, and no suggestion."""
        self.replies.clear()
        self.server.requests.clear()
        self.suggestion = " a + b"
        self.opened += 1
        self.editor.type(f"\x1b\x1b:noautocmd %bwipeout! | let g:opened = {self.opened}\r")
        # Keys typed earlier may still go to this file. An editor that notices a change of the file asks a
        # question and takes the next keys as the answer.
        self.editor.until("get(g:, 'opened')", self.opened)
        self.file.write_bytes(text.encode())
        self.editor.type(f":edit! {settings} {self.file} | call cursor(1, 1)\r")
        self.editor.until(
            "[mode(), line('.'), localspec#ghost#text()]",
            lambda state: state[0] == "n" and state[1] == 1 and state[2] == "",
        )
        return self.editor


@pytest.fixture(scope="module", params=EDITORS)
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    with temporary_home() as home, ExitStack() as stack:
        yield Desk(request.param, home, stack)


def test_a_suggestion_is_shown_accepted_and_undone(desk: Desk) -> None:
    editor = desk.open()
    editor.type("jA")
    editor.ghost(" a + b")
    assert "    return a + b" in editor.shown()
    assert editor.lines[1] == "    return"  # The suggestion is not part of the text yet.
    (_, body), *_ = desk.server.requests
    assert (body["input_prefix"], body["prompt"]) == ("def add(a, b):\n", "    return")
    assert body["input_suffix"] == "\n\n\nprint(add(1, 2))\n"
    editor.type("\t")
    editor.until("getline(2)", "    return a + b")
    editor.type("\x1bu")
    editor.until("getline(2)", "    return")
    assert editor.wrong == []


EVEN = "def even(n):\n    return \n\ndef factorial(n):\n    pass\n\nx = 1\ny = 2\nlast = 4\nz = 3\nlast = 4\n"


def test_lines_below_a_suggestion_of_several_lines_stay_on_the_screen(desk: Desk) -> None:
    editor = desk.open(EVEN)
    desk.suggestion = "n % 2 == 0\n\ndef odd(n):"
    lines = EVEN.split("\n")[:-1]
    editor.type("jA")
    editor.ghost(desk.suggestion)
    below = ["", "def odd(n):", *lines[2:]]
    assert drawn(editor)[: len(lines) + 2] == [lines[0], "    return n % 2 == 0", *below]
    desk.replies["/infill"] = None
    editor.type("n %")
    editor.ghost(" 2 == 0\n\ndef odd(n):")
    assert drawn(editor)[: len(lines) + 2] == [lines[0], "    return n % 2 == 0", *below]
    editor.type("x")
    editor.ghost("")
    assert drawn(editor)[: len(lines)] == [lines[0], "    return n %x", *lines[2:]]


def drawn(editor: Editor) -> list[str]:
    """Return the rows of the screen without the last ones, after what is still to be drawn."""
    editor.value("execute('redraw')")
    return editor.shown()[:-3]


@pytest.mark.parametrize("windows", ["only", "split", "vsplit", "setlocal nowrap", "5split"])
def test_the_screen_is_that_of_a_new_drawing(desk: Desk, windows: str) -> None:
    """Suggestions are shown, typed, accepted and dropped anywhere, also in a scrolled window."""
    rng = random.Random(windows)
    for _ in range(6):
        lines = [f"{number} = " + "word " * rng.choice([0, 2, 30]) for number in range(60)]
        editor = desk.open("\n".join(lines) + "\n")
        suggestion = "".join(rng.choice(["a", " ", "\n", "\nbc", "\t", "日"]) for _ in range(8))
        desk.suggestion = f"z{suggestion}z"
        place = rng.choice(["3G", "30Gzt", "30Gzz", "30Gzb", "40Gzt\x19\x19", "G"])
        editor.type(f":{windows}\r{place}A")
        editor.until("localspec#ghost#text()", lambda text: text != "")
        steps = ["z", rng.choice(["\t", "\x1b[Z", "q", "\r", "\x7f", "\x1b"]), "\x1b"]
        for keys in ["", *steps]:
            if keys:
                desk.replies["/infill"] = None
                desk.type(keys)
            rows = drawn(editor)
            editor.value("execute('redraw!')")
            assert drawn(editor) == rows, (place, desk.suggestion, keys)
    assert editor.wrong == []


def test_a_key_drops_the_suggestion_unless_it_matches(desk: Desk) -> None:
    editor = desk.open()
    editor.type("jA")
    editor.ghost(" a + b")
    desk.replies["/infill"] = None
    editor.type(" a")
    editor.ghost(" + b")
    assert len(desk.server.requests) == 1  # There was no new request.
    editor.type("x")
    editor.ghost("")
    wait_for(lambda: len(desk.server.requests) == 2, "the next request")
    disconnected = desk.server.left
    editor.type("y")  # This abandons that request.
    wait_for(lambda: desk.server.left == disconnected + 1, "its connection's end")
    editor.type("\x1b")
    wait_for(lambda: desk.server.left == disconnected + 2, "the last one's end")
    assert not editor.value("get(maparg('<Tab>', 'i', 0, 1), 'buffer')")
    assert editor.wrong == []


def test_typing_and_deleting_requests_a_new_suggestion(desk: Desk) -> None:
    editor = desk.open()
    editor.type("jA")
    editor.ghost(" a + b")
    desk.suggestion = " other"
    editor.type(" ")
    editor.ghost("a + b")
    editor.type("\x7f")
    editor.ghost(" other")
    editor.type("\t")
    editor.until("getline(2)", "    return other")
    assert editor.wrong == []


@pytest.mark.parametrize(
    "key", ["\x1b", "\x03", "\x0f", "\x1bOP"], ids=["esc", "c-c", "c-o", "command"]
)
def test_a_suggestion_is_gone_with_insert_mode(desk: Desk, key: str) -> None:
    editor = desk.open()
    editor.type(":inoremap <F1> <Cmd>stopinsert<CR>\rjA")
    editor.ghost(" a + b")
    editor.type(key)  # <C-c> triggers no InsertLeave.
    editor.until(
        "[mode(1), localspec#ghost#text()]", lambda state: state[0] != "i" and state[1] == ""
    )
    assert not editor.value("get(maparg('<Tab>', 'i', 0, 1), 'buffer')")
    editor.type("h\x1b")
    assert editor.wrong == []


def test_a_word_or_a_line_is_accepted_and_others_are_requested(desk: Desk) -> None:
    editor = desk.open()
    desk.suggestion = " one\n    two()\nthree"
    editor.type("jA")
    editor.ghost(desk.suggestion)
    assert "    two()" in editor.shown()  # The lines are shown below the cursor's line.
    editor.type("\x1b[1;5B")  # <C-Down>
    editor.ghost(f"{desk.suggestion}1")
    editor.type("\x1b[1;5A")
    editor.ghost(desk.suggestion)
    editor.type("\x1b[1;5C")  # <C-Right>
    editor.ghost("\n    two()\nthree")
    editor.type("\x1b[Z")  # <S-Tab>
    editor.ghost("\nthree")
    assert editor.lines[1:4] == ["    return one", "    two()", ""]
    desk.suggestion = ""
    editor.type("\t")
    editor.until("getline(4)", "three")
    assert editor.lines == [
        *CODE.splitlines()[:1],
        "    return one",
        "    two()",
        "three",
        "",
        "",
        "print(add(1, 2))",
    ]
    assert editor.wrong == []


def test_existing_text_is_trimmed_from_suggestions(desk: Desk) -> None:
    editor = desk.open(CALL)
    for column, suggestion, trimmed in FITTING:
        desk.suggestion = suggestion
        editor.type(f"\x1b:call cursor(1, {column + 1})\r{'i' if column < 4 else 'a'}")
        editor.ghost(trimmed)
    assert editor.wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "one\r\ntwo\r\n",  # DOS line ends
        "one\r\ntwo\n",  # mixed line ends
        "\tone\t\n\ttwo\n",
        "日本語\n",
        "e\u0301e\u0301 👩‍💻\n",
        "no newline",
        "",
        "x" * 200_000 + "\n",
        "def f(): pass\n" * 50_000,
    ],
    ids=["dos", "mixed", "tabs", "wide", "combining", "unended", "empty", "long", "many"],
)
def test_suggestions_in_any_text(desk: Desk, text: str) -> None:
    editor = desk.open(text)
    desk.suggestion = "\tä\x1b[2J日本\n\tb"
    editor.type("GA,")
    editor.ghost(desk.suggestion)
    old_lines = editor.lines
    editor.shown()
    (_, body) = desk.server.requests[-1]
    assert len(body["input_prefix"]) + len(body["prompt"]) < 120_000
    assert "\n".join(old_lines)[:-1].endswith(body["prompt"][-100:-1])
    desk.suggestion = ""
    editor.type("\t")
    editor.until("getline('$')", "\tb")
    assert editor.lines[:-1] == [*old_lines[:-1], old_lines[-1] + "\tä\x1b[2J日本"]
    assert editor.wrong == []


def test_invalid_bytes_do_not_prevent_suggestions(desk: Desk) -> None:
    editor = desk.open("")
    desk.file.write_bytes(b"caf\xe9 \xff\xe2\x82\n")
    editor.type(":edit! ++enc=utf-8 ++bad=keep\rA")
    editor.ghost(" a + b")
    assert editor.wrong == []


BROKEN = {
    "garbage": [b"\x01\x02 no HTTP"],
    "closed": [],
    "cut": [infill("abc")[0][:150]],
    "bad JSON": [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {]}\n\n"],
    "other JSON": [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        b'data: {"content": 1, "model": []}\n\ndata: {"content": {"a": null}}\n\n'
    ],
    "loading": [b'HTTP/1.1 503 x\r\ncontent-length: 35\r\n\r\n{"error": {"message": "It loads."}}'],
    "in the stream": [
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        b'data: {"error": {"message": "It died."}}\n\n'
    ],
}


def test_a_bad_answer_costs_one_suggestion(desk: Desk) -> None:
    editor = desk.open()
    editor.type("jA")
    for name, pieces in BROKEN.items():
        desk.replies["/infill"] = pieces
        request_count = len(desk.server.requests)
        editor.type("x")
        desk.wait_for_more_than(request_count)
        if name != "other JSON":
            editor.until("localspec#error()", bool)
        del desk.replies["/infill"]
        editor.type("y")
        editor.ghost(" a + b")
        assert editor.wrong == [], name
    editor.type("\x1b")
    assert not re.search(r"\bE\d+:|localspec:", editor.value("execute('messages')"))


def test_a_question_about_lines_goes_on_as_a_conversation(desk: Desk) -> None:
    editor = desk.open()
    desk.replies["/v1/chat/completions"] = chat("It adds.\nBoth.")
    editor.type(":1,2Localspec ask why?\r")
    answer = ["## localspec", "", "It adds.", "Both.", "", "## You", "", ""]
    lines = "getbufline('localspec://chat', 1, '$')"
    editor.until(lines, lambda lines_: lines_[-8:] == answer)
    (_, body) = desk.server.requests[-1]
    text = body["messages"][0]["content"]
    assert text.startswith("sum.py, lines 1 to 2:\n```")
    assert text.endswith("    return\n```\n\nwhy?")
    assert body["localspec"] == {"kind": "chat", "conversation": "new"}
    assert editor.value("expand('%:t')") == "sum.py"
    assert "It adds." in editor.shown()  # The window follows the answer.
    editor.type(":Localspec chat\rAand then\x1b\r")
    editor.until(lines, lambda lines_: lines_.count("It adds.") == 2)
    (_, body) = desk.server.requests[-1]
    assert body["messages"] == [{"role": "user", "content": "and then"}]
    assert body["localspec"]["conversation"] == "c1"
    assert editor.wrong == []


def test_an_edit_is_a_diff_before_it_is_taken(desk: Desk) -> None:
    editor = desk.open()
    new = "def add(a: int, b: int):\n    return a + b\n    # done"
    desk.replies["/v1/chat/completions"] = chat(f"Here:\n```python\n{new}\n```\nThat is all.")
    for key, expected in (("q", CODE), ("\r", new + CODE[CODE.index("\n\n") :])):
        editor.type(":1,2Localspec edit add types\r")
        editor.until("[tabpagenr('$'), winnr('$'), &diff]", [2, 2, 1])
        assert editor.lines == new.splitlines()
        (_, body) = desk.server.requests[-1]
        assert "def add(a, b):\n    return\n" in body["prediction"]["content"]
        question, fenced = body["messages"][0]["content"], body["prediction"]["content"]
        assert question.startswith("This is a part of the file sum.py:\n\n```")
        assert "Write all 2 lines of this part out again, from the first" in question
        assert question.endswith("except for this change: add types.")
        assert question == lsp.edit_question("sum.py", fenced, "add types", whole=False)
        editor.type(key)
        editor.until("[tabpagenr('$'), getline(1, '$')]", [1, expected.splitlines()])
    editor.type("u")
    editor.until("getline(1, '$')", CODE.splitlines())
    # A truncated answer would delete the rest of the lines.
    desk.replies["/v1/chat/completions"] = chat(f"```python\n{new[:30]}", "length")
    editor.type(":1,2Localspec edit add types\r")
    editor.until("execute('messages')", lambda messages: "select fewer lines" in messages)
    assert editor.value("tabpagenr('$')") == 1
    desk.replies["/v1/chat/completions"] = chat(f"```python\n{new}\n```")
    # Lines that have changed since then are not overwritten.
    editor.type(":1,2Localspec edit add types\r")
    editor.until("tabpagenr('$')", 2)
    editor.value(f"setbufline('{desk.file}', 1, 'changed')")
    editor.type("\r")
    editor.until("execute('messages')", lambda messages: "nothing was taken" in messages)
    editor.type("q")
    editor.until("tabpagenr('$')", 1)
    assert editor.wrong == []


def test_nothing_is_suggested_in_a_macro(desk: Desk) -> None:
    """A macro must do the same every time it runs."""
    editor = desk.open("a\nb\n")
    editor.type("qqA x")
    editor.until("getline(1)", "a x")
    editor.type("y\x1bqj@q")
    editor.until("getline(1, '$')", ["a xy", "b xy"])
    assert desk.server.requests == []
    assert editor.wrong == []


def test_nothing_is_suggested_beyond_a_lines_end(desk: Desk) -> None:
    editor = desk.open("a\n")
    editor.type(":set virtualedit=all\r8li")
    editor.until("[mode(), getcurpos()[3]]", ["i", 8 - 1])
    editor.type("\x1b0a")
    editor.ghost(" a + b")
    assert len(desk.server.requests) == 1
    editor.type("\x1b:set virtualedit=\r")
    assert editor.wrong == []


def test_the_state_is_shown_in_a_window(desk: Desk) -> None:
    editor = desk.open()
    editor.type(""":let g:localspec_command = ['echo', "one\\ntwo"]\r:Localspec status\r""")
    editor.until("[winnr('$'), getline(1, '$')]", [2, ["one", "two status"]])
    editor.type("q")
    editor.until("[winnr('$'), expand('%:t')]", [1, "sum.py"])
    editor.type(":unlet g:localspec_command\r")
    assert editor.wrong == []


PROSE = "Sure! You can declare the types of the parameters, and then of what is returned.\n\nThat helps."
# The result of an answer to an edit of the first two lines of CODE: proposed lines or a message.
EDITS = {
    PROSE: "the answer has no code: Sure! You can",
    "": "the answer is empty.",
    "```\n```": "the answer is empty.",
    "```\ndef add(a, b):\n    return\n```": "the answer changes nothing.",
    "def add(a, b):\n    return a + b": ["def add(a, b):", "    return a + b"],
    f"{PROSE}\n```\nx\n```": ["x"],
}


@pytest.mark.parametrize("answer", EDITS, ids=range(len(EDITS)))
def test_only_code_is_proposed(desk: Desk, answer: str) -> None:
    editor = desk.open()
    desk.replies["/v1/chat/completions"] = chat(answer)
    editor.type(":messages clear | 1,2Localspec edit add types\r")
    expected = EDITS[answer]
    if isinstance(expected, str):
        editor.until("execute('messages')", lambda messages: f"localspec: {expected}" in messages)
        assert editor.value("tabpagenr('$')") == 1
    else:
        editor.until("tabpagenr('$')", 2)
        assert editor.lines == expected
        editor.type("q")
        editor.until("tabpagenr('$')", 1)
    assert editor.wrong == []


def test_code_is_extracted_as_by_the_language_server(desk: Desk) -> None:
    editor = desk.open()
    rng = random.Random(24)
    words = [
        "def",
        "add",
        "(",
        ")",
        "a",
        "b",
        ",",
        ":",
        "return",
        "x1",
        "é",
        "日",
        " ",
        "\n",
        "```",
        "\r\n",
        "Sure!",
    ]
    for _ in range(200):
        old, answer = ("".join(rng.choices(words, k=rng.randrange(12))) for _ in range(2))
        answer_, old_ = (json.dumps(text, ensure_ascii=False) for text in (answer, old))
        ours = editor.value(f'localspec#edit#code({answer_}, split({old_}, "\\n", 1))')
        assert "\n".join(ours).strip("\n") == lsp.extract_code(answer, old).strip("\n"), (
            answer,
            old,
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("\x17h:only\r\r", "the proposal was closed"),
        (":tabonly\rq", ""),
        (":bwipeout! sum.py\r\r", "its buffer is closed"),
        (":call setbufvar('sum.py', '&modifiable', 0)\r\r", "its buffer cannot be changed"),
        (":tabfirst | 1d\r:tablast\r\r", "those lines have changed"),
        (":tabfirst | 1m$ | m0 | 0put ='new'\r:tablast\r\r", ""),
    ],
)
def test_an_edit_survives_changes_of_the_windows(desk: Desk, keys: str, message: str) -> None:
    editor = desk.open()
    desk.replies["/v1/chat/completions"] = chat("```\ndef sub(a, b):\n    return a - b\n```")
    editor.type(":messages clear | 1,2Localspec edit subtract\r")
    editor.until("tabpagenr('$')", 2)
    editor.type(keys)
    if message:
        editor.until("execute('messages')", lambda messages: message in messages)
    else:
        editor.until("[tabpagenr('$'), &diff]", [1, 0])
    assert editor.wrong == []
    editor.type(":tabfirst | tabonly! | setlocal modifiable\r")


def test_mixed_line_ends_are_kept(desk: Desk) -> None:
    """Only some lines of the file end with a carriage return."""
    editor = desk.open("one\r\ntwo\r\nthree\nfour\r\n")
    desk.replies["/v1/chat/completions"] = chat("```\none\nnew\nthree\nfour\n```")
    editor.type(":%Localspec edit rename\r")
    editor.until("tabpagenr('$')", 2)
    editor.type("\r")
    editor.until("getline(1, '$')", ["one\r", "new\r", "three", "four\r"])
    assert editor.wrong == []


def test_an_unmodifiable_buffer_is_not_edited(desk: Desk) -> None:
    editor = desk.open()
    editor.type(":setlocal nomodifiable | Localspec edit add types\r")
    editor.until(
        "execute('messages')", lambda messages: "this buffer cannot be changed" in messages
    )
    editor.type(":setlocal modifiable\r")
    assert desk.server.requests == []


def test_a_running_answer_is_not_interleaved(desk: Desk) -> None:
    editor = desk.open()
    desk.replies["/v1/chat/completions"] = None
    editor.type(":Localspec ask why?\r")
    desk.wait_for_more_than(0)
    editor.type(":Localspec chat and this\r")
    editor.until("execute('messages')", lambda messages: "an answer is being written" in messages)
    lines = editor.value("getbufline('localspec://chat', 1, '$')")
    assert lines[-1] == ""
    assert "and this" not in lines
    # The buffer is gone, and the rest of the answer must go to no other one.
    disconnected = desk.server.left
    editor.type(":bwipeout! localspec://chat\r:Localspec chat\r")
    wait_for(lambda: desk.server.left == disconnected + 1, "its connection's end")
    editor.until("getline(1, '$')", ["## You", "", ""])
    editor.type(":quit\r")
    editor.until("expand('%:t')", "sum.py")
    assert editor.wrong == []


def test_places_that_were_visited_are_sent_and_kept_warm(desk: Desk) -> None:
    editor = desk.open("\n".join(f"line {n}" for n in range(200)))
    other_file = desk.home.root / "other.py"
    other_file.write_text(CODE * 3)
    editor.type("Ax\x1b")
    wait_for(lambda: desk.server.requests, "a request")
    editor.until("mode()", "n")  # Escape and what follows at once may be read as one key.
    editor.type(f":edit {other_file}\r")
    wait_for(lambda: desk.server.requests[-1][1]["n_predict"] == 0, "reading ahead")
    (_, body) = desk.server.requests[-1]
    # Places of the file as an earlier test had it may come before.
    (place,) = [entry for entry in body["input_extra"] if "line " in entry["text"]]
    assert place["filename"] == "sum.py"
    assert "line 0x" in place["text"]
    editor.type("A")
    wait_for(lambda: desk.server.requests[-1][1]["n_predict"] > 0, "a request")
    assert desk.server.requests[-1][1]["input_extra"] == body["input_extra"]
    editor.type(f"\x1b:edit! {desk.file} | bwipeout! {other_file}\r")
    assert editor.wrong == []


def context(body: dict[str, Any]) -> list[Any]:
    """Return what a request says of the text around the cursor."""
    return [body[name] for name in ("input_extra", "input_prefix", "prompt", "input_suffix")]


def test_a_buffer_is_announced_as_its_first_suggestion_asks(desk: Desk) -> None:
    announced = desk.server.announced
    desk.editor.value("localspec#context#take()")  # places of earlier tests
    announced.clear()
    editor = desk.open("\n".join(f"line {n}" for n in range(200)))
    wait_for(lambda: announced, "the opened buffer")
    editor.type("A")
    wait_for(lambda: desk.server.requests, "a request")
    before, (_, asked) = announced[-1], desk.server.requests[-1]
    assert before["n_predict"] == 0
    assert before["input_prefix"] == asked["input_prefix"] == ""
    editor.type("x\x1b")
    editor.until("mode()", "n")
    editor.type(":call cursor(100, 1) | write\r")

    def sent(*, silent: bool) -> list[dict[str, Any]]:
        bodies = [body for _, body in desk.server.requests if (body["n_predict"] == 0) == silent]
        return [body for body in bodies if body["input_prefix"].count("\n") == 99]

    wait_for(lambda: sent(silent=True), "the saved buffer, with the place in it that was visited")
    editor.type("i")
    wait_for(lambda: sent(silent=False), "a request")
    before, asked = sent(silent=True)[0], sent(silent=False)[0]
    assert before["localspec"] == {"ahead": False}
    assert context(before) == context(asked)
    assert editor.wrong == []


def test_the_language_server_asks_with_the_same_text(desk: Desk) -> None:
    lines = [f"{'日' * (n % 40)}x{n}" + " y" * (n * 7 % 90) for n in range(1500)]
    text = "\n".join([*lines[:900], "é" * 40_000, *lines[900:], ""])
    editor = desk.open(text)
    document = Document(desk.file.as_uri(), text, "utf-8")
    visited = VisitedPlaces()
    for number, units in ((1, 0), (64, 9), (65, 3), (901, 70_000), (902, 5), (1400, 1), (1501, 4)):
        position = document.to_position(number - 1, units)
        column = document.to_units(position)  # the start of a whole character
        body = editor.value(f"localspec#context#fields({number}, getline({number}), {column})")
        assert context_fields(document, position) == {
            name: body[name] for name in context_fields(document, position)
        }
        editor.value(f"[cursor({number}, 1), localspec#context#left(), localspec#context#take()]")
        visited.leave(document, number - 1)
        assert visited.send_waiting()
        extra = editor.value("localspec#context#fields(1, '', 0).input_extra")
        assert extra[-len(visited.extra()) :] == visited.extra()
    assert editor.wrong == []


@pytest.mark.parametrize("name", EDITORS)
def test_a_missing_program_does_not_disturb(name: str, tmp_path: Path) -> None:
    settings = "let g:localspec_command = 'nonexistent'\nlet g:localspec_socket = '/nonexistent'"
    with editing(name, tmp_path, dict(os.environ), settings=settings) as editor:
        editor.type("ifor x in")
        editor.until(
            "localspec#error()", "nonexistent is not found: set g:localspec_command to its path."
        )
        editor.type(" y:")
        editor.until("getline(1)", "for x in y:")
        assert editor.value("[mode(), v:errmsg, execute('messages')]") == ["i", "", ""]


def test_fast_keys_in_every_editor_and_a_daemon_that_is_killed() -> None:
    """The shipped pair serves all editors at once; after the daemon is killed, typing restarts it."""
    command = json.dumps([sys.executable, "-m", "localspec"])
    settings = f"let g:localspec_command = {command}\nlet g:localspec_debounce = 10"
    program("vim")
    with temporary_home() as home, ExitStack() as stack:
        daemon = RunningDaemon(home)
        editors = []
        for name in filter(find_editor, EDITORS):
            folder = home.root / name
            folder.mkdir()
            file = folder / "copy.py"
            file.write_text("import shutil\n\n\ndef copy(a, b):\n    ")
            opened = editing(name, folder, home.environment, str(file), settings=settings)
            editors.append(stack.enter_context(opened))
        typed = "return shutil.copytree(a, b, symlinks=True) # "
        for key in f"GA{typed}":
            for editor in editors:
                editor.type(key)
            time.sleep(0.02)
        for editor in editors:
            editor.until("getline('$')", lambda line: line.strip() == typed.strip())
            editor.type("\x1bccx = shutil.c")
        for editor in editors:
            editor.until("localspec#ghost#text()", bool)
            assert editor.wrong == []
        wait_for(lambda: home.status()["running"] == 0, "no busy slot")
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.communicate()
        for editor in editors:
            editor.type("opytree(")
        for editor in editors:
            editor.until("localspec#statusline()", lambda item: item.endswith(" ms"))
            assert editor.wrong == []


@pytest.mark.parametrize("name", EDITORS)
def test_the_plugin_is_installed_and_removed(name: str, tmp_path: Path) -> None:
    environment = {
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "LOCALSPEC_HOME": str(tmp_path / "ls"),
    }
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "localspec", "editor", *arguments, name]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )

    (tmp_path / (".config" if name == "nvim" else ".vim")).mkdir()
    paths_before = sorted(tmp_path.rglob("*"))
    preview = run("install", "--print").stdout
    assert sorted(tmp_path.rglob("*")) == paths_before
    stdout = run("install").stdout
    path = Path(stdout.splitlines()[0].removeprefix("Written: "))
    assert preview == f'" {path}\n{path.read_text()}\n'
    report = tmp_path / "told"
    command_ = f"call writefile([exists(':Localspec'), g:localspec_command[0]], '{report}')"
    command_ += " | help localspec | qall!"
    flags = ["--headless"] if name == "nvim" else ["--not-a-term", "-T", "dumb"]
    subprocess.run(
        [program(name), *flags, "-c", command_],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        check=True,
    )
    assert report.read_text().splitlines() == ["2", sys.executable]
    report.unlink()
    assert run("uninstall", "-y").stdout == f"Removed: {path}\n"
    assert not path.parents[4].exists()
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    refused = run("install")
    assert (refused.returncode, path.read_text()) == (1, "mine")
    assert "was not written by localspec" in refused.stderr
