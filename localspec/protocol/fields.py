"""Account for the fields of a request that no struct declares, and for those that change nothing.

A field that nobody here serves must not be passed over in silence. `account` is called once for every body,
whatever its protocol. It sorts each field into one of three groups:

- The request's struct declares it: it is served, unless `WITHOUT_EFFECT` lists it.
- `REFUSED` lists it: the answer would not be what was asked for, so the request fails and names it.
- Anything else is left out, and the answer names it in `localspec.ignored`.

Null means what leaving out means, so a field that is null is in no group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Raw, Struct

from localspec.protocol.reading import BadBody

MAX_NAMED = 64  # paths in one answer; the others are counted
MAX_PATH = 120  # characters of one path
_SMALL = 64  # bytes; a longer value is no neutral one


# The names that lead to a field, and the places in lists.
Path = tuple[str | int, ...]


class Rule(NamedTuple):
    """What is said of a field: why it is refused or without effect, and which values ask for nothing."""

    reason: str
    neutral: tuple[object, ...] = ()


_OFF = (False,)
_NONE: tuple[object, ...] = ([], {}, "")
_TOOLS = "send 'tools' and 'tool_choice'"
_CONSTRAINT = "send 'regex', 'grammar' or 'response_format'"
_SAMPLER = "there is no such sampler here"
_TEMPLATE = "prompts are made by the model's own chat template"
_LENGTH = "a prompt that is too long is refused; shorten it before it is sent"

# Fields of requests that generate text, in whatever protocol, that would make another answer.
_REFUSED_TEXT: dict[str, Rule] = {
    # OpenAI
    "audio": Rule("models here write text only", _NONE),
    "modalities": Rule("models here write text only", ([], ["text"])),
    "web_search_options": Rule("nothing is searched here"),
    "best_of": Rule("every choice is returned; send 'n'", (0, 1)),
    "functions": Rule(f"here it is a field of /v1/chat/completions; {_TOOLS}", ([],)),
    "function_call": Rule(
        f"here it is a field of /v1/chat/completions; {_TOOLS}", ("none", "auto")
    ),
    # vLLM
    "allowed_token_ids": Rule(f"{_CONSTRAINT}, or forbid tokens with 'logit_bias'", ([],)),
    "bad_words": Rule("forbid single tokens with 'logit_bias'", ([],)),
    "logits_processors": Rule("no code of a request runs here", ([],)),
    "prompt_logprobs": Rule("send 'echo' with 'logprobs' to /v1/completions"),
    "logprob_token_ids": Rule("send 'top_logprobs'", ([],)),
    "return_tokens_as_token_ids": Rule("send 'return_tokens' to /completion", _OFF),
    "prompt_embeds": Rule("send text or token ids", _NONE),
    "truncate_prompt_tokens": Rule(_LENGTH),
    "include_stop_str_in_output": Rule("an answer ends before its stop string", _OFF),
    "skip_special_tokens": Rule("control tokens are never part of the text", (True,)),
    "use_beam_search": Rule("tokens are drawn one after another", _OFF),
    "watermarking": Rule(_SAMPLER, _OFF),
    "repetition_detection": Rule("send a penalty, such as 'repeat_penalty'", _NONE),
    "structural_tag": Rule(_CONSTRAINT, _NONE),
    "chat_template": Rule(_TEMPLATE, _NONE),
    "echo": Rule("an answer does not repeat its prompt, except in /v1/completions", _OFF),
    "add_special_tokens": Rule("whether a text begins with BOS, the model's file says", (True,)),
    "previous_response": Rule("send 'previous_response_id'", _NONE),
    "previous_input_messages": Rule("send them in 'input'", _NONE),
    # llama-server
    "grammar_lazy": Rule("a grammar holds from the first token of the answer", _OFF),
    "grammar_triggers": Rule("a grammar holds from the first token of the answer", ([],)),
    "parse_tool_calls": Rule("send 'tool_choice': \"none\"", (True,)),
    "image_data": Rule("models here read text only", ([],)),
    # Others
    "num_ctx": Rule("the context is a setting: localspec config set context N"),
    "stop_regex": Rule("send 'stop'", _NONE),
    "negative_prompt": Rule(_SAMPLER, _NONE),
    "guidance_scale": Rule(_SAMPLER, (1, 1.0)),
    "banned_tokens": Rule("forbid single tokens with 'logit_bias'", _NONE),
    "custom_token_bans": Rule("forbid single tokens with 'logit_bias'", _NONE),
    "banned_strings": Rule("forbid single tokens with 'logit_bias'", _NONE),
    "lora_path": Rule("adapters are not supported; merge them into the model's file", _NONE),
    "lora_request": Rule("adapters are not supported; merge them into the model's file", _NONE),
}

_ELSEWHERE = "it is a field of the endpoints below /v1, OpenAI's"
# Fields that hold an answer to something, of requests whose struct does not declare them.
_BINDING: dict[str, Rule] = {
    **dict.fromkeys(
        ("regex", "grammar", "ebnf", "json_schema", "stop", "stop_sequences", "logit_bias"),
        Rule(_ELSEWHERE, _NONE),
    ),
    "response_format": Rule(_ELSEWHERE, (*_NONE, {"type": "text"})),
    "n": Rule(_ELSEWHERE, (1,)),
    "tool_choice": Rule(_ELSEWHERE, ("auto",)),
    "max_completion_tokens": Rule("send this protocol's own limit"),
}
_REFUSED_CHAT = {
    **_REFUSED_TEXT,
    **_BINDING,
    "add_special_tokens": Rule("the chat template writes BOS where there is one", _OFF),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        Rule(_ELSEWHERE, _NONE),
    ),
    **dict.fromkeys(("min_tokens", "stop_token_ids"), Rule(_ELSEWHERE, (0, []))),
}

_REFUSED_TEMPLATE: dict[str, Rule] = {
    "chat_template": Rule(_TEMPLATE, _NONE),
    "functions": Rule(_TOOLS, ([],)),
}

_REFUSED_VECTORS: dict[str, Rule] = {
    "messages": Rule("send the text to be embedded in 'input'", ([],)),
    "chat_template": Rule("texts are embedded as they are", _NONE),
    "input_type": Rule("put the model's own prefix before each text", _NONE),
    "task": Rule("put the model's own prefix before each text", _NONE),
    "task_type": Rule("put the model's own prefix before each text", _NONE),
    "prompt_name": Rule("put the model's own prefix before each text", _NONE),
    "prompt": Rule("put the model's own prefix before each text", _NONE),
    "late_chunking": Rule("each text is embedded alone", _OFF),
    "output_dtype": Rule("numbers are float32", ("float", "float32")),
    "embedding_type": Rule("numbers are float32; send 'encoding_format'", ("float", "float32")),
    "embedding_types": Rule("numbers are float32; send 'encoding_format'", (["float"], [])),
    "output_dimension": Rule("send 'dimensions'"),
    "truncate_dim": Rule("send 'dimensions'"),
    "normalize": Rule("send 'embd_normalize': -1 to leave vectors as they are", (True,)),
    "truncation_direction": Rule("the beginning of a text is read", ("right", "Right")),
    "add_special_tokens": Rule("whether a text begins with BOS, the model's file says", (True,)),
}

_REFUSED_SCORES: dict[str, Rule] = {
    "truncate_prompt_tokens": Rule("send 'max_tokens_per_doc' or 'truncate'"),
    "rank_fields": Rule("send documents as texts, or as objects with a 'text'", ([],)),
    "instruction": Rule("put the model's own instruction before the query", _NONE),
    "raw_scores": Rule("scores are what the model gives", _OFF),
    "truncation_direction": Rule("the beginning of a text is read", ("right", "Right")),
    "activation": Rule("scores are what the model gives"),
    "use_activation": Rule("scores are what the model gives"),
    "max_chunks_per_doc": Rule("each document is read as one text", (1,)),
}

# By the `refuses` of a request's struct.
REFUSED: dict[str, Mapping[str, Rule]] = {
    "": {},
    "text": _REFUSED_TEXT,
    "chat": _REFUSED_CHAT,
    "template": _REFUSED_TEMPLATE,
    "vectors": _REFUSED_VECTORS,
    "scores": _REFUSED_SCORES,
}

# Fields that no struct declares and that need no word, because what they ask for is the case anyway.
# A place in a list is "".
FULFILLED: dict[Path, Rule] = {
    ("response_format", "json_schema", "strict"): Rule("every schema is held to"),
    ("response_format", "json_schema", "description"): Rule("it is for people, as 'name' is"),
    ("stream_options", "include_obfuscation"): Rule("nothing is padded", _OFF),
    ("messages", "", "refusal"): Rule("an empty one says nothing", _NONE),
    ("messages", "", "annotations"): Rule("an empty list says nothing", _NONE),
}

_NATIVE = {
    "t_max_prompt_ms": Rule("a prompt is read to its end", (-1,)),
    "stream_options": Rule("every answer ends with its counts"),
}
_HOSTED = {
    "container": Rule("no code runs here", _NONE),
    "context_management": Rule("nothing is dropped from a conversation", _NONE),
    "mcp_servers": Rule("no server is called", _NONE),
}

# Declared fields that change nothing, by the request's struct. They are declared because their values are
# checked, or because a client finds them again in the answer.
WITHOUT_EFFECT: dict[str, dict[str, Rule]] = {
    "MessagesRequest": {"metadata": Rule("nobody is billed here", _NONE), **_HOSTED},
    "CountTokensRequest": _HOSTED,
    "NativeCompletionRequest": {
        "id_slot": Rule("the slot with the longest cached prefix is taken", (-1,)),
        **_NATIVE,
    },
    "InfillRequest": _NATIVE,
    "ResponsesRequest": {
        "service_tier": Rule("there is one tier", ("auto", "default")),
        "max_tool_calls": Rule("it limits tools that the server runs; none runs here"),
        "localspec": Rule("responses have no options of ours"),
        "stream_options": Rule("every response ends with its usage"),
    },
}


class Ignored(list[str]):
    """Paths in a request of what changed nothing, as `localspec.ignored` names them; a bounded list."""

    more = 0

    def add(self, path: str, kind: object = None) -> None:
        """Name a path; `kind`: of what kind the thing there is, where that is not known here."""
        path = _cut(path if kind is None else f"{path} ({str(kind)[:80]})")
        if path in self:
            return
        if len(self) < MAX_NAMED:
            self.append(path)
            return
        if self.more:
            self.pop()
        else:
            self.more = 1  # the path that gives its place to the count
            self.pop()
        self.more += 1
        self.append(f"and {self.more} more")


def account(body: bytes | bytearray, request: Struct) -> Ignored:
    """Return what of `body` changes nothing; `request` is what was decoded from it.

    Raises:
        BadBody: a field is refused by its name, or a name is no text.
    """
    kind = type(request)
    found = Ignored()
    try:
        for path, value in _undeclared(Raw(body), kind, ()):
            _judge(path, value, REFUSED[getattr(kind, "refuses", "")], found)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"The request body is not valid JSON: {error}.") from None
    for name in without_effect(request):
        found.add(name)
    return found


def without_effect(request: Struct) -> Iterator[str]:
    """Yield the declared fields of a request that were sent and change nothing."""
    for name, rule in WITHOUT_EFFECT.get(type(request).__name__, {}).items():
        value = getattr(request, name)
        if value is not None and not _is_among(value, rule.neutral):
            yield name


def refuse_undeclared(body: bytes | bytearray, request: Struct) -> None:
    """Refuse fields that nobody here knows, in requests that change what is on this machine.

    Raises:
        BadBody: there is one.
    """
    try:
        first = next((path for path, _ in _undeclared(Raw(body), type(request), ())), None)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"The request body is not valid JSON: {error}.") from None
    if first is not None:
        name = _cut(_written(first))
        raise BadBody(f"'{name}' is not a field of this request.", name)


def _judge(path: Path, value: Raw, refused: Mapping[str, Rule], found: Ignored) -> None:
    """Raise for a field that is refused (BadBody), else name it unless it asks for nothing."""
    if len(path) == 1 and (rule := refused.get(str(path[0]))):
        if not _is_among(_small(value), rule.neutral):
            raise BadBody(f"'{path[0]}' is not supported: {rule.reason}.", str(path[0]))
        return
    rule = FULFILLED.get(tuple("" if isinstance(each, int) else each for each in path))
    if rule is None or (rule.neutral and not _is_among(_small(value), rule.neutral)):
        found.add(_written(path))


def _written(path: Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _small(value: Raw) -> object:
    """The value where it is short enough to be a neutral one, else itself."""
    text = bytes(value)
    return msgspec.json.decode(text) if len(text) <= _SMALL else value


def _is_among(value: object, choices: tuple[object, ...]) -> bool:
    """Whether it is one of the choices; true and 1 are two values."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in choices
    )


