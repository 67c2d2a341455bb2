"""Account for the fields of a request that no struct declares, and for those without effect.

A field that is not served must not be dropped silently. `find_ignored_fields` is called once for every body,
whatever its protocol. It sorts each field into one of three groups:

- The request's struct declares it: it is served, unless `WITHOUT_EFFECT` lists it.
- `REFUSED` lists it: the answer would differ from what was requested, so the request fails and
  names the field.
- Any other field is ignored, and the answer names it in `localspec.ignored`.

Null means the same as a missing field, so a field that is null is in no group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Raw, Struct

from localspec.protocol.reading import BadBody

MAX_NAMED = 64  # paths in one answer; any others are only counted
MAX_PATH = 120  # characters of one path
_MAX_NEUTRAL_BYTES = 64  # a longer value cannot be a neutral one


# The field names, and the positions in lists, that lead to a field.
FieldPath = tuple[str | int, ...]


class FieldRule(NamedTuple):
    """Why a field is refused or has no effect, and the neutral values that request nothing."""

    reason: str
    neutral: tuple[object, ...] = ()


_OFF = (False,)
_NONE: tuple[object, ...] = ([], {}, "")
_TOOLS = "send 'tools' and 'tool_choice'"
_CONSTRAINT = "send 'regex', 'grammar' or 'response_format'"
_SAMPLER = "there is no such sampler here"
_TEMPLATE = "prompts are made by the model's own chat template"
_LENGTH = "a prompt that is too long is refused; shorten it before it is sent"

# Fields that would change the answer of a request that generates text, in any protocol.
_REFUSED_TEXT: dict[str, FieldRule] = {
    # OpenAI
    "audio": FieldRule("models here write text only", _NONE),
    "modalities": FieldRule("models here write text only", ([], ["text"])),
    "web_search_options": FieldRule("nothing is searched here"),
    "best_of": FieldRule("every choice is returned; send 'n'", (0, 1)),
    "functions": FieldRule(f"here it is a field of /v1/chat/completions; {_TOOLS}", ([],)),
    "function_call": FieldRule(
        f"here it is a field of /v1/chat/completions; {_TOOLS}", ("none", "auto")
    ),
    # vLLM
    "allowed_token_ids": FieldRule(f"{_CONSTRAINT}, or forbid tokens with 'logit_bias'", ([],)),
    "bad_words": FieldRule("forbid single tokens with 'logit_bias'", ([],)),
    "logits_processors": FieldRule("no code of a request runs here", ([],)),
    "prompt_logprobs": FieldRule("send 'echo' with 'logprobs' to /v1/completions"),
    "logprob_token_ids": FieldRule("send 'top_logprobs'", ([],)),
    "return_tokens_as_token_ids": FieldRule("send 'return_tokens' to /completion", _OFF),
    "prompt_embeds": FieldRule("send text or token ids", _NONE),
    "truncate_prompt_tokens": FieldRule(_LENGTH),
    "include_stop_str_in_output": FieldRule("an answer ends before its stop string", _OFF),
    "skip_special_tokens": FieldRule("control tokens are never part of the text", (True,)),
    "use_beam_search": FieldRule("tokens are drawn one after another", _OFF),
    "watermarking": FieldRule(_SAMPLER, _OFF),
    "repetition_detection": FieldRule("send a penalty, such as 'repeat_penalty'", _NONE),
    "structural_tag": FieldRule(_CONSTRAINT, _NONE),
    "chat_template": FieldRule(_TEMPLATE, _NONE),
    "echo": FieldRule("an answer does not repeat its prompt, except in /v1/completions", _OFF),
    "add_special_tokens": FieldRule(
        "the model's file says whether a text begins with BOS", (True,)
    ),
    "previous_response": FieldRule("send 'previous_response_id'", _NONE),
    "previous_input_messages": FieldRule("send them in 'input'", _NONE),
    # llama-server
    "grammar_lazy": FieldRule("a grammar holds from the first token of the answer", _OFF),
    "grammar_triggers": FieldRule("a grammar holds from the first token of the answer", ([],)),
    "parse_tool_calls": FieldRule("send 'tool_choice': \"none\"", (True,)),
    "image_data": FieldRule("models here read text only", ([],)),
    # Others
    "num_ctx": FieldRule("the context is a setting: localspec config set context N"),
    "stop_regex": FieldRule("send 'stop'", _NONE),
    "negative_prompt": FieldRule(_SAMPLER, _NONE),
    "guidance_scale": FieldRule(_SAMPLER, (1, 1.0)),
    "banned_tokens": FieldRule("forbid single tokens with 'logit_bias'", _NONE),
    "custom_token_bans": FieldRule("forbid single tokens with 'logit_bias'", _NONE),
    "banned_strings": FieldRule("forbid single tokens with 'logit_bias'", _NONE),
    "lora_path": FieldRule("adapters are not supported; merge them into the model's file", _NONE),
    "lora_request": FieldRule(
        "adapters are not supported; merge them into the model's file", _NONE
    ),
}

_ELSEWHERE = "it is a field of /v1/chat/completions"
# Fields that constrain an answer, for requests whose struct does not declare them.
_BINDING: dict[str, FieldRule] = {
    **dict.fromkeys(
        ("regex", "grammar", "ebnf", "json_schema", "stop", "stop_sequences", "logit_bias"),
        FieldRule(_ELSEWHERE, _NONE),
    ),
    "response_format": FieldRule(_ELSEWHERE, (*_NONE, {"type": "text"})),
    "n": FieldRule(_ELSEWHERE, (1,)),
    "tool_choice": FieldRule(_ELSEWHERE, ("auto",)),
    "max_completion_tokens": FieldRule("send this protocol's own limit"),
}
_REFUSED_CHAT = {
    **_REFUSED_TEXT,
    **_BINDING,
    "add_special_tokens": FieldRule("the chat template writes BOS where there is one", _OFF),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        FieldRule(_ELSEWHERE, _NONE),
    ),
    **dict.fromkeys(("min_tokens", "stop_token_ids"), FieldRule(_ELSEWHERE, (0, []))),
}

_REFUSED_TEMPLATE: dict[str, FieldRule] = {
    "chat_template": FieldRule(_TEMPLATE, _NONE),
    "functions": FieldRule(_TOOLS, ([],)),
}

_REFUSED_VECTORS: dict[str, FieldRule] = {
    "messages": FieldRule("send the text to be embedded in 'input'", ([],)),
    "chat_template": FieldRule("texts are embedded as they are", _NONE),
    "input_type": FieldRule("put the model's own prefix before each text", _NONE),
    "task": FieldRule("put the model's own prefix before each text", _NONE),
    "task_type": FieldRule("put the model's own prefix before each text", _NONE),
    "prompt_name": FieldRule("put the model's own prefix before each text", _NONE),
    "prompt": FieldRule("put the model's own prefix before each text", _NONE),
    "late_chunking": FieldRule("each text is embedded alone", _OFF),
    "output_dtype": FieldRule("numbers are float32", ("float", "float32")),
    "embedding_type": FieldRule(
        "numbers are float32; send 'encoding_format'", ("float", "float32")
    ),
    "embedding_types": FieldRule("numbers are float32; send 'encoding_format'", (["float"], [])),
    "output_dimension": FieldRule("send 'dimensions'"),
    "truncate_dim": FieldRule("send 'dimensions'"),
    "normalize": FieldRule("send 'embd_normalize': -1 to leave vectors as they are", (True,)),
    "truncation_direction": FieldRule("the beginning of a text is read", ("right", "Right")),
    "add_special_tokens": FieldRule(
        "the model's file says whether a text begins with BOS", (True,)
    ),
}

_REFUSED_SCORES: dict[str, FieldRule] = {
    "truncate_prompt_tokens": FieldRule("send 'max_tokens_per_doc' or 'truncate'"),
    "rank_fields": FieldRule("send documents as texts, or as objects with a 'text'", ([],)),
    "instruction": FieldRule("put the model's own instruction before the query", _NONE),
    "raw_scores": FieldRule("scores are what the model gives", _OFF),
    "truncation_direction": FieldRule("the beginning of a text is read", ("right", "Right")),
    "activation": FieldRule("scores are what the model gives"),
    "use_activation": FieldRule("scores are what the model gives"),
    "max_chunks_per_doc": FieldRule("each document is read as one text", (1,)),
}

# Refused fields by the `refusal_table` of a request's struct.
REFUSED: dict[str, Mapping[str, FieldRule]] = {
    "": {},
    "text": _REFUSED_TEXT,
    "chat": _REFUSED_CHAT,
    "template": _REFUSED_TEMPLATE,
    "vectors": _REFUSED_VECTORS,
    "scores": _REFUSED_SCORES,
}

# Undeclared fields that are not reported, because what they request is the case anyway. "" stands for a
# position in a list.
FULFILLED_FIELDS: dict[FieldPath, FieldRule] = {
    ("response_format", "json_schema", "strict"): FieldRule("every schema is held to"),
    ("response_format", "json_schema", "description"): FieldRule("it is for people, as 'name' is"),
    ("stream_options", "include_obfuscation"): FieldRule("nothing is padded", _OFF),
    ("messages", "", "refusal"): FieldRule("an empty one says nothing", _NONE),
    ("messages", "", "annotations"): FieldRule("an empty list says nothing", _NONE),
}

_NATIVE = {
    "t_max_prompt_ms": FieldRule("a prompt is read to its end", (-1,)),
    "stream_options": FieldRule("every answer ends with its counts"),
}
_HOSTED = {
    "container": FieldRule("no code runs here", _NONE),
    "context_management": FieldRule("nothing is dropped from a conversation", _NONE),
    "mcp_servers": FieldRule("no server is called", _NONE),
}

# Declared fields without effect, by the request's struct. They are declared because their values are checked,
# or because the answer repeats them.
WITHOUT_EFFECT: dict[str, dict[str, FieldRule]] = {
    "MessagesRequest": {"metadata": FieldRule("nobody is billed here", _NONE), **_HOSTED},
    "CountTokensRequest": _HOSTED,
    "NativeCompletionRequest": {
        "id_slot": FieldRule("the slot with the longest cached prefix is taken", (-1,)),
        **_NATIVE,
    },
    "InfillRequest": _NATIVE,
    "ResponsesRequest": {
        "service_tier": FieldRule("there is one tier", ("auto", "default")),
        "max_tool_calls": FieldRule("it limits tools that the server runs; none runs here"),
        "localspec": FieldRule("responses have no options of ours"),
        "stream_options": FieldRule("every response ends with its usage"),
    },
}


class IgnoredFields(list[str]):
    """The paths of a request's fields without effect, as `localspec.ignored` names them. Bounded."""

    more = 0  # paths beyond MAX_NAMED

    def add(self, path: str, kind: object = None) -> None:
        """Add a path, with the type of the item there if the path alone does not say it."""
        path = _shorten_path(path if kind is None else f"{path} ({str(kind)[:80]})")
        if path in self:
            return
        if len(self) < MAX_NAMED:
            self.append(path)
            return
        if self.more:
            self.pop()
        else:
            self.more = 1  # the last path, which the count replaces
            self.pop()
        self.more += 1
        self.append(f"and {self.more} more")


