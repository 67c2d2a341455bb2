"""JSON bodies into declared structs; what does not fit is refused in one sentence.

msgspec checks types and limits. Its messages are turned round here, so that a person reads the
field's name first, and what plain JSON forbids (NaN, lone surrogates, NUL) is named as well. null means
what leaving out means: clients send it for what they leave to us.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Struct

# Strings, lists and objects, each of 50 to 250 bytes: a chat of 10 000 messages has some 60 000.
MOST_PARTS = 1 << 18
# Commas, so numbers for the most part, of 8 to 40 bytes: prompts of a million token ids.
MOST_ITEMS = 5 << 18
_PIECE = 1 << 16  # bytes; a long text taken apart at its quotes would cost what is to be saved
_ESCAPE = 6  # bytes of the longest one, \u0000
# Naming the field at fault takes a second reading and a walk: enough for what a person may search.
_READ_TWICE = 1 << 20  # bytes
_LOOKED_AT = 20_000  # keys and values
MOST_REPAIRS = 64  # readings of a body whose whole numbers are written as 7.0


class BadBody(ValueError):
    """A request body that is not what was declared. `param` is the field, when one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class TooHeavy(ValueError):
    """More structure than any request has."""


class Weight:
    """The structure of a text so far; `nul` is whether \\u0000 stands somewhere in it.

    It is counted while the text comes in, before anything is decoded, in a time that hangs on the bytes
    alone. A byte of text costs a byte or a few, a byte of structure up to a hundred: 16 MiB of empty lists
    are five million objects, made while nothing else in the process runs.
    """

    def __init__(self) -> None:
        self.items = 0
        self.nul = False
        self._quotes = 0
        self._brackets = 0
        self._held = b""  # the beginning of an escape that ends in the next piece

    @property
    def parts(self) -> int:
        """Strings, lists and objects."""
        return self._quotes // 2 + self._brackets

    def feed(self, piece: bytes | bytearray) -> None:
        r"""Count the next piece of the text.

        Raises:
            TooHeavy: it has too much structure. What comes after need not be read.
        """
        data = (self._held + piece).replace(rb"\\", b"")  # what is left begins an escape
        cut = data.rfind(b"\\", max(len(data) - _ESCAPE + 1, 0))
        if data[cut + 1 : cut + 2] not in (b"", b"u"):
            cut = -1  # one of two characters, and whole
        self._held = b"" if cut < 0 else data[cut:]
        data = data if cut < 0 else data[:cut]
        self.nul = self.nul or rb"\u0000" in data
        parts = data.replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[self._quotes % 2 :: 2])
        self._quotes += len(parts) - 1
        self._brackets += outside.count(b"[") + outside.count(b"{")
        self.items += outside.count(b",")
        if self.parts > MOST_PARTS:
            raise TooHeavy(
                f"The request has more than {MOST_PARTS} strings, lists and objects in total."
            )
        if self.items > MOST_ITEMS:
            raise TooHeavy(f"The request has more than {MOST_ITEMS} items.")

    def add(self, text: bytes | bytearray) -> None:
        """Count a whole text more; see feed."""
        self._held = b""
        self._quotes += self._quotes % 2
        for at in range(0, len(text), _PIECE):
            self.feed(text[at : at + _PIECE])


Body = TypeVar("Body", bound=Struct)
_decoders: dict[type[Struct], msgspec.json.Decoder[Any]] = {}


