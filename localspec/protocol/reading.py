"""Decode JSON bodies into declared structs, and refuse others with one sentence.

msgspec checks types and limits. This module rewrites its messages so that they begin with the
field's name, and reports what plain JSON forbids as well (NaN, lone surrogates, NUL). Null means
the same as a missing field: clients send it to request the default.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.inspect import (
    ListType,
    LiteralType,
    Metadata,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

# Limit of strings, lists and objects in a body. Each takes 50 to 250 bytes of memory. A chat of 10 000
# messages has about 60 000.
MAX_BODY_PARTS = 1 << 18
# Limit of commas in a body, most of which separate numbers of 8 to 40 bytes. It admits prompts of a million
# token ids.
MAX_BODY_ITEMS = 5 << 18
# Bytes; splitting a long text at its quotes at once would cost the memory to be saved.
_PIECE_BYTES = 1 << 16
_MAX_ESCAPE_BYTES = 6  # bytes of the longest escape, \u0000
# Naming the invalid field takes a walk through the values, and a second decoding if it is no JSON. Both are
# limited to sizes that a person might search by hand.
_MAX_REREAD_BYTES = 1 << 20  # bytes
_MAX_SEARCHED_VALUES = 20_000  # keys and values
MAX_REPAIRS = 64  # times that a body is converted again because integers in it are written as 7.0


class BadBody(ValueError):
    """A request body that does not match its declaration. `param` names the invalid field, if known."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class TooComplex(ValueError):
    """A body has more structure than any real request."""


class BodyComplexity:
    """A count of the structure in a body. `nul` says whether an escaped NUL occurs in it.

    It is taken while the body arrives, before anything is decoded, in time linear in its bytes.
    Decoded, a byte of text costs a byte or a few, but a byte of structure up to a hundred: 16 MiB
    of empty lists become five million objects, and nothing else in the process runs while they are
    created.
    """

    def __init__(self) -> None:
        self.items = 0
        self.nul = False
        self._quotes = 0
        self._brackets = 0
        self._unfinished = b""  # beginning of an escape that ends in the next piece

    @property
    def parts(self) -> int:
        """Number of strings, lists and objects."""
        return self._quotes // 2 + self._brackets

    def count_piece(self, piece: bytes | bytearray) -> None:
        """Count the next piece of the body. Raises TooComplex: the remaining ones need not be read."""
        # Without escaped backslashes, every backslash that remains begins an escape.
        data = (self._unfinished + piece).replace(rb"\\", b"")
        cut = data.rfind(b"\\", max(len(data) - _MAX_ESCAPE_BYTES + 1, 0))
        if data[cut + 1 : cut + 2] not in (b"", b"u"):
            cut = -1  # the escape has two characters and is complete
        self._unfinished = b"" if cut < 0 else data[cut:]
        data = data if cut < 0 else data[:cut]
        self.nul = self.nul or rb"\u0000" in data
        parts = data.replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[self._quotes % 2 :: 2])
        self._quotes += len(parts) - 1
        self._brackets += outside.count(b"[") + outside.count(b"{")
        self.items += outside.count(b",")
        if self.parts > MAX_BODY_PARTS:
            raise TooComplex(
                f"The request has more than {MAX_BODY_PARTS} strings, lists and objects in total."
            )
        if self.items > MAX_BODY_ITEMS:
            raise TooComplex(f"The request has more than {MAX_BODY_ITEMS} items.")

    def count_text(self, text: bytes | bytearray) -> None:
        """Count another complete text; see `count_piece`."""
        self._unfinished = b""
        self._quotes += self._quotes % 2
        for start in range(0, len(text), _PIECE_BYTES):
            self.count_piece(text[start : start + _PIECE_BYTES])


Body = TypeVar("Body", bound=Struct)


def decode(body: bytes | bytearray, kind: type[Body], weight: BodyComplexity | None = None) -> Body:
    """Return the request in `body`; see `decode_body`."""
    return decode_body(body, kind, weight)[0]


