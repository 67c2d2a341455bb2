"""The language server, asked by pygls' client and by a real Neovim."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types
from pygls.exceptions import JsonRpcRequestCancelled
from pygls.lsp.client import LanguageClient

from localspec import installation
from localspec.client import autostart
from localspec.client.tasks import AsyncDaemon
from localspec.errors import NoDaemon, UsageError
from localspec.extras.editors import lsp, servers
from localspec.extras.editors.lsp import Document, Encoding, Position, VisitedPlaces, split_lines
from tests.support.daemons import PATIENCE, Home, temporary_home, wait_for
from tests.support.editors import CALL, FITTING, Editor, Scripted, editing, json_response, scripted

URI = "file:///there/sum.py"
ENCODINGS: dict[Encoding, str] = {"utf-8": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
WIDTH = {"utf-8": 1, "utf-16": 2, "utf-32": 4}

# ---------------------------------------------------------------------------- texts and places

texts = st.text("ab \t\n\r\x0b\x0c\x85\u2028é日😀", max_size=30)


def units(text: str, encoding: Encoding) -> int:
    return len(text.encode(ENCODINGS[encoding])) // WIDTH[encoding]


def content(line: str) -> str:
    return line.removesuffix("\n").removesuffix("\r")


@given(texts)
def test_lines_end_as_the_protocol_says(text: str) -> None:
    lines = split_lines(text)
    assert "".join(lines) == text
    normal = text.replace("\r\n", "\n").replace("\r", "\n")
    assert [line.replace("\r\n", "\n").replace("\r", "\n") for line in lines[:-1]] == [
        f"{line}\n" for line in normal.split("\n")[:-1]
    ]
    assert lines[-1] == normal.split("\n")[-1]


@given(texts, st.sampled_from(list(ENCODINGS)), st.data())
def test_a_position_is_the_same_place_in_every_encoding(
    text: str, encoding: Encoding, data: st.DataObject
) -> None:
    document = Document(URI, text, encoding)
    line = data.draw(st.integers(0, len(document.lines) - 1))
    here = content(document.lines[line])
    column = data.draw(st.integers(0, len(here)))
    there = units(here[:column], encoding)
    assert document.to_position(line, there) == Position(line, column)
    assert document.to_units(Position(line, column)) == there
    # Beyond the line is its end; within a character is before that.
    assert document.to_position(line, units(here, encoding) + 3) == Position(line, len(here))
    if column < len(here) and units(here[column], encoding) > 1:
        assert document.to_position(line, there + 1) == Position(line, column)
    assert document.to_position(len(document.lines), 0) == Position(
        len(document.lines) - 1, len(document.lines[-1])
    )


@given(texts, st.sampled_from(list(ENCODINGS)), st.lists(texts, max_size=4), st.data())
def test_changes_make_the_text_that_the_editor_has(
    text: str, encoding: Encoding, changes: list[str], data: st.DataObject
) -> None:
    document = Document(URI, text, encoding)
    for change in changes:
        places, offsets = [], []
        for _ in range(2):
            line = data.draw(st.integers(0, len(document.lines) - 1))
            column = data.draw(st.integers(0, len(content(document.lines[line]))))
            places.append(Position(line, column))
            offsets.append(sum(map(len, document.lines[:line])) + column)
        start, end = sorted(offsets)
        text = text[:start] + change + text[end:]
        document.replace(min(places), max(places), change)
        assert document.lines == split_lines(text)


# ---------------------------------------------------------------------------- what is shown and asked


@pytest.mark.parametrize(("column", "suggestion", "shown"), FITTING)
def test_what_is_there_already_is_not_suggested(column: int, suggestion: str, shown: str) -> None:
    line, *below = CALL.splitlines()
    assert lsp.trim_suggestion(suggestion, line[column:], below) == shown


def test_an_item_of_a_menu_begins_with_the_word_at_the_cursor() -> None:
    assert lsp.make_menu_item("ytree(a)", "x = shutil.cop") == (
        "copytree(a)",
        "copytree(a)",
        "cop",
    )
    assert lsp.make_menu_item("\n    b\nc", "a:") == ("b…", "\n    b\nc", "")
    label, text, back = lsp.make_menu_item("y" * 99, "x ")
    assert (len(label), text, back) == (61, "y" * 99, "")


def test_an_instruction_is_found_in_a_comment_of_any_language() -> None:
    for line in (
        "  # localspec: add types",
        "/* localspec: add types */",
        "<!--localspec:add types-->",
    ):
        assert lsp.parse_instruction(line) == "add types"
    assert lsp.parse_instruction("# use localspec for this") == ""
    assert lsp.parse_instruction("# localspec:") == ""


def test_code_is_an_answers_block_or_all_of_it() -> None:
    block = lsp.fence("a\n```\nb", "python")
    assert block == "````python\na\n```\nb\n````"
    assert lsp.extract_code(f"Here:\n{block}\nDone.", "") == "a\n```\nb"
    assert lsp.extract_code("\na\r\nb\n", "a\nb\nc") == "a\nb"


def test_places_that_were_visited_are_sent_once_they_are_taken() -> None:
    one = Document("file:///a/one%20.py", "".join(f"line {n}\n" for n in range(300)), "utf-8")
    visited = VisitedPlaces()
    visited.rest(one, 10)
    assert visited.extra() == []
    assert visited.send_waiting()
    visited.rest(one, 60)  # not far away
    assert not visited.send_waiting()
    visited.rest(one, 100)
    visited.leave(one, 12)  # near the first one, whose place it takes
    assert visited.send_waiting()
    shown = [(each["filename"], each["text"].partition("\n")[0]) for each in visited.extra()]
    assert shown == [("one .py", "line 76"), ("one .py", "line 0")]
    for line in range(0, 300, 40):
        visited.leave(one, line)
    assert visited.send_waiting()
    assert all(len(each["text"].splitlines()) <= 48 for each in visited.extra())


def test_what_was_visited_is_read_ahead_in_a_quiet_moment(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lsp, "_QUIET_S", 0.0)

    def extra(body: dict[str, Any]) -> list[str]:
        return [each["filename"] for each in body["input_extra"]]

    async def type_in_both(server: Scripted) -> None:
        sat = lsp.EditorSession(AsyncDaemon(str(server.server_address)))
        for name in ("one", "two"):
            sat.open(Document(f"file:///{name}.py", f"{name}\n" * 9, "utf-8"))
            found = await sat.suggest(f"file:///{name}.py", 4, 3)
            assert found is not None
            assert (found.before, found.text) == (name, "()")
        both = ["one.py", "two.py"]
        while not any(
            body["n_predict"] == 0 and extra(body) == both for _, body in server.requests
        ):
            await asyncio.sleep(0.01)
        sat.close("file:///two.py")
        await sat.suggest("file:///one.py", 5, 0)
        assert extra(server.requests[-1][1]) == both

    with scripted(home.root / "s", lambda *_: json_response({"content": "()"})) as server:
        asyncio.run(asyncio.wait_for(type_in_both(server), PATIENCE))


def test_a_daemon_that_does_not_start_is_let_be_for_a_while() -> None:
    started: list[bool] = []

    def call(client: Any) -> dict[str, Any]:
        started.append(client.autostart)
        raise NoDaemon("It does not start.")

    async def keys() -> None:
        daemon = AsyncDaemon("/nonexistent/socket")
        for patient in (False, False, True):
            with pytest.raises(NoDaemon):
                await daemon.run(call, patient=patient)

    asyncio.run(keys())
    assert started == [True, False, True]


@pytest.mark.parametrize(("command", "package"), [("lsp", "pygls"), ("acp", "acp")])
def test_a_missing_library_is_said_with_its_cure(
    command: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as refused:
        servers.require_server(command)
    assert refused.value.message.endswith(f"run: {installation.install_extra_command(command)}")


def test_somebody_at_a_terminal_is_told_who_starts_it(home: Home) -> None:
    command = [sys.executable, "-m", "localspec", "lsp"]
    done = subprocess.run(
        command, env=home.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "is started by an editor" in done.stderr


# ---------------------------------------------------------------------------- a client library


class Asked(NamedTuple):
    """A request that was sent."""

    client: Client
    number: int
    future: Any

    @property
    def answer(self) -> Any:
        return self.client.run(self.future)

    def cancel(self) -> None:
        """Tell the server so, and wait until it has answered that."""
        self.client.client.cancel_request(types.CancelParams(self.number))
        with pytest.raises(JsonRpcRequestCancelled):
            _ = self.answer


class Client:
    """pygls' client and the server that it started, with what the server told it."""

    def __init__(self, home: Home, encoding: Encoding, *, inline: bool) -> None:
        self.loop = asyncio.Runner()
        self.client = LanguageClient("tests", "0")
        self.told: list[str] = []
        self.applied: list[types.WorkspaceEdit] = []
        self.client.feature(types.WINDOW_LOG_MESSAGE)(lambda params: self._tell(params))
        self.client.feature(types.WINDOW_SHOW_MESSAGE)(lambda params: self._tell(params))
        self.client.feature(types.WORKSPACE_APPLY_EDIT)(lambda params: self._apply(params))
        self.working: list[types.ProgressToken] = []
        self.client.feature(types.WINDOW_WORK_DONE_PROGRESS_CREATE)(lambda _: None)
        self.client.feature(types.PROGRESS)(lambda params: self._work(params))
        self._version = 1
        self._numbers = itertools.count(1)
        document = types.TextDocumentClientCapabilities(
            inline_completion=types.InlineCompletionClientCapabilities() if inline else None
        )
        general = types.GeneralClientCapabilities(position_encodings=[encoding])
        window = types.WindowClientCapabilities(work_done_progress=True)
        capabilities = types.ClientCapabilities(
            text_document=document, general=general, window=window
        )
        command = (sys.executable, "-m", "localspec", "lsp")
        self.loop.run(self.client.start_io(*command, env=home.environment))
        self.can = self.run(
            self.client.initialize_async(types.InitializeParams(capabilities=capabilities))
        ).capabilities
        self.client.initialized(types.InitializedParams())

    def _tell(self, params: Any) -> None:
        self.told.append(params.message)

    def _work(self, params: types.ProgressParams) -> None:
        value: Any = params.value
        if value["kind"] == "begin":
            self.working.append(params.token)
        else:
            self.working.remove(params.token)

    def _apply(self, params: types.ApplyWorkspaceEditParams) -> types.ApplyWorkspaceEditResult:
        self.applied.append(params.edit)
        return types.ApplyWorkspaceEditResult(applied=True)

    def run(self, awaited: Awaitable[Any]) -> Any:
        async def soon() -> Any:
            return await asyncio.wait_for(awaited, PATIENCE)

        return self.loop.run(soon())

    def until(self, condition: Callable[[], Any]) -> None:
        """Go on with what the server says until it is so."""

        async def soon() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.run(soon())

    def open(self, text: str) -> None:
        item = types.TextDocumentItem(URI, "python", 1, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))

    def type(self, line: int, character: int, text: str) -> None:
        self._version += 1
        here = types.Position(line, character)
        change = types.TextDocumentContentChangePartial(types.Range(here, here), text)
        document = types.VersionedTextDocumentIdentifier(uri=URI, version=self._version)
        self.client.text_document_did_change(types.DidChangeTextDocumentParams(document, [change]))

    def ask(self, method: str, params: Any) -> Asked:
        """Send a request now; its answer is waited for later."""
        number = next(self._numbers)

        async def begun() -> Any:
            return self.client.protocol.send_request_async(method, params, msg_id=number)

        return Asked(self, number, self.run(begun()))

    def completion(self, line: int, character: int) -> Asked:
        document, here = types.TextDocumentIdentifier(URI), types.Position(line, character)
        if self.can.inline_completion_provider:
            context = types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic)
            params: Any = types.InlineCompletionParams(context, document, here)
            return self.ask(types.TEXT_DOCUMENT_INLINE_COMPLETION, params)
        params = types.CompletionParams(document, here)
        return self.ask(types.TEXT_DOCUMENT_COMPLETION, params)

    def command(self, name: str, first: int, last: int, *words: str) -> Asked:
        arguments = [{"uri": URI, "first": first, "last": last}, *words]
        params = types.ExecuteCommandParams(f"localspec.{name}", arguments)
        return self.ask(types.WORKSPACE_EXECUTE_COMMAND, params)

    def close(self) -> None:
        self.run(self.client.shutdown_async(None))
        self.client.exit(None)
        self.run(self.client.stop())  # type: ignore[no-untyped-call]
        self.loop.close()