def find_ignored_fields(body: bytes | bytearray, request: Struct) -> IgnoredFields:
    """Return the fields of `body` without effect. `request` is the struct decoded from it.

    Raises:
        BadBody: a field is refused by its name, or a name is not text.
    """
    kind = type(request)
    ignored = IgnoredFields()
    try:
        for path, value in _find_undeclared(Raw(body), kind, ()):
            _sort_field(path, value, REFUSED[getattr(kind, "refusal_table", "")], ignored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"The request body is not valid JSON: {error}.") from None
    for name in fields_without_effect(request):
        ignored.add(name)
    return ignored


def fields_without_effect(request: Struct) -> Iterator[str]:
    """Yield the declared fields of a request that were sent and have no effect."""
    for name, rule in WITHOUT_EFFECT.get(type(request).__name__, {}).items():
        value = getattr(request, name)
        if value is not None and not _is_among(value, rule.neutral):
            yield name


def refuse_undeclared(body: bytes | bytearray, request: Struct) -> None:
    """Refuse undeclared fields, in requests that change something on this machine.

    Raises:
        BadBody: there is one.
    """
    try:
        first = next((path for path, _ in _find_undeclared(Raw(body), type(request), ())), None)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"The request body is not valid JSON: {error}.") from None
    if first is not None:
        name = _shorten_path(_format_path(first))
        raise BadBody(f"'{name}' is not a field of this request.", name)


