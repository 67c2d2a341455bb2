"""Texts as literals of other languages, read again by those languages and by their rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localspec import literals
from tests.support.editors import program
from tests.support.patience import PATIENCE

# Paths: any bytes but NUL; names: any characters.
paths = st.one_of(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=40),
    st.text(st.sampled_from("\"'\\()[]{};,#`%$&|<>^\n\r\t\x07\x1b\x7f 019abnxu é😀\u00a0\u2028"),
            max_size=30),
    st.binary(max_size=30).map(lambda data: os.fsdecode(data.replace(b"\0", b""))),
)  # fmt: skip
EXAMPLES = [
    "/home/hé/localspec.sock",
    "/home/José/bin/python",
    "/x(1).gguf,/y/draft.gguf",
    "a b",
    "a\"b\\c'd",
    "\n7",
    "\x01" + "23",
    "😀",
    "\udcff\udc80" + "7",
    "]]--[[",
    "#1=(x)",
    "?",
    "",
]


def check_texts(test: Callable[[str], None]) -> Callable[[], None]:
    for text in EXAMPLES:
        test = example(text)(test)
    return settings(max_examples=120, deadline=None)(given(paths)(test))


def read_lua(literal: str) -> bytes:
    """Return the bytes of a string of Lua, by the manual's rules (5.1, section 2.1)."""
    assert re.fullmatch(r'"(?:[^"\\\n\r\0]|\\(?:[abfnrtv\\"\'\n]|[0-9]{1,3}))*"', literal), literal
    simple = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}

    def byte(match: re.Match[bytes]) -> bytes:
        letter = match[1].decode("latin-1")
        if letter.isdigit():
            assert int(letter) < 256
            return bytes([int(letter)])
        return bytes([simple[letter]]) if letter in simple else match[1]

    return re.sub(rb"\\([0-9]{1,3}|.)", byte, literal[1:-1].encode(), flags=re.DOTALL)


def read_lisp(literal: str) -> bytes:
    """Return the bytes of a string of Emacs Lisp, by the rules of its manual."""
    assert re.fullmatch(r'"(?:[^"\\]|\\(?:[0-7]{1,3}|u[0-9a-f]{4}|U[0-9a-f]{8}|["\\]))*"', literal)

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "uU":
            return chr(int(code[1:], 16))
        if code[0].isdigit():
            number = int(code, 8)
            # Numbers from 0x80 on are bytes, not characters.
            return chr(number) if number < 0x80 else chr(0xDC00 + number)
        return code

    text = re.sub(r"\\([0-7]{1,3}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)", character, literal[1:-1])
    return text.encode("utf-8", "surrogateescape")


def read_vim(literal: str) -> bytes:
    """Return the bytes of a string of Vim script (expr-quote, literal-string)."""
    if literal.startswith("'"):
        assert re.fullmatch(r"'(?:[^'\n]|'')*'", literal)
        return literal[1:-1].replace("''", "'").encode()
    assert re.fullmatch(r'"(?:[^"\\\n]|\\(?:x[0-9a-f]{2}|["\\]))*"', literal)
    return re.sub(
        rb"\\(x[0-9a-f]{2}|.)",
        lambda match: bytes.fromhex(match[1][1:].decode()) if match[1][:1] == b"x" else match[1],
        literal[1:-1].encode(),
    )


@pytest.mark.parametrize(
    ("write", "read"),
    [(literals.lua, read_lua), (literals.lisp, read_lisp), (literals.vim, read_vim)],
)
def test_a_literal_is_the_text(write: Callable[[str], str], read: Callable[[str], bytes]) -> None:
    @check_texts
    def holds(text: str) -> None:
        literal = write(text)
        assert literal.isprintable()  # one line, which any encoding of UTF-8 leaves as it is
        assert read(literal) == os.fsencode(text)

    holds()


def test_a_value_of_toml_and_of_yaml_is_the_text() -> None:
    @check_texts
    def holds(text: str) -> None:
        encodable = text.encode("utf-8", "ignore").decode()
        for value in (text, [text, "x", 1, True]):
            if encodable == text:
                assert tomllib.loads(f"key = {literals.toml(value)}")["key"] == value
                assert yaml.safe_load(f"key: {literals.yaml(value)}")["key"] == value
                assert "\n" not in literals.toml(value) + literals.yaml(value)
            else:
                with pytest.raises(ValueError, match="UTF-8"):
                    literals.toml(value)

    holds()


# The languages themselves.


def texts() -> list[str]:
    """Return the examples, and a text with every character of ASCII."""
    return [
        *EXAMPLES,
        "".join(map(chr, range(1, 128))),
        "é\x7f\x80\x85\u2028\U000e0001é",
        "a" * 300,
    ]


def run_and_read(command: list[str], tmp_path: Path) -> list[bytes]:
    environment = {**os.environ, "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
    result = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=environment)
    assert result.returncode == 0, result.stderr
    data = (tmp_path / "out").read_bytes()
    return [bytes.fromhex(line.decode()) for line in data.split(b"\n")[:-1]]


def test_lua_reads_our_literals(tmp_path: Path) -> None:
    lines = [
        f"f:write((({literals.lua(text)}):gsub('.', function(c) return "
        "string.format('%02x', c:byte()) end)) .. '\\n')"
        for text in texts()
    ]
    script = tmp_path / "x.lua"
    opened = f"f = io.open({literals.lua(str(tmp_path / 'out'))}, 'wb')"
    script.write_text("\n".join([opened, *lines, "f:close()"]))
    command = [program("nvim"), "--clean", "--headless", "-l", str(script)]
    assert run_and_read(command, tmp_path) == [os.fsencode(text) for text in texts()]


def test_emacs_reads_our_literals(tmp_path: Path) -> None:
    if not shutil.which("emacs"):
        pytest.skip("this machine has no emacs among its editors")
    forms = [
        f'(insert (mapconcat (lambda (c) (format "%02x" c)) (encode-coding-string {form} '
        '\'utf-8-unix) "") "\\n")'
        for text in texts()
        for form in (literals.lisp(text), f"(symbol-name {literals.lisp_symbol(text)})")
    ]
    script = tmp_path / "x.el"
    out = literals.lisp(str(tmp_path / "out"))
    script.write_text("\n".join([*forms, f"(write-region nil nil {out})"]))
    match = run_and_read(["emacs", "-Q", "--batch", "-l", str(script)], tmp_path)
    assert match == [os.fsencode(text) for text in texts() for _ in range(2)]


def test_vim_reads_our_literals(tmp_path: Path) -> None:
    script = tmp_path / "x.vim"
    lines = [
        f"call add(out, join(map(range(strlen({literal})), {{_, at -> "
        f"printf('%02x', char2nr({literal}[at]))}}), ''))"
        for literal in map(literals.vim, texts())
    ]
    # One byte at a time, whatever the encoding: Latin-1 has a character for each byte.
    write_command = f"call writefile(out, {literals.vim(str(tmp_path / 'out'))})"
    script.write_text("\n".join(["let out = []", *lines, write_command, "qa!"]))
    editor = program("nvim")
    match = run_and_read([editor, "--clean", "--headless", "-S", str(script)], tmp_path)
    assert match == [os.fsencode(text) for text in texts()]