def decode(body: bytes | bytearray, kind: type[Body], weight: Weight | None = None) -> Body:
    """The request in `body`; `weight` where it was taken while the body came in.

    Raises:
        BadBody: one sentence that names the field and what it may be.
    """
    try:
        if weight is None:
            weight = Weight()
            weight.add(body)
    except TooHeavy as error:
        raise BadBody(str(error)) from None
    try:
        request, body = _decoded(body, kind)
    except msgspec.ValidationError as error:
        raise _named_key(_refused(str(error), kind), body, kind) from None
    except RecursionError:
        raise BadBody("The request body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, error) from None
    if weight.nul:
        raise _with_nul(body)
    if (tools := getattr(request, "tools", None)) and isinstance(tools[0], Struct):
        _keep_own(tools, body)
    return request


def _decoded(body: bytes | bytearray, kind: type[Body]) -> tuple[Body, bytes | bytearray]:
    """The request, and its body with 7 for 7.0 wherever a whole number is asked for: clients in Lua, Go
    and R write so.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: as msgspec's decoder.
    """
    decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    repairs = MOST_REPAIRS if len(body) <= _READ_TWICE else 1
    for _ in range(repairs):
        try:
            return cast(Body, decoder.decode(body)), body
        except msgspec.ValidationError as error:
            if (repaired := _with_whole_numbers(body, str(error))) is None:
                raise
            body = repaired
    return cast(Body, decoder.decode(body)), body


def _with_whole_numbers(body: bytes | bytearray, message: str) -> bytes | None:
    """The body with whole numbers at the place that `message` refuses, and in the rest of a list or an
    object of values there; None: it refuses something else.
    """
    if not (refused := _FLOAT_FOR_INT.match(message)):
        return None
    try:
        found = msgspec.json.decode(body)
        changed = _make_whole(found, _steps(refused["path"]))
        return msgspec.json.encode(found) if changed else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return None


def _steps(path: str) -> list[str]:
    """Return the names and places in one of msgspec's paths."""
    return re.findall(r"\w+|\[(?:\d+|\.\.\.)\]", path)


def _make_whole(value: Any, path: Sequence[str]) -> bool:
    """Change floats that are whole numbers into integers, where `path` leads in `value`. False: none is.

    Of an object's key that msgspec does not name, "[...]", all are meant, and beside an item of a list
    all other items.
    """
    if not path:
        return False
    name, deeper = path[0], path[1:]
    if not isinstance(value, dict | list):
        return False
    keys: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))]
    if not name.startswith("["):
        keys = [name] if name in value else []
    elif deeper and isinstance(value, list):
        keys = [int(name[1:-1])]
    if deeper:
        changed = [_make_whole(value[key], deeper) for key in keys]
        return any(changed)
    whole = [key for key in keys if isinstance(value[key], float) and _is_whole(value[key])]
    for key in whole:
        value[key] = int(value[key])
    return bool(whole)


def _is_whole(value: float) -> bool:
    """A whole number of those that a float tells apart."""
    return value.is_integer() and abs(value) <= 2**53


def converted(value: object, kind: type[Body], at: str) -> Body:
    """A part of a request that was read as it came, as `kind`. at: its path, "tools[0]".

    Raises:
        BadBody: as `decode`.
    """
    try:
        return _converted(value, kind)
    except msgspec.ValidationError as error:
        found = _refused(str(error), kind)
        path = f"{at}.{found.param}" if found.param else at
        subject = f"'{found.param}'" if found.param else "The request body"
        raise BadBody(found.message.replace(subject, f"'{path}'", 1), path) from None


def _converted(value: object, kind: type[Body]) -> Body:
    for _ in range(MOST_REPAIRS):
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            refused, value = _FLOAT_FOR_INT.match(str(error)), deepcopy(value)
            if not refused or not _make_whole(value, _steps(refused["path"])):
                raise
    return msgspec.convert(value, kind)


class _Tools(Struct):
    tools: list[dict[str, Any]]


_tools = msgspec.json.Decoder(_Tools)


def _keep_own(tools: list[Struct], body: bytes | bytearray) -> None:
    """Tools know their caller's own objects, with the keys that nobody here declared."""
    try:
        own = _tools.decode(body).tools
    except RecursionError:
        raise BadBody("The request body is nested too deeply.") from None
    for tool, each in zip(tools, own, strict=True):
        tool.__dict__["own"] = each


