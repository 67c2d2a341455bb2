"""Test random keys in an editor with the plug-in and in one without: both must have the same text."""

from __future__ import annotations

import random
import re
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.support.daemons import Home, temporary_home
from tests.support.editors import EDITORS, Editor, editing, infill, scripted
from tests.support.patience import PATIENCE

TEXT = "import os\n\n\ndef add(one, two):\n\treturn one + two  # 日本 é\n\n\nprint(add(1, 2))\n"
ACCEPT = {"all": "\t", "line": "\x1b[Z", "word": "\x1b[1;5C", "next": "\x1b[1;5B"}
ACCEPT |= {"previous": "\x1b[1;5A", "dismiss": "\x1d"}
PART = {"all": r"(?s).*", "line": r"\n?[^\n]*", "word": r"\s*(?:\w+|[^\w\s]+)"}
# Insert mode: text, deletion, indentation, arrows, menus, commands, other modes and a paste.
INSERT_KEYS = [
    *"abc xyz_(,)'日\r",
    "   ",
    "e\u0301",
    "👩‍💻",
    "\x16u00e9",
    "\x0bo:",
    "\x12\x12a",
    "one",
]
INSERT_KEYS += [*"\x7f\x17\x15\x14\x04\x0e\x10\x05\x19\x03\x1b\x1b", "\x1b[200~to\tgo\non\x1b[201~"]
INSERT_KEYS += [f"\x1b[{key}" for key in "A B C D F H 2~".split()]
INSERT_KEYS += ["\x18\x0c", *(f"\x0f{keys}" for keys in ("x", "D", "j", ":2\r", "u"))]
# Keys of Normal and Visual mode.
COMMANDS = [*"iaAIoOsCR", "cw", "ciw", "gi", "gI", "3A", "2o"] * 2
COMMANDS += [*"xpPuJ~.wbjkGD&\x12", *"gg dd yy yyp >> vd Vjd @a \x16jI \x16jA qaA!\x1bq".split()]
COMMANDS += [":s/o/0/e\r", ":2\r", ":split\r", "\x17w", ":only\r", ":normal! Aone\r"]
COMMANDS += [":undo 0\r"]


class Snapshot(NamedTuple):
    """The visible state of an editor and its suggestion."""

    mode: str
    lines: list[str]
    place: list[int]  # the line and byte of the cursor, from 1
    windows: int
    ghost: str


SNAPSHOT_EXPRESSION = "[mode(1), getline(1, '$'), [line('.'), col('.')], winnr('$'), %s]"
GHOST_EXPRESSION = "exists('*localspec#ghost#text') ? localspec#ghost#text() : ''"


def take_snapshot(editor: Editor) -> Snapshot:
    """Return the state of an editor once no request is running."""
    editor.until(
        "exists('*localspec#statusline') ? localspec#statusline() : ''",
        lambda item: "…" not in item,
    )
    return Snapshot(*editor.value(SNAPSHOT_EXPRESSION % GHOST_EXPRESSION))


def accept_text(snapshot: Snapshot, text: str) -> tuple[list[str], list[int]]:
    """Return the lines and the cursor after `text` is inserted at the cursor."""
    number, column = snapshot.place
    line = snapshot.lines[number - 1].encode()
    new_lines = [*(line[: column - 1].decode() + text).split("\n")]
    place = [number + len(new_lines) - 1, len(new_lines[-1].encode()) + 1]
    new_lines[-1] += line[column - 1 :].decode()
    return [*snapshot.lines[: number - 1], *new_lines, *snapshot.lines[number:]], place


