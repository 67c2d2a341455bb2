"""Random requests of every kind, with fields at the edges of what is valid and just outside.

The fields follow from the daemon's own description: it names the requests, and their types give the
fields and limits. A new field needs no change here.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec.inspect as types
import yaml

import openapi
from localspec.protocol import pairs, requests

Number = TypeVar("Number", int, float)
TOKENS = 4096  # most ids are below this; some are halves of characters, some control tokens
TINY, HUGE = 5e-324, 1.7e308
RUNS = " \n\t-=_.aZ0é—中あ한🙂\u200b\u0301\u202e\x00\x1b\x7f\ufffd\U0010ffff"
# The first characters of blocks of scripts, written each way and in every size of UTF-8.
SCRIPTS: tuple[int, ...] = (
    0x41,
    0xC0,
    0x391,
    0x416,
    0x5D0,
    0x627,
    0x905,
    0xE01,
    0x10A0,
    0x1200,
    0x1780,
    0x3042,
)
SCRIPTS += (0x4E00, 0xAC00, 0xFB00, 0x10330, 0x12000, 0x1D400, 0x1F600, 0x20000, 0xE0020)
WORDS = (
    "user", "assistant", "system", "developer", "tool", "auto", "new", "last", "infill", "top_k",
    "json_object", "content", "text", "builtin", "-1", "0", "/", "../x", "~nobody/x.gguf", "a,b",
    "root ::= \"a\" | [0-9]+", "root ::= root", "[a-z]{1,9}", "(", "\\d+(\\.\\d+)?", "\n", "</s>",
    "<|im_start|>user\n", "<|endoftext|>", "[INST]", "<think>", "<tool_call>{", "{\"a\": 1}",
)  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    {}, {"type": "object"}, {"type": "array", "items": {"type": "integer"}}, {"enum": ["a", 1, None]},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]},
    {"$ref": "#"}, {"type": "nothing"}, {"anyOf": []}, {"type": "string", "pattern": "^(a|b)*$"},
    {"type": "integer", "minimum": 10**30}, {"const": "\u0000"}, {"items": [[[[]]]]},
)  # fmt: skip


@functools.cache
def description() -> dict[str, Any]:
    """Return the description of the API, `openapi.yaml`."""
    loaded: dict[str, Any] = yaml.load(openapi.FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return loaded


@functools.cache
def body_types() -> dict[str, types.Type]:
    """Map each path to the type of its body, for every POST that has one."""
    bodies = {}
    for path, item in description()["paths"].items():
        body = item.get("post", {}).get("requestBody")
        if body is not None:
            name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
            modules = (requests, pairs, pairs, *openapi.WIRES)
            module = next(candidate for candidate in modules if hasattr(candidate, name))
            bodies[path] = types.type_info(getattr(module, name))
    return bodies


class RequestGenerator:
    """A generator of random requests, which are the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._paths = body_types()
        # Requests that generate have the most fields and use the engine, so they are the most frequent.
        self._weights = [len(getattr(kind, "fields", ())) for kind in self._paths.values()]

    def request(self) -> tuple[str, bytes]:
        """Return a path and a body."""
        chance = self._random
        [(path, kind)] = chance.choices(list(self._paths.items()), self._weights)
        assert isinstance(kind, types.StructType)
        self._legal = chance.random() < 0.6
        body = self._struct(kind, most=6)
        if any(field.name == "max_tokens" for field in kind.fields) and chance.random() < 0.8:
            body[chance.choice(["max_tokens", "n_predict"])] = chance.choice([0, 1, 2, 5, 17, 40])
        data = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
        if not self._legal and chance.random() < 0.05:
            at = chance.randrange(len(data) + 1)
            data = data[:at] + chance.choice([b"", b"\xff", b"\x00", b"9" * 5000]) + data[at + 1 :]
        return path, data

    def _struct(self, kind: types.StructType, most: int) -> dict[str, Any]:
        optional = [field for field in kind.fields if not field.required]
        count = min(self._random.randint(1, most), len(optional))
        chosen = [f for f in kind.fields if f.required] + self._random.sample(optional, count)
        return {field.encode_name: self._value(field.type) for field in chosen}

    def _value(self, kind: types.Type) -> Any:
        """Return a value at an edge of what `kind` allows, or sometimes a value of another kind."""
        if not self._legal and self._random.random() < 0.05:
            return self._random.choice([None, True, -1, 0.5, "", [], {}, [[]], 10**400, "x"])
        draw = self._draws().get(type(kind))
        assert draw is not None, f"no generator for {type(kind).__name__}"
        return draw(kind)

    def _draws(self) -> dict[type, Callable[[Any], Any]]:
        chance = self._random
        return {
            types.AnyType: lambda _: chance.choice([*SCHEMAS, self.text(), 0, None]),
            types.BoolType: lambda _: chance.random() < 0.5,
            types.NoneType: lambda _: None,
            types.IntType: self._integer,
            types.FloatType: self._number,
            types.StrType: self._string,
            types.LiteralType: lambda kind: chance.choice(
                [*kind.values * 4, *([] if self._legal else ["other"])]
            ),
            types.ListType: self._list,
            types.VarTupleType: self._list,
            types.TupleType: lambda kind: [self._value(item_type) for item_type in kind.item_types],
            types.DictType: self._dict,
            types.StructType: lambda kind: self._struct(kind, most=3),
            types.UnionType: self._either,
        }

    def _either(self, kind: types.UnionType) -> Any:
        members = [member for member in kind.types if not isinstance(member, types.NoneType)]
        if len(members) < len(kind.types) and self._random.random() < 0.05:
            return None
        return self._value(self._random.choice(members))

    def _integer(self, kind: types.IntType) -> int:
        edges = [edge for edge in (kind.ge, kind.gt, kind.le, kind.lt) if edge is not None]
        if not edges or self._random.random() < 0.5:
            return self._random.randrange(TOKENS)
        near = [edge + step for edge in edges for step in (-1, 0, 0, 0, 1)]
        return self._within(kind, [*near, 0, 1, 2, 1 << 31, 1 << 63, 1 << 64, -(1 << 63)])

    def _number(self, kind: types.FloatType) -> float:
        edges = [float(edge) for edge in (kind.ge, kind.gt, kind.le, kind.lt) if edge is not None]
        near = [math.nextafter(edge, to) for edge in edges for to in (-math.inf, math.inf)]
        usual = [0.0, 0.1, 0.5, 0.95, 1.0, 1.5]
        odd = [TINY, 1e-300, 1e-38, 1e-6, -0.0, HUGE, -HUGE, math.inf, math.nan]
        return self._within(kind, [*edges * 4, *near, *usual * 2, *odd])

    def _within(self, kind: types.IntType | types.FloatType, values: Sequence[Number]) -> Number:
        """Return one of the values. In a valid request it is one within the limits."""
        if self._legal:
            values = [
                value
                for value in values
                if math.isfinite(value)
                and (kind.ge is None or value >= kind.ge)
                and (kind.gt is None or value > kind.gt)
                and (kind.le is None or value <= kind.le)
                and (kind.lt is None or value < kind.lt)
            ]
        return self._random.choice(values)

    def _string(self, kind: types.StrType) -> str:
        if kind.max_length is not None and self._legal:
            return self._random.choice(WORDS[:3])  # includes the roles that may stand anywhere
        if kind.max_length is not None:
            long = "x" * (kind.max_length + self._random.choice([-1, 0, 1]))
            return self._random.choice([*WORDS, *WORDS, long, ""])
        return self._random.choice(WORDS) if self._random.random() < 0.4 else self.text()

    def text(self) -> str:
        """Return a run, a long word, a mixture of scripts, or something that only resembles text."""
        chance = self._random
        length = chance.choice([0, 1, 2, 9, 80, 300, 300, 2000, 40_000])
        match chance.randrange(5):
            case 0:
                return chance.choice(RUNS.replace("\x00", "") if self._legal else RUNS) * length
            case 1:
                return "".join(chr(97 + chance.randrange(26)) for _ in range(min(length, 5000)))
            case 2:
                starts = [chance.choice(SCRIPTS) for _ in range(3)]
                letters = [chr(chance.choice(starts) + chance.randrange(26)) for _ in range(300)]
                return "".join(chance.choice(letters) for _ in range(min(length, 3000)))
            case 3:
                odd = "".join(chr(chance.randrange(1, 32)) for _ in range(min(length, 80)))
                return odd if self._legal else odd + chance.choice("\ud800\x00")
            case _:
                return " ".join(chance.choices(WORDS, k=min(length, 200)))

    def _list(self, kind: types.ListType | types.VarTupleType) -> list[Any]:
        least, most = kind.min_length or 0, kind.max_length
        counts = [least, least, least + 1, 2, 3]
        counts += [] if self._legal else [max(least - 1, 0), (most or 0) + 1]
        if most is not None and most <= 1000:
            counts += [most]
        if isinstance(kind.item_type, types.IntType):
            counts += [20, 200, 600]
        count = self._random.choice(counts)
        if count > 3:  # long lists repeat a few values, since single values are tested elsewhere
            samples = [self._value(kind.item_type) for _ in range(24)]
            return [self._random.choice(samples) for _ in range(count)]
        return [self._value(kind.item_type) for _ in range(count)]

    def _dict(self, kind: types.DictType) -> dict[str, Any]:
        if isinstance(kind.value_type, types.AnyType) and self._random.random() < 0.7:
            return dict(self._random.choice(SCHEMAS))
        keys = [str(self._random.randrange(TOKENS)) for _ in range(3)] + [
            "",
            "-1",
            "1e9",
            "a",
            "9" * 30,
        ]
        chosen = self._random.sample(keys, self._random.choice([0, 1, 2, 3]))
        return {key: self._value(kind.value_type) for key in chosen}