def _sort_field(
    path: FieldPath, value: Raw, refused: Mapping[str, FieldRule], ignored: IgnoredFields
) -> None:
    """Add a field to `ignored`, unless its value is neutral or the request is fulfilled anyway.

    Raises:
        BadBody: the field is refused.
    """
    if len(path) == 1 and (rule := refused.get(str(path[0]))):
        if not _is_among(_decode_if_short(value), rule.neutral):
            raise BadBody(f"'{path[0]}' is not supported: {rule.reason}.", str(path[0]))
        return
    rule = FULFILLED_FIELDS.get(tuple("" if isinstance(part, int) else part for part in path))
    if rule is None or (rule.neutral and not _is_among(_decode_if_short(value), rule.neutral)):
        ignored.add(_format_path(path))


def _format_path(path: FieldPath) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _decode_if_short(value: Raw) -> object:
    """Decode a value that is short enough to be neutral; return others unchanged."""
    text = bytes(value)
    return msgspec.json.decode(text) if len(text) <= _MAX_NEUTRAL_BYTES else value


def _is_among(value: object, choices: tuple[object, ...]) -> bool:
    """Return whether `value` is one of `choices`; true and 1 are different values."""
    return any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool)
        for choice in choices
    )


# ---------------------------------------------------------------------------- finding undeclared fields


