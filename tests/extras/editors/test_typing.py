"""Any keys, in an editor with the plug-in and in one without: the text is what was typed and accepted."""

from __future__ import annotations

import random
import re
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.support.daemons import Home, temporary_home
from tests.support.editors import EDITORS, Editor, editing, infill, scripted
from tests.support.terminal import PATIENCE

TEXT = "import os\n\n\ndef add(one, two):\n\treturn one + two  # 日本 é\n\n\nprint(add(1, 2))\n"
ACCEPT = {"all": "\t", "line": "\x1b[Z", "word": "\x1b[1;5C", "next": "\x1b[1;5B"}
ACCEPT |= {"previous": "\x1b[1;5A", "dismiss": "\x1d"}
PART = {"all": r"(?s).*", "line": r"\n?[^\n]*", "word": r"\s*(?:\w+|[^\w\s]+)"}
# In Insert mode: text, what deletes and indents, arrows, menus, one command, another mode, a paste.
TYPED = [*"abc xyz_(,)'日\r", "   ", "e\u0301", "👩‍💻", "\x16u00e9", "\x0bo:", "\x12\x12a", "one"]
TYPED += [*"\x7f\x17\x15\x14\x04\x0e\x10\x05\x19\x03\x1b\x1b", "\x1b[200~to\tgo\non\x1b[201~"]
TYPED += [f"\x1b[{key}" for key in "A B C D F H 2~".split()]
TYPED += ["\x18\x0c", *(f"\x0f{keys}" for keys in ("x", "D", "j", ":2\r", "u"))]
# In Normal and Visual mode.
DONE = [*"iaAIoOsCR", "cw", "ciw", "gi", "gI", "3A", "2o"] * 2
DONE += [*"xpPuJ~.wbjkGD&\x12", *"gg dd yy yyp >> vd Vjd @a \x16jI \x16jA qaA!\x1bq".split()]
DONE += [":s/o/0/e\r", ":2\r", ":split\r", "\x17w", ":only\r", ":normal! Aone\r"]
DONE += [":undo 0\r"]


class Now(NamedTuple):
    """What somebody sees of an editor, and what is suggested there."""

    mode: str
    lines: list[str]
    place: list[int]  # the cursor's line and byte, from 1
    windows: int
    ghost: str


LOOK = "[mode(1), getline(1, '$'), [line('.'), col('.')], winnr('$'), %s]"
GHOST = "exists('*localspec#ghost#text') ? localspec#ghost#text() : ''"


def now(editor: Editor) -> Now:
    """Once nothing is asked any more."""
    editor.until(
        "exists('*localspec#statusline') ? localspec#statusline() : ''",
        lambda item: "…" not in item,
    )
    return Now(*editor.value(LOOK % GHOST))


def accepted(before: Now, text: str) -> tuple[list[str], list[int]]:
    """Lines and place with `text` at the cursor."""
    number, column = before.place
    line = before.lines[number - 1].encode()
    new = [*(line[: column - 1].decode() + text).split("\n")]
    place = [number + len(new) - 1, len(new[-1].encode()) + 1]
    new[-1] += line[column - 1 :].decode()
    return [*before.lines[: number - 1], *new, *before.lines[number:]], place


class Pair:
    """The two editors, and the keys so far."""

    def __init__(self, name: str, home: Home, stack: ExitStack, seed: int) -> None:
        self.random = random.Random(seed)
        self.keys: list[str] = []
        server = stack.enter_context(scripted(home.root / "s", self._reply))
        socket = f"let g:localspec_socket = '{server.server_address!s}'\nlet g:localspec_start = 0"
        self.editors: list[Editor] = []
        for which, settings in (("with", socket), ("without", "let g:loaded_localspec = 1")):
            (folder := home.root / which).mkdir()
            file = folder / "some.py"
            file.write_text(TEXT, encoding="utf-8")
            opened = editing(name, folder, home.environment, str(file), settings=settings + _MORE)
            self.editors.append(stack.enter_context(opened))

    def _reply(self, _: str, body: dict[str, Any]) -> list[bytes]:
        """The same for the same text."""
        drawn = random.Random(repr([body["prompt"], body.get("seed", 0)]))
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
        return infill("".join(drawn.choices(pieces, k=drawn.randrange(5))))

    def step(self) -> None:
        before = now(self.editors[0])
        if before.ghost and self.random.random() < 0.6:
            self._accept(before, self.random.choice([*ACCEPT, "all", "line", "word"]))
        else:
            typing = before.mode[0] in "iR" or before.mode == "niI"
            self.type(self.random.choice(TYPED if typing else DONE))
        self.same()

    def type(self, key: str) -> None:
        self.keys.append(key)
        for editor in self.editors:
            editor.type(key)
            self._wait(editor, key)

    def _wait(self, editor: Editor, key: str) -> None:
        """Until it has done with the keys. One that interrupts takes with it what was typed meanwhile, F12
        too: that is typed again."""
        if key.endswith("\x1b"):  # what comes next is no part of it
            time.sleep(0.15)
        count = editor.value("get(g:, 'done')")
        for deadline in (2.0, 4.0, PATIENCE):
            editor.type("\x1b[24~")
            if editor.comes("get(g:, 'done')", lambda done: done > count, deadline):
                return
        raise AssertionError(f"after {self.keys}: {editor.wrong} {editor.shown()}")

    def _accept(self, before: Now, what: str) -> None:
        ours, other = self.editors
        self.keys.append(what)
        ours.type(ACCEPT[what])
        self._wait(ours, what)
        if what not in PART:
            return
        found = re.match(PART[what], before.ghost)
        lines, (number, column) = accepted(before, found[0] if found else "")
        first, new = before.place[0], len(lines) - len(before.lines)
        changed = [_vim(lines[first - 1]), _vim(lines[first : first + new])]
        put = f"[setline({first}, {changed[0]}), append({first}, {changed[1]}), cursor({number}, {column})]"
        other.value(f"setbufvar(bufnr(), 'put', {_vim(put)})")
        other.type("\x1b[23~")
        self._wait(other, "F11")

    def same(self) -> None:
        """Both are alike, and nothing went wrong that does not without the plug-in."""
        one, two = map(now, self.editors)
        assert one._replace(ghost="") == two, self.keys
        assert one.mode[0] == "i" or one.ghost == "", self.keys
        assert self.editors[0].value("localspec#error()") == "", self.keys
        told, untold = (editor.value("execute('messages')") for editor in self.editors)
        assert re.findall(r"\bE\d+:.*", told) == re.findall(r"\bE\d+:.*", untold), self.keys


_MORE = """
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
def test_any_keys(name: str, seed: int) -> None:
    play(name, seed, 60)


def play(name: str, seed: int, steps: int) -> None:
    with temporary_home() as home, ExitStack() as stack:
        pair = Pair(name, home, stack, seed)
        for _ in range(steps):
            pair.step()
        for key in ("\x1b", "\x1b", *"uuuuu"):
            pair.type(key)
            pair.same()
