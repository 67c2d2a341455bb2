"""Texts as literals of other languages, for files and settings that localspec writes for other programs.

A text may be any path or name: every character that could end a literal, begin an escape, or be changed by
the reader's encoding or line ends is written as an escape. A byte of a path that is no UTF-8, which Python
keeps as a lone surrogate, is written as that byte where the language has bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_UNSAFE_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_UNSAFE_IN_TOML = re.compile("[\x7f\u0080-\u009f\u2028\u2029]")


def lua(text: str) -> str:
    """Return a string of Lua, whose escapes are bytes."""
    return _quoted(text, lambda character: _by_bytes(character, "\\{:03d}"))


def lisp(text: str) -> str:
    """Return a string of Emacs Lisp, whose octal escapes above 177 are bytes and no characters."""

    def escape(character: str) -> str:
        code = ord(character)
        if code < 0x80 or 0xD800 <= code < 0xE000:
            return _by_bytes(character, "\\{:03o}")
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return _quoted(text, escape)


def lisp_symbol(text: str) -> str:
    """Return an expression of Emacs Lisp whose value is the symbol of that name."""
    return f"(intern {lisp(text)})"


def vim(text: str) -> str:
    """Return a string of Vim script."""
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    return _quoted(text, lambda character: _by_bytes(character, "\\x{:02x}"))


def toml(value: object) -> str:
    """Return a string, number, boolean or list of TOML, which writes them as JSON does, but for characters
    beyond the 16 bits of JSON's escapes.

    Raises:
        ValueError: a text has a part of a character, which TOML has no form for.
    """
    text = json.dumps(value, ensure_ascii=False)
    if re.search("[\ud800-\udfff]", text):
        raise ValueError("not UTF-8")
    return _UNSAFE_IN_TOML.sub(_escaped, text)


def yaml(value: object) -> str:
    """Return a value of YAML in JSON's form, without characters that YAML forbids or folds."""
    return _UNSAFE_IN_YAML.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _quoted(text: str, escape: Callable[[str], str]) -> str:
    """Return a text in double quotes, with `escape` for what may not stand there as it is."""
    written = ""
    for character in text:
        if character in '\\"':
            written += f"\\{character}"
        elif character.isprintable():
            written += character
        else:
            written += escape(character)
    return f'"{written}"'


def _by_bytes(character: str, form: str) -> str:
    return "".join(map(form.format, character.encode("utf-8", "surrogateescape")))