def _find_undeclared(
    text: Raw, kind: type[Struct], path: FieldPath
) -> Iterator[tuple[FieldPath, Raw]]:
    """Yield the fields of an object that its struct does not declare, also of objects within it."""
    declared = _declared_fields(kind)
    for name, value in _object_decoder.decode(text).items():
        field_path = (*path, name)
        first_byte = bytes(memoryview(value)[:1])
        if name not in declared:
            if first_byte != b"n":  # null
                yield field_path, value
        elif first_byte == b"{" and (variants := declared[name].variants):
            yield from _find_undeclared(value, _find_variant(value, variants), field_path)
        elif first_byte == b"[" and (item_struct := declared[name].item):
            yield from _find_undeclared_in_list(value, item_struct, field_path)


def _find_undeclared_in_list(
    text: Raw, kind: type[Struct], path: FieldPath
) -> Iterator[tuple[FieldPath, Raw]]:
    """Yield each undeclared field of a list's items once, at its first position."""
    known = set(_declared_fields(kind))
    for index, item in enumerate(_list_decoder.decode(text)):
        for name in item.keys() - known:
            if bytes(memoryview(item[name])[:1]) != b"n":
                known.add(name)
                yield (*path, index, name), item[name]


def _find_variant(text: Raw, variants: tuple[type[Struct], ...]) -> type[Struct]:
    """Return the struct that an object was decoded as. Among several, its tag decides."""
    if len(variants) > 1:
        values = _object_decoder.decode(text)
        for kind in variants:
            config = kind.__struct_config__
            tag = values.get(config.tag_field or "")
            if tag is not None and msgspec.json.decode(tag) == config.tag:
                return kind
    return variants[0]


_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_list_decoder = msgspec.json.Decoder(list[dict[str, Raw]])


class _Nested(NamedTuple):
    """The structs in a field's type: those of the field itself, and that of a list's items."""

    variants: tuple[type[Struct], ...] = ()
    item: type[Struct] | None = None


# Lists whose items are searched for undeclared fields. Other lists may hold as many objects as fit into a
# body, are passed to the model unchanged (tools), or refuse unknown fields themselves.
_WALKED_LISTS = ("messages",)


@cache
def _declared_fields(kind: type[Struct]) -> dict[str, _Nested]:
    hints = get_type_hints(kind)
    nested = {}
    for field in msgspec.structs.fields(kind):
        types = list(_union_members(hints[field.name]))
        variants = tuple(kind for kind in types if _is_struct(kind))
        item = None
        if field.encode_name in _WALKED_LISTS:
            lists = [inner for member in types for inner in get_args(member)]
            item = next((inner for inner in lists if _is_struct(inner)), None)
        nested[field.encode_name] = _Nested(variants, item)
    if tag_field := kind.__struct_config__.tag_field:
        nested[tag_field] = _Nested()
    return nested


def _union_members(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, without their annotations."""
    members = get_args(kind)
    if members and not isinstance(kind, type) and getattr(kind, "__origin__", None) is not list:
        for member in members:
            yield from _union_members(member)
    yield kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _shorten_path(path: str) -> str:
    return path if len(path) <= MAX_PATH else f"{path[: MAX_PATH - 1]}…"