_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
# A number with a fraction where only a whole one is wanted.
_FLOAT_FOR_INT = re.compile(
    r"^Expected `(?:[^`]*\| )?int(?: \|[^`]*)?`, got `float` - at `\$\.?(?P<path>[^`]*)`$"
)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_LENGTH = re.compile(r"Expected `(\w+)` of length (<=|>=) (\d+)$")
_LIMIT = re.compile(r"Expected `[^`]+` (<=|>=|<|>) (\S+)$")
_TYPE = re.compile(r"Expected `([^`]+)`(?:, got `([^`]+)`)?$")
_ENUM = re.compile(r"Invalid enum value (.+)$", re.DOTALL)
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
_WANTED = {
    "float": "a number",
    "int": "a whole number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_FOUND = {**_WANTED, "float": "a number with a fraction", "null": "null"}


def _refused(message: str, kind: type[Struct]) -> BadBody:
    """msgspec says "Expected `float` <= 2.0 - at `$.temperature`"; people read the name first."""
    found = _AT.match(message)
    assert found is not None
    what, path = found["what"], found["path"] or ""
    if missing := _MISSING.match(what):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadBody(f"'{path}' is missing.", path)
    if path and not path.endswith("]") and what.endswith("got `null`"):
        return BadBody(f"'{path}' is missing.", path)  # null is a field that is not there
    subject = f"'{path}'" if path else "The request body"
    return BadBody(f"{subject} {_sentence(what, kind, path)}.", path or None)


_KEY = re.compile(r"(\w+)\[\.\.\.\]$")


def _named_key(error: BadBody, body: bytes | bytearray, kind: type[Struct]) -> BadBody:
    """msgspec does not say which key of an object it does not like: the first such is looked for."""
    found = _KEY.match(error.param or "")
    if found is None or len(body) > _READ_TWICE:
        return error
    name = found[1]
    [wanted] = [field.type for field in msgspec.structs.fields(kind) if field.name == name]
    try:
        keys = msgspec.json.decode(body)[name]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return error  # what the request's own fields leave out may be anything
    for key, value in islice(keys.items(), _LOOKED_AT):
        try:
            msgspec.convert({key: value}, wanted)
        except msgspec.ValidationError:
            path = f"{name}[{json.dumps(key, ensure_ascii=False)}]"
            return BadBody(error.message.replace(f"{name}[...]", path, 1), path)
    return error


def _sentence(what: str, kind: type[Struct], path: str) -> str:
    """What follows "'temperature' …"."""
    if found := _LIMIT.match(what):
        return f"must be {_BOUNDS[found[1]]} {found[2].removesuffix('.0')}"
    if what.lower().endswith("out of range"):  # 1e999: infinite, or an integer beyond 64 bits
        return "must be a finite number"
    if found := _LENGTH.match(what):
        unit = "character" if found[1] == "str" else "item"
        plural = "" if found[3] == "1" else "s"
        return f"must have {_BOUNDS[found[2]]} {found[3]} {unit}{plural}"
    if found := _TYPE.match(what):
        wanted = [name for name in found[1].split(" | ") if name != "null"]
        but = f", not {_named([found[2]], _FOUND)}" if found[2] else ""
        return f"must be {_named(wanted, _WANTED)}{but}"
    if found := _ENUM.match(what):
        choices = " or ".join(_choices(kind, path))
        return f"must be {choices}, not {found[1]}" if choices else f"may not be {found[1]}"
    return f"is refused: {what[:1].lower()}{what[1:]}"


def _named(kinds: list[str], names: dict[str, str]) -> str:
    return " or ".join(names.get(kind, kind) for kind in kinds)


def _choices(kind: type[Struct], path: str) -> list[str]:
    """What the Literal at `path` allows, from the declaration."""
    types: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(kind)]
    for name in re.findall(r"\w+|\[", path):
        types = [deeper for each in types for deeper in _inside(each, name)]
    return [
        f"'{value}'"
        for each in types
        if isinstance(each, msgspec.inspect.LiteralType)
        for value in each.values
    ]