# ---------------------------------------------------------------------------- walking


def _undeclared(text: Raw, kind: type[Struct], path: Path) -> Iterator[tuple[Path, Raw]]:
    """Yield the fields of an object that its struct does not declare, and those of declared objects in it."""
    declared = _declared(kind)
    for name, value in _object.decode(text).items():
        here = (*path, name)
        first = bytes(memoryview(value)[:1])
        if name not in declared:
            if first != b"n":  # null
                yield here, value
        elif first == b"{" and (variants := declared[name].variants):
            yield from _undeclared(value, _variant(value, variants), here)
        elif first == b"[" and (inner := declared[name].each):
            yield from _undeclared_of_each(value, inner, here)


def _undeclared_of_each(text: Raw, kind: type[Struct], path: Path) -> Iterator[tuple[Path, Raw]]:
    """Yield each undeclared field of the items of a list once, where it stands first."""
    seen = set(_declared(kind))
    for index, item in enumerate(_objects.decode(text)):
        for name in item.keys() - seen:
            if bytes(memoryview(item[name])[:1]) != b"n":
                seen.add(name)
                yield (*path, index, name), item[name]


def _variant(text: Raw, variants: tuple[type[Struct], ...]) -> type[Struct]:
    """Return the struct that an object was decoded as; among several, its tag says which."""
    if len(variants) > 1:
        values = _object.decode(text)
        for kind in variants:
            config = kind.__struct_config__
            tag = values.get(config.tag_field or "")
            if tag is not None and msgspec.json.decode(tag) == config.tag:
                return kind
    return variants[0]


