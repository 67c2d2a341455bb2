"""From a key to the suggestion on the screen, in a real editor with our plug-in, beside llama-server.

The same plug-in asks both: llama-server listens on a Unix socket, too, and answers the same requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.api.editor import CONTEXT, SHIPPED_CONTEXT, models_of, server_flags
from benchmarks.api.recorded import LINES, typed
from benchmarks.api.shared import REPOSITORY, SHIPPED, Bench, Section, number, percentile, sources
from benchmarks.command import say
from benchmarks.measuring.report import Verdict, table
from benchmarks.measuring.runs import BenchError

NAME = "ghost"
LIMIT = 1.0  # of llama-server's time
BLOCK = 10  # keys that are typed in one editor before the other's turn
PLUGIN = REPOSITORY / "localspec" / "extras" / "editors" / "vim"
START_S, ANSWER_S = 30.0, 120.0
SHOWN, KEPT, NOTHING = "shown", "kept", "nothing"

# Tells of each key what came of it and after how many milliseconds, once it is drawn. The plug-in's own
# handlers run first: they are there before InsertEnter. The line that is opened then is no key.
_SCRIPT = """\
set nocompatible encoding=utf-8 laststatus=2 noswapfile shortmess+=I noautoindent
let g:localspec_debounce = 0
let g:localspec_start = 0
let g:localspec_socket = {socket!r}
let &runtimepath = {plugin!r} .. ',' .. &runtimepath
let s:since = []
function! s:tell(what) abort
  let told = [a:what, reltimefloat(reltime(s:since)) * 1000, localspec#ghost#text()]
  let s:since = []
  call writefile([json_encode(told)], {told!r}, 'a')
endfunction
function! s:typed() abort
  let s:since = reltime()
  if !empty(localspec#ghost#text())
    return s:tell('kept')
  endif
  call localspec#note('')
endfunction
let s:item = ''
function! s:look(timer) abort
  if localspec#statusline() !=# s:item
    let s:item = localspec#statusline()
    call writefile([s:item], {item!r})
  endif
  if empty(s:since)
    return
  elseif !empty(localspec#ghost#text())
    redraw
    call s:tell('shown')
  elseif !empty(localspec#error())
    call s:tell(localspec#error())
  elseif localspec#statusline() =~# ' ms$'
    call s:tell('nothing')
  endif
endfunction
function! s:begin(timer) abort
  autocmd TextChangedI * call s:typed()
  call timer_start(1, function('s:look'), {{'repeat': -1}})
  call writefile([], {told!r})
endfunction
autocmd InsertEnter * call timer_start(100, function('s:begin'))
"""


@dataclass(frozen=True, slots=True)
class Key:
    """What became of a key.

    A suggestion was SHOWN after so many milliseconds, the earlier one goes on with the key (KEPT), or the
    answer was empty (NOTHING).
    """

    what: str
    ms: float
    text: str


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        NAME,
        "It types in a real editor, with what `editor` types with. Left out where there is none.",
    ).add_argument
    add("--program", default="vim", help="a Vim or a Neovim (vim)")


def measure(bench: Bench) -> Section:
    options = bench.options
    program = shutil.which(options.program)
    if program is None:
        return Section(f"There is no {options.program} here: nothing typed in it.\n", [], 0, {})
    models = models_of(bench)
    context = options.context or (SHIPPED_CONTEXT if models.target.parent == SHIPPED else CONTEXT)
    depth = 3 if models.draft is not None else 0
    rng = bench.rng(NAME)
    lines = "".join(sources()).split("\n")
    start = rng.randrange(len(lines) - LINES)
    text = "\n".join(lines[start : start + LINES]) + "\n"
    keys: dict[bool, list[Key]] = {True: [], False: []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lsb-")))
        socket = folder / "llama.sock"
        flags = server_flags(options)
        server = stack.enter_context(bench.server(models, context, depth, 2, flags, str(socket)))
        daemon = stack.enter_context(bench.daemon(models, context, 2))
        editors = {True: stack.enter_context(editing(program, folder / "a", daemon.socket, text))}
        if server is not None:
            editors[False] = stack.enter_context(editing(program, folder / "b", str(socket), text))
        characters = typed(options.keystrokes)
        for at in range(0, len(characters), BLOCK):
            for mine in rng.sample(sorted(editors), len(editors)):
                keys[mine] += map(editors[mine].key, characters[at : at + BLOCK])
                editors[mine].settle()
            say(f"key {at} of {options.keystrokes}")
    ours, theirs = keys[True][1:], keys[False][1:]  # the first one has all of the text read
    facts = {"ours": [asdict(key) for key in ours], "llama_server": [asdict(key) for key in theirs]}
    return Section(_report(options.program, ours, theirs), verdicts(ours, theirs), 0, facts)


def verdicts(ours: Sequence[Key], theirs: Sequence[Key]) -> list[Verdict]:
    """Beside llama-server's, over the keys after which a suggestion was asked for and came."""
    result = []
    mine, other = _waited(ours), _waited(theirs)
    if mine and other:
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            ratio = percentile(mine, share) / percentile(other, share)
            what = f"key to suggestion {name} in an editor / llama-server's"
            result.append(Verdict(what, ratio, LIMIT, at_least=False))
    return result


def _waited(keys: Sequence[Key]) -> list[float]:
    return [key.ms for key in keys if key.what == SHOWN]


def _report(program: str, ours: Sequence[Key], theirs: Sequence[Key]) -> str:
    rows = []
    for name, keys in (("ours", ours), ("llama-server", theirs)):
        waited = _waited(keys)
        counts = [str(sum(key.what == what for key in keys)) for what in (SHOWN, KEPT, NOTHING)]
        if keys:
            times = [number(percentile(waited, s), ".1f") if waited else "" for s in (0.5, 0.95)]
            rows.append([name, *counts, *times])
    header = ["", "new suggestion", "goes on with the key", "none", "ms p50", "p95"]
    return f"From a key to the suggestion on the screen, in {program}:\n\n{table(header, rows)}"


class Editor:
    """An editor with the plug-in on a terminal of its own, in Insert mode in the middle of a text."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, folder: Path) -> None:
        self._process, self._master = process, master
        self._told, self._item = folder / "told", folder / "item"
        self._seen = 0

    def key(self, character: str) -> Key:
        """Type it, and wait for what comes of it.

        Raises:
            BenchError: something went wrong in the editor, or nothing came.
        """
        self.send(character.replace("\n", "\r"))
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and self._process.poll() is None:
            self.show(0.002)
            lines = self._told.read_text(encoding="utf-8").split("\n")[:-1]
            if len(lines) > self._seen:
                self._seen = len(lines)
                key = Key(*json.loads(lines[-1]))
                if key.what not in (SHOWN, KEPT, NOTHING):
                    raise BenchError(f"The plug-in says: {key.what}")
                return key
        raise BenchError(f"Nothing came of the key {character!r}.")

    def settle(self) -> None:
        """Wait until it asks for nothing: what one's model still writes would be in the other's way.

        Raises:
            BenchError: an answer has no end.
        """
        deadline = time.monotonic() + ANSWER_S
        while self._item.read_text(encoding="utf-8").strip().endswith("…"):
            self.show(0.01)
            if time.monotonic() > deadline:
                raise BenchError("The plug-in waits for an answer that does not end.")
        self.show(0.1)

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def show(self, seconds: float) -> bytes:
        """Return what it drew meanwhile."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        with contextlib.suppress(OSError):  # it has ended
            return os.read(self._master, 1 << 16) if ready else b""
        return b""


@contextlib.contextmanager
def editing(program: str, folder: Path, socket: str, text: str) -> Iterator[Editor]:
    """Start an editor without user settings; its file has a new line in its middle, and the cursor there."""
    folder.mkdir()
    file, script, log = folder / "module.py", folder / "rc.vim", folder / "told"
    file.write_text(text, encoding="utf-8")
    filled = _SCRIPT.format(
        socket=socket, plugin=str(PLUGIN), told=str(log), item=str(folder / "item")
    )
    script.write_text(filled, encoding="utf-8")
    home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "LC_ALL": "C.UTF-8"}
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [program, "-u", str(script), str(file)],
        env={**os.environ, **home, "TERM": "xterm-256color"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    editor = Editor(process, master, folder)
    try:
        editor.send(f"{LINES // 2}Go")
        deadline = time.monotonic() + START_S
        while not log.exists():
            editor.show(0.01)
            if time.monotonic() > deadline:
                raise BenchError(f"{program} does not start.")
        yield editor
    finally:
        process.kill()
        process.wait()
        os.close(master)