@pytest.fixture(scope="module")
def real() -> Iterator[Home]:
    """A daemon with the shipped pair, which is loaded."""
    with temporary_home() as home:
        home.run("start")
        assert home.request("POST", "/infill", {"prompt": "x", "n_predict": 1}).status == 200
        yield home


@contextlib.contextmanager
def stopped(home: Home) -> Iterator[None]:
    """Meanwhile the engine does nothing: a request that has begun does not end by itself."""
    worker = home.status()["worker_pid"]
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def cancelled(home: Home) -> int:
    """How many requests of clients that have left the daemon counts."""
    count: int = home.status()["counts"]["cancelled"]
    return count


CODE = "import shutil\n\n\ndef copy(a, b):\n    '😀é日', "


def test_completions_with_wide_characters_before_the_cursor(real: Home) -> None:
    """Every encoding gets what the daemon says to the text up to the cursor."""
    above, _, line = f"{CODE}shutil.c".rpartition("\n")
    fields = {"n_predict": 64, "top_k": 40, "top_p": 0.99, "samplers": ["top_k", "top_p", "infill"]}
    asked = {"input_prefix": f"{above}\n", "prompt": line, "input_suffix": "", **fields}
    expected = real.request("POST", "/infill", asked).json["content"].rstrip()
    assert expected
    for encoding in ENCODINGS:
        client = Client(real, encoding, inline=encoding != "utf-16")
        assert client.can.position_encoding == encoding
        client.open(CODE)
        client.type(4, units(CODE.rpartition("\n")[2], encoding), "shutil.c")
        (item,) = client.completion(4, units(line, encoding)).answer.items
        if encoding == "utf-16":
            start = units(line, encoding) - 1
            assert item.text_edit.range.start == types.Position(4, start)
            assert item.text_edit.new_text == f"c{expected}"
        else:
            assert item.insert_text == expected
            assert item.range.start == types.Position(4, units(line, encoding))
        assert client.told == []
        client.close()


