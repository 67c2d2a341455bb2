"""Test the language server with the client of pygls and with a real Neovim."""

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
from tests.support.daemons import Home, temporary_home, wait_for
from tests.support.editors import CALL, FITTING, Editor, Scripted, editing, json_response, scripted
from tests.support.patience import PATIENCE

URI = "file:///there/sum.py"
ENCODINGS: dict[Encoding, str] = {"utf-8": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
WIDTH = {"utf-8": 1, "utf-16": 2, "utf-32": 4}

texts = st.text("ab \t\n\r\x0b\x0c\x85\u2028é日😀", max_size=30)


def count_units(text: str, encoding: Encoding) -> int:
    return len(text.encode(ENCODINGS[encoding])) // WIDTH[encoding]


def strip_line_end(line: str) -> str:
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
def test_positions_are_converted_in_every_encoding(
    text: str, encoding: Encoding, data: st.DataObject
) -> None:
    document = Document(URI, text, encoding)
    line = data.draw(st.integers(0, len(document.lines) - 1))
    line_text = strip_line_end(document.lines[line])
    column = data.draw(st.integers(0, len(line_text)))
    unit_offset = count_units(line_text[:column], encoding)
    assert document.to_position(line, unit_offset) == Position(line, column)
    assert document.to_units(Position(line, column)) == unit_offset
    # A position beyond the line is its end; one within a character is before that character.
    assert document.to_position(line, count_units(line_text, encoding) + 3) == Position(
        line, len(line_text)
    )
    if column < len(line_text) and count_units(line_text[column], encoding) > 1:
        assert document.to_position(line, unit_offset + 1) == Position(line, column)
    assert document.to_position(len(document.lines), 0) == Position(
        len(document.lines) - 1, len(document.lines[-1])
    )


@given(texts, st.sampled_from(list(ENCODINGS)), st.lists(texts, max_size=4), st.data())
def test_changes_give_the_text_of_the_editor(
    text: str, encoding: Encoding, changes: list[str], data: st.DataObject
) -> None:
    document = Document(URI, text, encoding)
    for change in changes:
        positions, offsets = [], []
        for _ in range(2):
            line = data.draw(st.integers(0, len(document.lines) - 1))
            column = data.draw(st.integers(0, len(strip_line_end(document.lines[line]))))
            positions.append(Position(line, column))
            offsets.append(sum(map(len, document.lines[:line])) + column)
        start, end = sorted(offsets)
        text = text[:start] + change + text[end:]
        document.replace(min(positions), max(positions), change)
        assert document.lines == split_lines(text)


@pytest.mark.parametrize(("column", "suggestion", "trimmed"), FITTING)
def test_existing_text_is_trimmed_from_suggestions(
    column: int, suggestion: str, trimmed: str
) -> None:
    line, *below = CALL.splitlines()
    assert lsp.trim_suggestion(suggestion, line[column:], below) == trimmed


def test_an_item_of_a_menu_begins_with_the_word_at_the_cursor() -> None:
    assert lsp.make_menu_item("ytree(a)", "x = shutil.cop") == ("copytree(a)", "copytree(a)", "cop")
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


def test_code_is_the_block_or_the_whole_answer() -> None:
    block = lsp.fence("a\n```\nb", "python")
    assert block == "````python\na\n```\nb\n````"
    assert lsp.extract_code(f"Here:\n{block}\nDone.", "") == "a\n```\nb"
    assert lsp.extract_code("\na\r\nb\n", "a\nb\nc") == "a\nb"


def test_visited_places_are_sent_after_they_are_taken() -> None:
    document = Document("file:///a/one%20.py", "".join(f"line {n}\n" for n in range(300)), "utf-8")
    visited = VisitedPlaces()
    visited.rest(document, 10)
    assert visited.extra() == []
    assert visited.send_waiting()
    visited.rest(document, 60)  # This is near the last place.
    assert not visited.send_waiting()
    visited.rest(document, 100)
    visited.leave(document, 12)  # This replaces the first place, which is near.
    assert visited.send_waiting()
    excerpts = [(entry["filename"], entry["text"].partition("\n")[0]) for entry in visited.extra()]
    assert excerpts == [("one .py", "line 76"), ("one .py", "line 0")]
    for line in range(0, 300, 40):
        visited.leave(document, line)
    assert visited.send_waiting()
    assert all(len(entry["text"].splitlines()) <= 48 for entry in visited.extra())


def test_visited_places_are_prefilled_when_idle(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lsp, "_QUIET_S", 0.0)

    def extra(body: dict[str, Any]) -> list[str]:
        return [entry["filename"] for entry in body["input_extra"]]

    async def type_in_both(server: Scripted) -> None:
        session = lsp.EditorSession(AsyncDaemon(str(server.server_address)))
        for name in ("one", "two"):
            uri = f"file:///{name}.py"
            session.documents[uri] = Document(uri, f"{name}\n" * 9, "utf-8")
            suggestion = await session.suggest(f"file:///{name}.py", 4, 3)
            assert suggestion is not None
            assert (suggestion.before, suggestion.text) == (name, "()")
        file_names = ["one.py", "two.py"]
        while not any(
            body["n_predict"] == 0 and extra(body) == file_names for _, body in server.requests
        ):
            await asyncio.sleep(0.01)
        session.close("file:///two.py")
        await session.suggest("file:///one.py", 5, 0)
        assert extra(server.requests[-1][1]) == file_names

    with scripted(home.root / "s", lambda *_: json_response({"content": "()"})) as server:
        asyncio.run(asyncio.wait_for(type_in_both(server), PATIENCE))


@pytest.mark.parametrize("is_long", [False, True])
def test_a_document_is_announced_as_its_first_completion_asks(home: Home, is_long: bool) -> None:
    async def announce(server: Scripted) -> None:
        session = lsp.EditorSession(AsyncDaemon(str(server.server_address)))
        text = "".join(f"line {n}\n" for n in range(4000 if is_long else 40))
        uri, document = "file:///one.py", Document("file:///one.py", text, "utf-8")
        session.documents[uri] = document
        session.announce(document)
        if is_long:  # where the cursor is in it shows the first key
            session.move_cursor(document, 2000)
        while not server.announced:
            await asyncio.sleep(0.01)
        (before,) = server.announced
        await session.suggest(uri, 2001 if is_long else 30, 0)
        ((_, asked),) = server.requests
        begun, whole = (body["input_prefix"] + body["prompt"] for body in (before, asked))
        assert begun.startswith(whole.rstrip("\n")) or whole.startswith(begun)
        assert asked["input_extra"] == before["input_extra"]

    with scripted(home.root / "s", lambda *_: json_response({"content": "()"})) as server:
        asyncio.run(asyncio.wait_for(announce(server), PATIENCE))


def test_a_failed_start_is_not_repeated_at_once() -> None:
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
def test_a_missing_library_is_reported_with_its_cure(
    command: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as refused:
        servers.require_server(command)
    assert refused.value.message.endswith(f"run: {installation.install_extra_command(command)}")


def test_a_terminal_shows_that_an_editor_starts_it(home: Home) -> None:
    command = [sys.executable, "-m", "localspec", "lsp"]
    result = subprocess.run(
        command, env=home.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "is started by an editor" in result.stderr


class SentRequest(NamedTuple):
    """A request that was sent and may be answered later."""

    client: Client
    number: int
    future: Any

    @property
    def answer(self) -> Any:
        return self.client.run(self.future)

    def cancel(self) -> None:
        """Cancel the request and wait for the server's reply."""
        self.client.client.cancel_request(types.CancelParams(self.number))
        with pytest.raises(JsonRpcRequestCancelled):
            _ = self.answer


class Client:
    """The client of pygls with the server that it started and the server's messages."""

    def __init__(self, home: Home, encoding: Encoding, *, inline: bool) -> None:
        self.loop = asyncio.Runner()
        self.client = LanguageClient("tests", "0")
        self.messages: list[str] = []
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
        self.server_capabilities = self.run(
            self.client.initialize_async(types.InitializeParams(capabilities=capabilities))
        ).capabilities
        self.client.initialized(types.InitializedParams())

    def _tell(self, params: Any) -> None:
        self.messages.append(params.message)

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
        async def wait() -> Any:
            return await asyncio.wait_for(awaited, PATIENCE)

        return self.loop.run(wait())

    def until(self, condition: Callable[[], Any]) -> None:
        """Process messages of the server until the condition holds."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.run(wait())

    def open(self, text: str) -> None:
        item = types.TextDocumentItem(URI, "python", 1, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))

    def type(self, line: int, character: int, text: str) -> None:
        self._version += 1
        position = types.Position(line, character)
        change = types.TextDocumentContentChangePartial(types.Range(position, position), text)
        document = types.VersionedTextDocumentIdentifier(uri=URI, version=self._version)
        self.client.text_document_did_change(types.DidChangeTextDocumentParams(document, [change]))

    def ask(self, method: str, params: Any) -> SentRequest:
        """Send a request without waiting for its answer."""
        number = next(self._numbers)

        async def send() -> Any:
            return self.client.protocol.send_request_async(method, params, msg_id=number)

        return SentRequest(self, number, self.run(send()))

    def completion(self, line: int, character: int) -> SentRequest:
        document, position = types.TextDocumentIdentifier(URI), types.Position(line, character)
        if self.server_capabilities.inline_completion_provider:
            context = types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic)
            params: Any = types.InlineCompletionParams(context, document, position)
            return self.ask(types.TEXT_DOCUMENT_INLINE_COMPLETION, params)
        params = types.CompletionParams(document, position)
        return self.ask(types.TEXT_DOCUMENT_COMPLETION, params)

    def command(self, name: str, first_line: int, last_line: int, *words: str) -> SentRequest:
        arguments = [{"uri": URI, "first": first_line, "last": last_line}, *words]
        params = types.ExecuteCommandParams(f"localspec.{name}", arguments)
        return self.ask(types.WORKSPACE_EXECUTE_COMMAND, params)

    def close(self) -> None:
        self.run(self.client.shutdown_async(None))
        self.client.exit(None)
        self.run(self.client.stop())  # type: ignore[no-untyped-call]
        self.loop.close()


@pytest.fixture(scope="module")
def real() -> Iterator[Home]:
    """Yield a home whose daemon has loaded the shipped pair."""
    with temporary_home() as home:
        home.run("start")
        assert home.request("POST", "/infill", {"prompt": "x", "n_predict": 1}).status == 200
        yield home


@contextlib.contextmanager
def pause_engine(home: Home) -> Iterator[None]:
    """Pause the engine, so that a running request does not end by itself."""
    worker = home.status()["worker_pid"]
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def count_cancelled(home: Home) -> int:
    """Return the daemon's count of cancelled requests."""
    count: int = home.status()["counts"]["cancelled"]
    return count


CODE = "import shutil\n\n\ndef copy(a, b):\n    '😀é日', "


def test_completions_with_wide_characters_before_the_cursor(real: Home) -> None:
    """Every encoding gives the daemon's completion of the text up to the cursor."""
    above, _, line = f"{CODE}shutil.c".rpartition("\n")
    fields = {"n_predict": 64, "top_k": 40, "top_p": 0.99, "samplers": ["top_k", "top_p", "infill"]}
    body = {"input_prefix": f"{above}\n", "prompt": line, "input_suffix": "", **fields}
    expected = real.request("POST", "/infill", body).json["content"].rstrip()
    assert expected
    for encoding in ENCODINGS:
        client = Client(real, encoding, inline=encoding != "utf-16")
        assert client.server_capabilities.position_encoding == encoding
        client.open(CODE)
        client.type(4, count_units(CODE.rpartition("\n")[2], encoding), "shutil.c")
        (item,) = client.completion(4, count_units(line, encoding)).answer.items
        if encoding == "utf-16":
            start = count_units(line, encoding) - 1
            assert item.text_edit.range.start == types.Position(4, start)
            assert item.text_edit.new_text == f"c{expected}"
        else:
            assert item.insert_text == expected
            assert item.range.start == types.Position(4, count_units(line, encoding))
        assert client.messages == []
        client.close()


def test_abandoned_requests_end_and_a_dead_daemon_is_restarted(real: Home) -> None:
    client = Client(real, "utf-8", inline=True)
    client.open(f"{CODE}shutil.c")
    end = len(f"{CODE}shutil.c".rpartition("\n")[2].encode())
    cancelled_before = count_cancelled(real)
    with pause_engine(real):
        request = client.completion(4, end)
        client.until(lambda: real.status()["running"])
        request.cancel()
        client.until(lambda: count_cancelled(real) == cancelled_before + 1)
    with pause_engine(real):
        assert client.command("explain", 3, 4).answer is None
        client.until(lambda: client.working and real.status()["running"])
        stop = types.WorkDoneProgressCancelParams(client.working[0])
        client.client.window_work_done_progress_cancel(stop)
        client.until(lambda: not client.working)
        client.until(lambda: count_cancelled(real) == cancelled_before + 2)
    client.until(lambda: real.status()["running"] == 0)
    with pause_engine(real):
        request = client.completion(4, end)
        client.until(lambda: real.status()["running"])
        os.kill(real.status()["pid"], signal.SIGKILL)
        assert request.answer.items == ()
    wait_for(lambda: not autostart.listens(str(real.socket)), "the daemon's end")
    (item,) = client.completion(4, end).answer.items  # The next request starts the daemon again.
    assert item.insert_text
    assert len(client.messages) == 1
    assert "The daemon ended in the middle of its answer" in client.messages[0]
    client.close()


class Neovim:
    """Neovim with the language server, one file, and a scripted daemon."""

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
        (_, body), *_ = desk.server.requests
        assert (body["prompt"], body["input_suffix"]) == ("    return😀", "\n")
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
        # Neovim 0.11 handles pending messages once Visual mode has ended.
        editor.type("\r\x1b")  # Accept the instruction of the comment.
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
