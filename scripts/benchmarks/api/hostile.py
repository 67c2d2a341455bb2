"""Random requests that ask for as much computation as their fields allow, for `isolation`.

Each takes its fields from a corpus of hostile values: grammars whose size doubles with each rule, schemas
that refer to themselves many times, texts that are hard to cut into tokens, long lists. All of them are
drawn anew, so no cache helps. Some have pictures or documents, go on in the background, or are streams that
somebody else reads as well.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.api.pictures import gif_of_long_codes, jpeg_of_scans
from benchmarks.documents import SQUARE, exploding_pdf, pdf, show, slow_pdf

Body = dict[str, Any]
MAX_TEXT = 400_000  # characters of one text
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Hostile(NamedTuple):
    """A request. path: with its query. body: None for a GET. conversation: whose stream is recorded."""

    path: str
    body: Body | None
    conversation: str = ""


def request(rng: random.Random) -> Hostile:
    """Return one hostile request."""
    kind = rng.choice(_KINDS)
    if kind in _BODIES:
        return Hostile(kind, _BODIES[kind](rng))
    conversation = f"stream-{rng.randrange(8)}"
    if kind == "resumed":
        return Hostile(f"/v1/stream?conv_id={conversation}&from={_size(rng, 1, 4000)}", None)
    body = _chat(rng) | {"stream": True, "max_tokens": 200}
    return Hostile("/v1/chat/completions", body, conversation)


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS, k=6))


def _size(rng: random.Random, low: int, high: int) -> int:
    """Return a size between the two, each order of magnitude alike."""
    return int(low * (high / low) ** rng.random())


def text(rng: random.Random, most: int = MAX_TEXT) -> str:
    """Return a text that is hard to cut: long words, runs, rare characters, special tokens, or prose."""
    size = _size(rng, 10, most)
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice("a \n\t0.é漢") * size
    if kind == 1:
        return "".join(rng.choices(_LETTERS, k=size))
    if kind == 2:
        return "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(size))
    if kind == 3:
        return "🫀👩‍👩‍👧‍👦🏳️‍🌈"[: rng.randrange(1, 8)] * (size // 4)
    if kind == 4:
        return "<|im_start|>user\n<|endoftext|>" * (size // 20)
    if kind == 5:
        return " ".join(str(rng.randrange(10**9)) for _ in range(size // 8))
    return "def f(x):\n    return x + 1\n\n" * (size // 20)


def grammar(rng: random.Random) -> str:
    """Return a GBNF grammar."""
    depth = _size(rng, 5, 3000)
    leaf = rng.choice(['"a" | "ab"', "[a-z]", "[a-z]*", '"ab"+', "[^x]{1,9}"])
    kind = rng.randrange(6)
    if kind == 0:  # doubles with each rule
        rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(depth)]
        return "\n".join(["root ::= r0", *rules, f"r{depth} ::= {leaf}"])
    if kind == 1:  # many ways to read each text
        return f"root ::= s\ns ::= s s | {leaf} | s{'?' * rng.randrange(3)} s s\n"
    if kind == 2:  # many alternatives
        return "root ::= " + " | ".join(f'"{_name(rng)}"' for _ in range(_size(rng, 5, 5000)))
    if kind == 3:  # repetitions within each other
        body = leaf
        for _ in range(rng.randrange(1, 25)):
            body = f"({body}){{{rng.randrange(1, 30)}}}"
        return f"root ::= {body}"
    if kind == 4:  # deep nesting
        return "root ::= " + "(" * depth + leaf + ")" * depth
    rules = [f"r{i} ::= [a-z]* r{i + 1}? [a-z]* | r{i + 1}*" for i in range(depth)]
    return "\n".join(["root ::= r0", *rules, f"r{depth} ::= {leaf}"])


def regex(rng: random.Random) -> str:
    """Return a regular expression."""
    kind = rng.randrange(5)
    if kind == 0:
        body = rng.choice(["ab", "[a-z]", "a|b", r"\w"])
        for _ in range(rng.randrange(1, 22)):
            body = f"({body}){{{rng.choice([2, 2, 3, 10, 100])}}}"
        return body
    if kind == 1:
        return "(" + "|".join(_name(rng) for _ in range(_size(rng, 5, 5000))) + ")*"
    if kind == 2:
        return f".*a.{{{_size(rng, 2, 3000)}}}"
    if kind == 3:
        return "(a*)*" * rng.randrange(1, 200) + "b"
    return rf"[\p{{L}}\p{{N}}]{{{_size(rng, 1, 2000)},}}" * rng.randrange(1, 20)


def schema(rng: random.Random) -> Body:
    """Return a JSON Schema."""
    kind = rng.randrange(6)
    depth = _size(rng, 3, 400)
    if kind == 0:  # each definition refers to the next one several times
        word = rng.choice(["anyOf", "oneOf", "allOf", "prefixItems"])
        refs = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
        leaf = rng.choice([{"type": "string"}, {"type": "integer"}, {"enum": ["a", 1, None]}])
        return {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/d0"}},
            "required": ["x"],
            "$defs": {**refs, f"d{depth}": leaf},
        }
    if kind == 1:
        return {"type": "string", "pattern": regex(rng)}
    if kind == 2:
        keys = {
            _name(rng): {"type": "string", "maxLength": _size(rng, 1, 5000)} for _ in range(depth)
        }
        return {"type": "object", "properties": keys}
    if kind == 3:
        return {"enum": [_name(rng) * rng.randrange(1, 9) for _ in range(_size(rng, 5, 5000))]}
    if kind == 4:
        nested: Body = {"type": "string"}
        for _ in range(depth):
            nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
        return nested
    return {
        "type": "array",
        "items": {"type": "array", "items": {"type": "number", "multipleOf": 0.01}},
        "minItems": _size(rng, 1, 3000),
        "maxItems": 3000,
    }


def _tools(rng: random.Random) -> list[Body]:
    return [
        {"type": "function", "function": {"name": _name(rng), "description": text(rng, 2000),
         "parameters": schema(rng)}}
        for _ in range(_size(rng, 1, 60))
    ]  # fmt: skip


def _message(rng: random.Random) -> Body:
    role = rng.choice(["user", "assistant", "system", "tool"])
    message: Body = {"role": role, "content": text(rng, 20_000)}
    if role == "assistant" and rng.random() < 0.5:
        arguments = json.dumps({"a": text(rng, 20_000)})
        function = {"name": _name(rng), "arguments": arguments}
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
        message["reasoning_content"] = text(rng, 20_000)
    if role == "tool":
        message["tool_call_id"] = "c1"
    return message


# Fields that any generating request may have, with a hostile value of each.
_FIELDS: dict[str, Callable[[random.Random], object]] = {
    "grammar": grammar,
    "regex": regex,
    "json_schema": schema,
    "logit_bias": lambda rng: [
        [text(rng, 200), rng.uniform(-5, 5)] for _ in range(_size(rng, 1, 3000))
    ],
    "stop": lambda rng: [text(rng, 2000) for _ in range(_size(rng, 1, 300))],
    "dry_sequence_breakers": lambda rng: [text(rng, 100) for _ in range(_size(rng, 1, 300))],
    "dry_multiplier": lambda rng: rng.uniform(0, 3),
    "dry_penalty_last_n": lambda rng: -1,
    "repeat_penalty": lambda rng: rng.uniform(0.5, 2),
    "repeat_last_n": lambda rng: -1,
    "top_k": lambda rng: 0,
    "top_p": lambda rng: rng.random(),
    "typical_p": lambda rng: rng.random(),
    "temperature": lambda rng: rng.uniform(0, 9),
    "n_probs": lambda rng: _size(rng, 1, 200_000),
    "n": lambda rng: rng.randrange(1, 20),
    "prediction": lambda rng: {"type": "content", "content": text(rng)},
}
# Those of them that say what language an answer is in.
_LANGUAGES = ("grammar", "regex", "json_schema")


def _with_fields(rng: random.Random, body: Body) -> Body:
    body |= {"max_tokens": rng.randrange(1, 40), "n_predict": rng.randrange(1, 40)}
    names = rng.sample(sorted(_FIELDS), rng.choice([1, 1, 1, 2, 3]))
    if rng.random() < 0.5:
        names.append(rng.choice(_LANGUAGES))
    for name in names:
        body[name] = _FIELDS[name](rng)
    return body


def _chat(rng: random.Random) -> Body:
    messages = [{"role": "user", "content": "Count."}]
    if rng.random() < 0.3:
        messages = [_message(rng) for _ in range(_size(rng, 1, 300))]
    body: Body = {"messages": messages}
    kind = rng.randrange(5)
    if kind == 0:
        body["tools"] = _tools(rng)
        body["tool_choice"] = rng.choice(["auto", "required"])
    elif kind == 1:
        shape = {"name": "x", "schema": schema(rng)}
        body["response_format"] = {"type": "json_schema", "json_schema": shape}
    elif kind == 2:
        body["chat_template_kwargs"] = {_name(rng): text(rng) for _ in range(_size(rng, 1, 50))}
    body |= {"max_tokens": rng.randrange(1, 40)}
    return _with_fields(rng, body) if kind > 2 else body


def _completion(rng: random.Random) -> Body:
    prompt: object = text(rng) if rng.random() < 0.3 else "import os"
    return _with_fields(rng, {"prompt": prompt})


def _infill(rng: random.Random) -> Body:
    extra = [{"filename": _name(rng), "text": text(rng, 20_000)} for _ in range(_size(rng, 1, 200))]
    prefix, suffix = text(rng), text(rng)
    return {"input_prefix": prefix, "input_suffix": suffix, "input_extra": extra, "n_predict": 8}


def _messages(rng: random.Random) -> Body:
    tools = [
        {"name": _name(rng), "input_schema": {"type": "object", "properties": {"x": schema(rng)}}}
        for _ in range(_size(rng, 1, 40))
    ]
    return {
        "max_tokens": rng.randrange(1, 40),
        "messages": [{"role": "user", "content": text(rng, 20_000)}],
        "tools": tools,
        "stop_sequences": [text(rng, 500) for _ in range(_size(rng, 1, 100))],
    }


def _picture(rng: random.Random) -> bytes:
    """Return a picture file: an ordinary one of any format, or one that is slow to decode or damaged."""
    from PIL import ExifTags, Image

    kind = rng.randrange(6)
    if kind == 0:
        return gif_of_long_codes(_size(rng, 10_000, 2_000_000))
    if kind == 1:
        return jpeg_of_scans(rng.choice([50, 80, 1000]), side=_size(rng, 16, 4000))
    width, height = _size(rng, 1, 1500), _size(rng, 1, 1500)
    image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    image = image.convert(rng.choice(["L", "RGB", "RGBA", "P"]))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = rng.randrange(1, 9)
    format = rng.choice(["PNG", "PNG", "WEBP", "TIFF", "GIF", "JPEG"])
    buffer = io.BytesIO()
    (image.convert("RGB") if format == "JPEG" else image).save(buffer, format, exif=exif)
    data = buffer.getvalue()
    return data[: rng.randrange(len(data))] if kind == 2 else data


def _document(rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return slow_pdf() + bytes(f"% {rng.random()}", "ascii")
    if kind == 1:
        return exploding_pdf(rng.randrange(2, 15))
    pages = [
        f"{show(text(rng, 200).translate(_PDF_MARKS))} {SQUARE}" for _ in range(_size(rng, 1, 90))
    ]
    data = pdf(*pages)
    return data[: rng.randrange(len(data))] if kind == 2 else data


def to_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def _chat_with_files(rng: random.Random) -> Body:
    parts: list[Body] = [{"type": "text", "text": "What is that?"}]
    for _ in range(rng.choice([1, 1, 2, 9])):
        if rng.random() < 0.7:
            parts.append({"type": "image_url", "image_url": {"url": to_url(_picture(rng))}})
        else:
            file = {"filename": "a.pdf", "file_data": to_url(_document(rng))}
            parts.append({"type": "file", "file": file})
    rng.shuffle(parts)
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    return _with_fields(rng, {"messages": messages})


def _long_prompt(rng: random.Random) -> Body:
    """Return a completion of thousands of tokens, with penalties that compare all of them."""
    sentence = " ".join(_name(rng) for _ in range(_size(rng, 1, 300))) + "\n"
    prompt = (sentence * (1 + 100_000 // len(sentence)))[: _size(rng, 1000, 100_000)]
    return {
        "prompt": prompt,
        "n_predict": 20,
        "dry_multiplier": 1.0,
        "dry_penalty_last_n": -1,
        "dry_allowed_length": rng.randrange(1, 4),
        "dry_sequence_breakers": rng.choice([[], ["\n"], [rng.choice(_LETTERS)]]),
        "repeat_penalty": rng.choice([1.0, 1.1]),
        "repeat_last_n": -1,
    }


def _response(rng: random.Random) -> Body:
    body: Body = {"input": text(rng), "max_output_tokens": rng.randrange(1, 100)}
    return body | {"background": rng.random() < 0.5, "store": rng.random() < 0.7}


# Characters that would end a text in a PDF document, or are none of its font.
_PDF_MARKS = {ord(mark): " " for mark in "()\\"} | dict.fromkeys(range(128, 131072), "?")
_BODIES: dict[str, Callable[[random.Random], Body]] = {
    "/v1/chat/completions": lambda rng: rng.choice([_chat, _chat_with_files])(rng),
    "/completion": lambda rng: rng.choice([_completion, _completion, _long_prompt])(rng),
    "/infill": _infill,
    "/v1/messages": _messages,
    "/v1/responses": _response,
    "/api/chat": lambda rng: {
        "messages": [{"role": "user", "content": "Count."}],
        "format": schema(rng),
        "options": {"num_predict": 20},
    },
    "/tokenize": lambda rng: {"content": text(rng), "with_pieces": rng.random() < 0.5},
    "/detokenize": lambda rng: {"tokens": [rng.randrange(300)] * _size(rng, 1, 300_000)},
    "/apply-template": lambda rng: {"messages": [_message(rng) for _ in range(_size(rng, 1, 500))]},
    "/v1/embeddings": lambda rng: {"input": [text(rng, 20_000) for _ in range(_size(rng, 1, 200))]},
    "/v1/rerank": lambda rng: {
        "query": text(rng, 2000),
        "documents": [text(rng, 2000) for _ in range(_size(rng, 1, 200))],
    },
}
_KINDS = [*_BODIES, "recorded", "resumed"]
# Chats and completions have the most fields, and a picture or a document can be anything.
_KINDS += ["/v1/chat/completions", "/v1/chat/completions", "/completion", "/completion"]