def test_what_nobody_waits_for_is_ended_and_a_dead_daemon_costs_one_suggestion(real: Home) -> None:
    client = Client(real, "utf-8", inline=True)
    client.open(f"{CODE}shutil.c")
    end = len(f"{CODE}shutil.c".rpartition("\n")[2].encode())
    before = cancelled(real)
    with stopped(real):
        asked = client.completion(4, end)
        client.until(lambda: real.status()["running"])
        asked.cancel()
        client.until(lambda: cancelled(real) == before + 1)
    with stopped(real):
        assert client.command("explain", 3, 4).answer is None
        client.until(lambda: client.working and real.status()["running"])
        stop = types.WorkDoneProgressCancelParams(client.working[0])
        client.client.window_work_done_progress_cancel(stop)
        client.until(lambda: not client.working)
        client.until(lambda: cancelled(real) == before + 2)
    client.until(lambda: real.status()["running"] == 0)
    with stopped(real):
        asked = client.completion(4, end)
        client.until(lambda: real.status()["running"])
        os.kill(real.status()["pid"], signal.SIGKILL)
        assert asked.answer.items == ()
    wait_for(lambda: not autostart.listens(str(real.socket)), "the daemon's end")
    (item,) = client.completion(4, end).answer.items  # whoever types next starts it anew
    assert item.insert_text
    assert len(client.told) == 1
    assert "The daemon ended in the middle of its answer" in client.told[0]
    client.close()


