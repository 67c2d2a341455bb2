"""Texts as literals of other languages, for files that localspec writes for other programs.

A text may be any path or name. Every character that could end a literal, begin an escape, or be changed by
the reader's encoding or line endings is written as an escape. Python keeps a byte of a path that is not
UTF-8 as a lone surrogate; where the language has bytes, it is written as that byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_UNSAFE_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_UNSAFE_IN_TOML = re.compile("[\x7f\u0080-\u009f\u2028\u2029]")


def lua(text: str) -> str:
    """Return `text` as a Lua string, whose escapes are bytes."""
    return _quote(text, lambda character: _escape_bytes(character, "\\{:03d}"))


def lisp(text: str) -> str:
    """Return `text` as an Emacs Lisp string, whose octal escapes above 177 are raw bytes."""

    def escape(character: str) -> str:
        code = ord(character)
        if code < 0x80 or 0xD800 <= code < 0xE000:
            return _escape_bytes(character, "\\{:03o}")
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return _quote(text, escape)


def lisp_symbol(text: str) -> str:
    """Return an Emacs Lisp expression whose value is the symbol named `text`."""
    return f"(intern {lisp(text)})"


def vim(text: str) -> str:
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    return _quote(text, lambda character: _escape_bytes(character, "\\x{:02x}"))


def toml(value: object) -> str:
    """Return a string, number, boolean or list as TOML.

    TOML writes these values as JSON does, except for characters beyond the 16 bits of JSON's escapes. Raises
    ValueError if a text contains a lone surrogate, which TOML cannot represent.
    """
    text = json.dumps(value, ensure_ascii=False)
    if re.search("[\ud800-\udfff]", text):
        raise ValueError("not UTF-8")
    return _UNSAFE_IN_TOML.sub(_escape_utf16, text)


def yaml(value: object) -> str:
    """Return a value as YAML in JSON's form, without characters that YAML forbids or folds."""
    return _UNSAFE_IN_YAML.sub(_escape_utf16, json.dumps(value, ensure_ascii=False))


def _escape_utf16(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def _quote(text: str, escape: Callable[[str], str]) -> str:
    """Return a text in double quotes; `escape` replaces characters that may not stand there as they are."""
    literal = ""
    for character in text:
        if character in '\\"':
            literal += f"\\{character}"
        elif character.isprintable():
            literal += character
        else:
            literal += escape(character)
    return f'"{literal}"'


def _escape_bytes(character: str, form: str) -> str:
    return "".join(map(form.format, character.encode("utf-8", "surrogateescape")))