_object = msgspec.json.Decoder(dict[str, Raw])
_objects = msgspec.json.Decoder(list[dict[str, Raw]])


class _Inner(NamedTuple):
    """The structs in a field's type: those that the field itself may be, and that of a list's items."""

    variants: tuple[type[Struct], ...] = ()
    each: type[Struct] | None = None


# Lists of objects whose undeclared fields are looked at. Others may hold as many objects as a body does, are
# shown to the model as they are (tools), or refuse what they do not know.
_LISTS = ("messages",)


@cache
def _declared(kind: type[Struct]) -> dict[str, _Inner]:
    hints = get_type_hints(kind)
    found = {}
    for field in msgspec.structs.fields(kind):
        types = list(_types(hints[field.name]))
        variants = tuple(each for each in types if _is_struct(each))
        each = None
        if field.encode_name in _LISTS:
            lists = [inner for each in types for inner in get_args(each)]
            each = next((inner for inner in lists if _is_struct(inner)), None)
        found[field.encode_name] = _Inner(variants, each)
    if tag_field := kind.__struct_config__.tag_field:
        found[tag_field] = _Inner()
    return found


def _types(kind: Any) -> Iterator[Any]:
    """The members of a union, with what Annotated adds taken off."""
    members = get_args(kind)
    if members and not isinstance(kind, type) and getattr(kind, "__origin__", None) is not list:
        for each in members:
            yield from _types(each)
    yield kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _cut(path: str) -> str:
    return path if len(path) <= MAX_PATH else f"{path[: MAX_PATH - 1]}…"