def decode_body(
    body: bytes | bytearray, kind: type[Body], weight: BodyComplexity | None = None
) -> tuple[Body, dict[str, Any]]:
    """Return the request in `body`, and the object that it was converted from.

    `weight` is given if it was counted while the body arrived.

    Raises:
        BadBody: the body is invalid; its message names the field and what it may be.
    """
    try:
        if weight is None:
            weight = BodyComplexity()
            weight.count_text(body)
    except TooComplex as error:
        raise BadBody(str(error)) from None
    value = _parse(body, kind)
    # A search for the invalid field, and a conversion for each one, are for bodies of a person's size.
    is_short = len(body) <= _MAX_REREAD_BYTES
    try:
        request = _convert(value, kind, MAX_REPAIRS if is_short else 1)
    except msgspec.ValidationError as error:
        explained = explain(str(error), kind)
        raise (_name_key(explained, value, kind) if is_short else explained) from None
    if weight.nul:
        raise _find_nul(value if is_short else None)
    if (tools := getattr(request, "tools", None)) and isinstance(tools[0], Struct):
        # Each tool has its caller's own object, with keys that no struct declares.
        for tool, original in zip(tools, value["tools"], strict=True):
            tool.__dict__["own"] = original
    return request, value


def _parse(body: bytes | bytearray, kind: type[Struct]) -> Any:
    """Return the JSON value of a body. Raises BadBody if it is not JSON."""
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise BadBody("The request body is nested too deeply.") from None
    except msgspec.ValidationError:  # a number out of range, which only a type can name
        try:
            msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as named:
            raise explain(str(named), kind) from None
        except UnicodeDecodeError as malformed:
            raise _find_malformed(body, malformed) from None
        raise BadBody("The request body has a number that is too large.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _find_malformed(body, error) from None


def _convert(value: object, kind: type[Body], repairs: int = MAX_REPAIRS) -> Body:
    """Convert a value that was decoded without a type.

    Clients in Lua, Go and R write integers as 7.0. Where a field needs an integer, such numbers are
    replaced in `value`, and it is converted again. Raises msgspec.ValidationError.
    """
    for _ in range(repairs):
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            refused = _FLOAT_FOR_INT.match(str(error))
            path = re.findall(r"\w+|\[(?:\d+|\.\.\.)\]", refused["path"]) if refused else []
            if not _floats_to_integers(value, path):
                raise
    return msgspec.convert(value, kind)


def _floats_to_integers(value: Any, path: Sequence[str]) -> bool:
    """Replace floats at `path` in `value` that are integers. Return whether there was any.

    "[...]" stands for a key of an object that msgspec does not name, so all of them are tried. For
    an item of a list, all items are tried.
    """
    if not path or not isinstance(value, dict | list):
        return False
    step, remaining = path[0], path[1:]
    keys: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))]
    if not step.startswith("["):
        keys = [step] if step in value else []
    elif remaining and isinstance(value, list):
        keys = [int(step[1:-1])]
    changed = False
    for key in keys:
        number = value[key]
        if remaining:
            changed |= _floats_to_integers(number, remaining)
        elif isinstance(number, float) and number.is_integer() and abs(number) <= 2**53:
            value[key] = int(number)  # a float represents integers of this size exactly
            changed = True
    return changed


def convert(value: object, kind: type[Body], at: str) -> Body:
    """Convert a part of a request, at the path `at` ("tools[0]"). Raises BadBody as `decode`."""
    try:
        return _convert(value, kind)
    except msgspec.ValidationError as error:
        explained = explain(str(error), kind)
        path = f"{at}.{explained.param}" if explained.param else at
        subject = f"'{explained.param}'" if explained.param else "The request body"
        raise BadBody(explained.message.replace(subject, f"'{path}'", 1), path) from None


