"""What the plug-in reads from the socket, in the editors themselves: any bytes, cut anywhere."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.editors import EDITORS, PLUGIN, chunked, program

# Feeds each message's pieces (bytes as hexadecimal) to the parser and writes what it made of them.
SCRIPT = """\
set encoding=utf-8
let &runtimepath = {plugin!r} .. ',' .. &runtimepath
let told = []
for pieces in json_decode(readfile({asked!r})[0])
  let [answer, events, thrown] = [localspec#http#answer(), [], '']
  try
    for piece in pieces
      let bytes = eval('"' .. substitute(piece, '..', '\\\\x\\0', 'g') .. '"')
      let events += localspec#http#feed(answer, bytes)
    endfor
  catch
    let thrown = v:exception
  endtry
  let body = answer.events ? '' : strtrans(answer.body)
  call add(told, [answer.state, answer.status, events, body, strtrans(thrown)])
endfor
call writefile([json_encode(told)], {told!r})
qall!
"""


def read(editor: str, folder: Path, messages: list[list[bytes]]) -> list[Any]:
    """State, status, events, body and exception of each message, read in these pieces."""
    asked, told = folder / "asked.json", folder / "told.json"
    asked.write_text(json.dumps([[piece.hex() for piece in pieces] for pieces in messages]))
    script = folder / "script.vim"
    script.write_text(SCRIPT.format(plugin=str(PLUGIN), asked=str(asked), told=str(told)))
    quietly = ["--headless"] if editor == "nvim" else ["-es"]
    command = [program(editor), *quietly, "-N", "-u", "NONE", "-i", "NONE", "-S", str(script)]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    answers: list[Any] = json.loads(told.read_text(encoding="utf-8", errors="replace"))
    return answers


def cut(message: bytes, chance: random.Random) -> list[bytes]:
    """In pieces, some of a byte; now and then all of them are."""
    size = chance.choice([1, 3, 40, 4000])
    pieces, at = [], 0
    while at < len(message):
        length = chance.randint(1, size)
        pieces.append(message[at : at + length])
        at += length
    return pieces


def body_of(events: list[dict[str, str]], chance: random.Random) -> bytes:
    """The events with what may stand between them: comments, names, the end's own mark."""
    text = ""
    for event in events:
        end = chance.choice(["\n", "\r\n"])
        text += chance.choice(["", f": ping{end}{end}", f"event: x{end}"])
        text += f"data: {json.dumps(event, ensure_ascii=chance.random() < 0.5)}{end}{end}"
    return (text + "data: [DONE]\n\n").encode()


def message(events: list[dict[str, str]], chance: random.Random) -> bytes:
    """A whole answer, chunked anywhere, of a known length, or ended by the connection."""
    head = chance.choice([b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
    head += b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nx: a: b\r\n"
    body = body_of(events, chance)
    match chance.choice(["chunked", "length", "close"]):
        case "chunked":
            sized = chunked(cut(body, chance))
            if chance.random() < 0.5:
                sized = sized.removesuffix(b"\r\n") + b"trailer: x\r\n\r\n"
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + sized
        case "length":
            return head + b"content-length: %d\r\n\r\n" % len(body) + body
        case _:
            return head + b"\r\n" + body


@pytest.mark.parametrize("editor", EDITORS)
def test_answers_are_read_however_they_are_cut(editor: str, tmp_path: Path) -> None:
    chance = random.Random(7)
    words = [
        "a",
        "é",
        "日本",
        "😀",
        "e\u0301",
        "\\",
        '"',
        "\t",
        "\n",
        "data: {}",
        "\r\n\r\n",
        " " * 99,
    ]
    wanted = [
        [
            {"content": "".join(chance.choices(words, k=chance.randint(0, 12)))}
            for _ in range(chance.randint(0, 5))
        ]
        for _ in range(40)
    ]
    cuts = [cut(message(events, chance), chance) for events in wanted]
    for events, (state, status, got, _, thrown) in zip(
        wanted, read(editor, tmp_path, cuts), strict=True
    ):
        assert (status, got, thrown) == (200, events, "")
        assert state in ("done", "close")


@pytest.mark.parametrize("editor", EDITORS)
def test_what_is_no_answer_is_one_exception_at_most(editor: str, tmp_path: Path) -> None:
    """Bytes changed, left out, repeated: what comes is read or refused, and nothing hangs."""
    chance = random.Random(11)
    broken = []
    for _ in range(40):
        whole = bytearray(message([{"content": "x" * 50}, {"content": "y"}], chance))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(whole))
            whole[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
        broken.append(cut(bytes(whole).replace(b"\0", b"0"), chance))
    for state, _, events, _, thrown in read(editor, tmp_path, broken):
        assert state in ("head", "size", "data", "mark", "trailer", "length", "close", "done")
        assert thrown == "" or "localspec: " in thrown or ":E" in thrown
        assert len(events) <= 2


@pytest.mark.parametrize("editor", EDITORS)
def test_an_error_is_gathered_whole(editor: str, tmp_path: Path) -> None:
    body = '{"error": {"message": "Loading é"}}'.encode()
    answer = b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    pieces = [bytes([byte]) for byte in answer % (len(body), body)]
    assert read(editor, tmp_path, [pieces]) == [["done", 503, [], body.decode(), ""]]