# ---------------------------------------------------------------------------- Neovim


class Neovim:
    """Neovim as it is set up for the server, with one file, and the socket that is asked."""

    def __init__(self, home: Home, stack: ExitStack) -> None:
        self.suggestion = ""
        self.answer = ""
        (home.root / "run").mkdir()
        self.server: Scripted = stack.enter_context(scripted(home.socket, self._reply))
        self.file = home.root / "sum.py"
        self.file.write_text("# localspec: add types\ndef add(a, b):\n    return\n")
        lua = home.root / "lsp.lua"
        lua.write_text(home.run("editor", "config", "nvim-lsp").stdout)
        self.editor: Editor = stack.enter_context(
            editing(
                "nvim",
                home.root,
                home.environment,
                str(self.file),
                settings=f"let g:localspec_enabled = 0\nset completeopt=menuone\nsource {lua}",
            )
        )

    def _reply(self, target: str, body: dict[str, Any]) -> list[bytes]:
        if target == "/infill":
            return json_response({"content": self.suggestion})
        message = {"content": self.answer}
        return json_response({"choices": [{"message": message, "finish_reason": "stop"}]})


def test_neovim_completes_explains_and_edits() -> None:
    with temporary_home() as home, ExitStack() as stack:
        desk = Neovim(home, stack)
        editor = desk.editor
        editor.until("luaeval('#vim.lsp.get_clients()')", 1)
        desk.suggestion = " a +\\\n        b"
        editor.type("GA😀\x18\x0f")  # <C-x><C-o>
        editor.until("pumvisible()", 1)
        (_, asked), *_ = desk.server.requests
        assert (asked["prompt"], asked["input_suffix"]) == ("    return😀", "\n")
        editor.type("\x19")  # <C-y>
        editor.until("getline(3, '$')", ["    return😀 a +\\"])
        desk.answer = "It adds."

        def act(keys: str, number: int) -> None:
            editor.type(f"{keys}gra")
            wait_for(lambda: "Type number" in "".join(editor.shown()[-2:]), "the actions")
            editor.type(f"{number}\r")

        editor.type("\x1bu")
        act("", 1)
        editor.until("getbufline('explanation-1.md', 1)", ["It adds."])
        desk.answer = "```\ndef add(a: int, b: int):\n    return\n```"
        act("1GVG", 2)
        wait_for(lambda: editor.shown()[-1].startswith("Instruction:"), "the question")
        # Neovim 0.11 handles what comes meanwhile once Visual mode is left.
        editor.type("\r\x1b")  # no other instruction than the comment's
        editor.until("getline(1, '$')", ["def add(a: int, b: int):", "    return"])
        editor.type("u")
        editor.until("line('$')", 3)
        act("2GVG", 2)
        wait_for(lambda: editor.shown()[-1].startswith("Instruction:"), "the question")
        editor.type("say more\r\x1b")
        editor.until(
            "getline(1, '$')", ["# localspec: add types", "def add(a: int, b: int):", "    return"]
        )
        question = desk.server.requests[-1][1]["messages"][0]["content"]
        assert "all 2 lines of this part" in question
        assert question.endswith("except for this change: say more.")
        assert editor.wrong == []