def _inside(each: msgspec.inspect.Type, name: str) -> list[msgspec.inspect.Type]:
    """The members of field `name`, or of an item when `name` is "["; unions taken apart."""
    found: msgspec.inspect.Type | None = None
    if isinstance(each, msgspec.inspect.ListType) and name == "[":
        found = each.item_type
    elif isinstance(each, msgspec.inspect.StructType):
        found = next((field.type for field in each.fields if field.encode_name == name), None)
    if isinstance(found, msgspec.inspect.Metadata):
        found = found.type
    if isinstance(found, msgspec.inspect.UnionType):
        return list(found.types)
    return [found] if found else []


def _with_nul(body: bytes | bytearray) -> BadBody:
    """Names the field where it is found soon."""
    try:
        value = json.loads(body) if len(body) <= _READ_TWICE else None
    except (ValueError, RecursionError):  # numbers longer than Python reads
        value = None
    for path, leaf in islice(_leaves(value), _LOOKED_AT):
        if isinstance(leaf, str) and "\0" in leaf:
            return BadBody(f"'{path}' contains a NUL character, which is not allowed.", path)
    return BadBody("The request contains a NUL character, which is not allowed.")


def _malformed(body: bytes | bytearray, error: Exception) -> BadBody:
    """Why `body` is no JSON. Python's reader takes NaN and lone surrogates, so it finds them."""
    if len(body) > _READ_TWICE:
        return BadBody(f"The request body is not valid JSON: {error}.")
    try:
        value = json.loads(body)
    except RecursionError:
        return BadBody("The request body is nested too deeply.")
    except UnicodeDecodeError:
        return BadBody("The request body is not valid UTF-8.")
    except ValueError as plain:
        return BadBody(f"The request body is not valid JSON: {plain}.")
    for path, leaf in islice(_leaves(value), _LOOKED_AT):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return BadBody(f"'{path}' must be a finite number, not {leaf}.", path)
        if isinstance(leaf, str) and any("\ud800" <= char <= "\udfff" for char in leaf):
            return BadBody(
                f"'{path}' contains half a surrogate pair, which is not a valid character.", path
            )
    return BadBody(f"The request body is not valid JSON: {error}.")


def _leaves(value: object) -> Iterator[tuple[str, Any]]:
    """Every key and scalar in `value` with its path, in their order and without recursion."""
    inside = [iter([("", value)])]
    while inside:
        for path, item in inside[-1]:
            if isinstance(item, dict | list):
                inside.append(_items(item, path))
                break
            yield path.encode("utf-8", "replace").decode(), item
        else:
            inside.pop()


def _items(value: dict[str, Any] | list[Any], path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
        return
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        yield here, key
        yield here, item


# ---------------------------------------------------------------------------- null in a request

Kind = TypeVar("Kind")

if TYPE_CHECKING:
    OrDefault = Annotated[Kind, "or null, for the default"]
else:

    class OrDefault:
        """`OrDefault[kind]`: null is read too, and the field then has its default."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind | None


class Request(Struct):
    """Base of what clients send, and of what stands in it, if any of it has another default than null.

    What a body may hold by the million has none: this costs a call for each.
    """

    def __post_init__(self) -> None:
        for name, factory in _defaults(type(self)):
            if getattr(self, name) is None:
                setattr(self, name, factory())


@cache
def _defaults(kind: type[Struct]) -> list[tuple[str, Any]]:
    """The optional fields whose default is not null, each with what makes it."""
    found = []
    for field in msgspec.structs.fields(kind):
        if field.default_factory is not msgspec.NODEFAULT:
            found.append((field.name, field.default_factory))
        elif field.default is not msgspec.NODEFAULT and field.default is not None:
            found.append((field.name, lambda default=field.default: default))
    return found