class EditorPair:
    """The two editors and the keys so far."""

    def __init__(self, name: str, home: Home, stack: ExitStack, seed: int) -> None:
        self.random = random.Random(seed)
        self.keys: list[str] = []
        server = stack.enter_context(scripted(home.root / "s", self._reply))
        socket = f"let g:localspec_socket = '{server.server_address!s}'\nlet g:localspec_start = 0"
        self.editors: list[Editor] = []
        for folder_name, settings in (("with", socket), ("without", "let g:loaded_localspec = 1")):
            (folder := home.root / folder_name).mkdir()
            file = folder / "some.py"
            file.write_text(TEXT, encoding="utf-8")
            opened = editing(
                name, folder, home.environment, str(file), settings=settings + _EXTRA_SETTINGS
            )
            self.editors.append(stack.enter_context(opened))

    def _reply(self, _: str, body: dict[str, Any]) -> list[bytes]:
        """Return a random suggestion that depends only on the text and the seed."""
        rng = random.Random(repr([body["prompt"], body.get("seed", 0)]))
        pieces = [
            "one",
            "two",
            " ",
            "\n",
            "\n\t",
            ")",
            " = ",
            "日本",
            "(x, y)",
            "\n\n",
            "%",
            "<lt>",
            "é",
            "'",
        ]
        return infill("".join(rng.choices(pieces, k=rng.randrange(5))))

    def step(self) -> None:
        snapshot = take_snapshot(self.editors[0])
        if snapshot.ghost and self.random.random() < 0.6:
            self._accept(snapshot, self.random.choice([*ACCEPT, "all", "line", "word"]))
        else:
            typing = snapshot.mode[0] in "iR" or snapshot.mode == "niI"
            self.type(self.random.choice(INSERT_KEYS if typing else COMMANDS))
        self.check_same()

    def type(self, key: str) -> None:
        self.keys.append(key)
        for editor in self.editors:
            editor.type(key)
            self._wait(editor, key)

    def _wait(self, editor: Editor, key: str) -> None:
        """Wait until the editor has processed the keys.

        A key that interrupts discards pending keys, including F12, so F12 is typed again.
        """
        if key.endswith("\x1b"):  # The next key must not be part of an escape sequence.
            time.sleep(0.15)
        count = editor.value("get(g:, 'done')")
        for deadline in (2.0, 4.0, PATIENCE):
            editor.type("\x1b[24~")
            if editor.comes("get(g:, 'done')", lambda keys_done: keys_done > count, deadline):
                return
        raise AssertionError(f"after {self.keys}: {editor.wrong} {editor.shown()}")

    def _accept(self, snapshot: Snapshot, command: str) -> None:
        plugin_editor, plain_editor = self.editors
        self.keys.append(command)
        plugin_editor.type(ACCEPT[command])
        self._wait(plugin_editor, command)
        if command not in PART:
            return
        match = re.match(PART[command], snapshot.ghost)
        lines, (number, column) = accept_text(snapshot, match[0] if match else "")
        row, added = snapshot.place[0], len(lines) - len(snapshot.lines)
        changed = [_vim(lines[row - 1]), _vim(lines[row : row + added])]
        edit = f"[setline({row}, {changed[0]}), append({row}, {changed[1]}), cursor({number}, {column})]"
        plain_editor.value(f"setbufvar(bufnr(), 'put', {_vim(edit)})")
        plain_editor.type("\x1b[23~")
        self._wait(plain_editor, "F11")

    def check_same(self) -> None:
        """Check that both editors have the same state and the same errors."""
        with_plugin, without_plugin = map(take_snapshot, self.editors)
        assert with_plugin._replace(ghost="") == without_plugin, self.keys
        assert with_plugin.mode[0] == "i" or with_plugin.ghost == "", self.keys
        assert self.editors[0].value("localspec#error()") == "", self.keys
        messages, plain_messages = (editor.value("execute('messages')") for editor in self.editors)
        assert re.findall(r"\bE\d+:.*", messages) == re.findall(r"\bE\d+:.*", plain_messages), (
            self.keys
        )


_EXTRA_SETTINGS = """
set ttimeoutlen=50 autoindent softtabstop=4 backspace=indent,eol,start nojoinspaces
let g:loaded_matchparen = 1
noremap <F12> <Cmd>let g:done = get(g:, 'done') + 1<CR>
noremap! <F12> <Cmd>let g:done = get(g:, 'done') + 1<CR>
inoremap <F11> <C-g>u<Cmd>call eval(b:put)<CR>
silent! iunmap <Tab>
silent! iunmap <S-Tab>
"""


def _vim(value: str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_vim, value))}]"
    return "'" + value.replace("'", "''") + "'"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", EDITORS)
def test_random_keys_give_the_same_text(name: str, seed: int) -> None:
    play_keys(name, seed, 60)


def play_keys(name: str, seed: int, steps: int) -> None:
    with temporary_home() as home, ExitStack() as stack:
        pair = EditorPair(name, home, stack, seed)
        for _ in range(steps):
            pair.step()
        for key in ("\x1b", "\x1b", *"uuuuu"):
            pair.type(key)
            pair.check_same()