_MESSAGE_AND_PATH = re.compile(
    r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL
)
# A float where only an integer is expected.
_FLOAT_FOR_INT = re.compile(
    r"^Expected `(?:[^`]*\| )?int(?: \|[^`]*)?`, got `float` - at `\$\.?(?P<path>[^`]*)`$"
)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_LENGTH = re.compile(r"Expected `(\w+)` of length (<=|>=) (\d+)$")
_LIMIT = re.compile(r"Expected `[^`]+` (<=|>=|<|>) (\S+)$")
_TYPE = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`)?$")
_UNKNOWN = re.compile(r"Object contains unknown field `(\w+)`$")
_ENUM = re.compile(r"Invalid enum value (.+)$", re.DOTALL)
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
_EXPECTED_NAMES = {
    "float": "a number",
    "int": "a whole number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_ACTUAL_NAMES = {**_EXPECTED_NAMES, "float": "a number with a fraction", "null": "null"}


def explain(message: str, kind: type[Struct]) -> BadBody:
    """Turn msgspec's message ("Expected `float` <= 2.0 - at `$.temperature`") into a sentence.

    The sentence begins with the field's name.
    """
    match = _MESSAGE_AND_PATH.match(message)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    if missing := _MISSING.match(what):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadBody(f"'{path}' is missing.", path)
    if unknown := _UNKNOWN.match(what):
        structs = (one for one in _types_at(kind, path) if isinstance(one, StructType))
        fields = [field.encode_name for struct in structs for field in struct.fields]
        names = " or ".join(fields) or "nothing else"
        path = f"{path}.{unknown[1]}" if path else unknown[1]
        return BadBody(f"'{path}' is not known; there may be {names}.", path)
    if path and not path.endswith("]") and what.endswith("got `null`"):
        return BadBody(f"'{path}' is missing.", path)  # null counts as a missing field
    subject = f"'{path}'" if path else "The request body"
    return BadBody(f"{subject} {_describe(what, kind, path)}.", path or None)


_KEY = re.compile(r"(\w+)\[\.\.\.\]$")


def _name_key(error: BadBody, value: Any, kind: type[Struct]) -> BadBody:
    """Name the first invalid key of an object, which msgspec's message does not name."""
    match = _KEY.match(error.param or "")
    if match is None:
        return error
    name = match[1]
    [field_type] = [field.type for field in msgspec.structs.fields(kind) if field.name == name]
    for key, member in islice(value[name].items(), _MAX_SEARCHED_VALUES):
        try:
            msgspec.convert({key: member}, field_type)
        except msgspec.ValidationError:
            path = f"{name}[{json.dumps(key, ensure_ascii=False)}]"
            return BadBody(error.message.replace(f"{name}[...]", path, 1), path)
    return error


def _describe(what: str, kind: type[Struct], path: str) -> str:
    """Return the second half of the sentence, after "'temperature' "."""
    if match := _LIMIT.match(what):
        return f"must be {_BOUNDS[match[1]]} {match[2].removesuffix('.0')}"
    if what.lower().endswith("out of range"):  # 1e999: infinite, or an integer beyond 64 bits
        return "must be a finite number"
    if match := _LENGTH.match(what):
        unit = "character" if match[1] == "str" else "item"
        plural = "" if match[3] == "1" else "s"
        return f"must have {_BOUNDS[match[2]]} {match[3]} {unit}{plural}"
    if match := _TYPE.match(what):
        kinds = [kind for kind in match[1].split(" | ") if kind != "null"]
        expected = " or ".join(_EXPECTED_NAMES.get(kind, kind) for kind in kinds)
        instead = f", not {_ACTUAL_NAMES.get(match[2], match[2])}" if match[2] else ""
        return f"must be {expected}{instead}"
    if match := _ENUM.match(what):
        literals = (one for one in _types_at(kind, path) if isinstance(one, LiteralType))
        choices = " or ".join(f"'{value}'" for literal in literals for value in literal.values)
        return f"must be {choices}, not {match[1]}" if choices else f"may not be {match[1]}"
    return f"is refused: {what[:1].lower()}{what[1:].partition(', got ')[0]}"


def _types_at(kind: type[Struct], path: str) -> list[Type]:
    types: list[Type] = [type_info(kind)]
    for name in re.findall(r"[^\W\d]\w*|\[", path):
        types = [member for outer in types for member in _member_types(outer, name)]
    return types


def _member_types(outer: Type, name: str) -> list[Type]:
    """Return the types of field `name`, or of an item if `name` is "["; unions are split."""
    member: Type | None = None
    if isinstance(outer, ListType | VarTupleType) and name == "[":
        member = outer.item_type
    elif isinstance(outer, StructType):
        member = next((field.type for field in outer.fields if field.encode_name == name), None)
    if isinstance(member, Metadata):
        member = member.type
    if isinstance(member, UnionType):
        return list(member.types)
    return [member] if member else []


def _find_nul(value: object) -> BadBody:
    """Return the error for a NUL character, with the field's path if it is found quickly."""
    for path, leaf in islice(_walk(value), _MAX_SEARCHED_VALUES):
        if isinstance(leaf, str) and "\0" in leaf:
            return BadBody(f"'{path}' contains a NUL character, which is not allowed.", path)
    return BadBody("The request contains a NUL character, which is not allowed.")


def _find_malformed(body: bytes | bytearray, error: Exception) -> BadBody:
    """Return why `body` is not JSON.

    Python's decoder accepts NaN and lone surrogates, so these can be located in what it returns.
    """
    if len(body) > _MAX_REREAD_BYTES:
        return BadBody(f"The request body is not valid JSON: {error}.")
    try:
        value = json.loads(body)
    except RecursionError:
        return BadBody("The request body is nested too deeply.")
    except UnicodeDecodeError:
        return BadBody("The request body is not valid UTF-8.")
    except ValueError as python_error:
        return BadBody(f"The request body is not valid JSON: {python_error}.")
    for path, leaf in islice(_walk(value), _MAX_SEARCHED_VALUES):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return BadBody(f"'{path}' must be a finite number, not {leaf}.", path)
        if isinstance(leaf, str) and any("\ud800" <= char <= "\udfff" for char in leaf):
            problem = "contains half a surrogate pair, which is not a valid character."
            return BadBody(f"'{path}' {problem}", path)
    return BadBody(f"The request body is not valid JSON: {error}.")


def _walk(value: object) -> Iterator[tuple[str, Any]]:
    """Yield every key and scalar in `value` with its path, in order and without recursion."""

    def members(value: dict[str, Any] | list[Any], path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, list):
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
            return
        for key, item in value.items():
            item_path = f"{path}.{key}" if path else key
            yield from ((item_path, key), (item_path, item))

    stack = [iter([("", value)])]
    while stack:
        for path, item in stack[-1]:
            if isinstance(item, dict | list):
                stack.append(members(item, path))
                break
            yield path.encode("utf-8", "replace").decode(), item
        else:
            stack.pop()


Kind = TypeVar("Kind")

if TYPE_CHECKING:
    OrDefault = Annotated[Kind, "or null, for the default"]
else:

    class OrDefault:
        """The type of a field that also accepts null: `OrDefault[kind]`.

        Null gives the field its default.
        """

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind | None


class Request(Struct):
    """Base of request structs that have a field whose default is not null.

    Structs that a body may contain by the million do without it, because it costs a call for each.
    """

    def __post_init__(self) -> None:
        for name, factory in _default_factories(type(self)):
            if getattr(self, name) is None:
                setattr(self, name, factory())


@cache
def _default_factories(kind: type[Struct]) -> list[tuple[str, Any]]:
    """Return the optional fields whose default is not null, each with a factory for the default."""
    factories = []
    for field in msgspec.structs.fields(kind):
        if field.default_factory is not msgspec.NODEFAULT:
            factories.append((field.name, field.default_factory))
        elif field.default is not msgspec.NODEFAULT and field.default is not None:
            factories.append((field.name, lambda default=field.default: default))
    return factories
