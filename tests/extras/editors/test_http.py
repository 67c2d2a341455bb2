"""Test the plug-in's HTTP parser in real editors, with any bytes, cut anywhere."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.editors import EDITORS, PLUGIN, chunked, program
from tests.support.patience import PATIENCE

# Feed the pieces of each message (in hexadecimal) to the parser and write its results.
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


def parse_in_editor(editor: str, folder: Path, messages: list[list[bytes]]) -> list[Any]:
    """Feed each message in pieces to an editor; return its state, status, events, body and exception."""
    messages_file, answers_file = folder / "asked.json", folder / "told.json"
    messages_file.write_text(json.dumps([[piece.hex() for piece in pieces] for pieces in messages]))
    script = folder / "script.vim"
    script.write_text(
        SCRIPT.format(plugin=str(PLUGIN), asked=str(messages_file), told=str(answers_file))
    )
    flags = ["--headless"] if editor == "nvim" else ["-es"]
    command = [program(editor), *flags, "-N", "-u", "NONE", "-i", "NONE", "-S", str(script)]
    subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False
    )
    answers: list[Any] = json.loads(answers_file.read_text(encoding="utf-8", errors="replace"))
    return answers


def cut_into_pieces(message: bytes, rng: random.Random) -> list[bytes]:
    """Cut a message into random pieces, sometimes of a single byte each."""
    size = rng.choice([1, 3, 40, 4000])
    pieces, position = [], 0
    while position < len(message):
        length = rng.randint(1, size)
        pieces.append(message[position : position + length])
        position += length
    return pieces


def make_body(events: list[dict[str, str]], rng: random.Random) -> bytes:
    """Return a body of events with comments and names between them, and the end mark."""
    text = ""
    for event in events:
        end = rng.choice(["\n", "\r\n"])
        text += rng.choice(["", f": ping{end}{end}", f"event: x{end}"])
        text += f"data: {json.dumps(event, ensure_ascii=rng.random() < 0.5)}{end}{end}"
    return (text + "data: [DONE]\n\n").encode()


def make_message(events: list[dict[str, str]], rng: random.Random) -> bytes:
    """Return a whole answer: chunked, with a content length, or ended by the connection."""
    head = rng.choice([b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
    head += b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nx: a: b\r\n"
    body = make_body(events, rng)
    match rng.choice(["chunked", "length", "close"]):
        case "chunked":
            sized = chunked(cut_into_pieces(body, rng))
            if rng.random() < 0.5:
                sized = sized.removesuffix(b"\r\n") + b"trailer: x\r\n\r\n"
            return head + b"Transfer-Encoding: chunked\r\n\r\n" + sized
        case "length":
            return head + b"content-length: %d\r\n\r\n" % len(body) + body
        case _:
            return head + b"\r\n" + body


@pytest.mark.parametrize("editor", EDITORS)
def test_answers_are_parsed_however_they_are_cut(editor: str, tmp_path: Path) -> None:
    rng = random.Random(7)
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
    expected = [
        [
            {"content": "".join(rng.choices(words, k=rng.randint(0, 12)))}
            for _ in range(rng.randint(0, 5))
        ]
        for _ in range(40)
    ]
    cuts = [cut_into_pieces(make_message(events, rng), rng) for events in expected]
    for events, (state, status, parsed, _, thrown) in zip(
        expected, parse_in_editor(editor, tmp_path, cuts), strict=True
    ):
        assert (status, parsed, thrown) == (200, events, "")
        assert state in ("done", "close")


@pytest.mark.parametrize("editor", EDITORS)
def test_invalid_answers_raise_at_most_one_exception(editor: str, tmp_path: Path) -> None:
    """Changed, missing or repeated bytes are parsed or refused, and the parser does not hang."""
    rng = random.Random(11)
    broken = []
    for _ in range(40):
        data = bytearray(make_message([{"content": "x" * 50}, {"content": "y"}], rng))
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(len(data))
            data[position : position + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        broken.append(cut_into_pieces(bytes(data).replace(b"\0", b"0"), rng))
    for state, _, events, _, thrown in parse_in_editor(editor, tmp_path, broken):
        assert state in ("head", "size", "data", "mark", "trailer", "length", "close", "done")
        assert thrown == "" or "localspec: " in thrown or ":E" in thrown
        assert len(events) <= 2


@pytest.mark.parametrize("editor", EDITORS)
def test_an_error_body_is_read_whole(editor: str, tmp_path: Path) -> None:
    body = '{"error": {"message": "Loading é"}}'.encode()
    answer = b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    pieces = [bytes([byte]) for byte in answer % (len(body), body)]
    assert parse_in_editor(editor, tmp_path, [pieces]) == [["done", 503, [], body.decode(), ""]]
