"""Account for the fields of a request that no struct declares, and for those without effect.

A field that is not served must not be dropped silently. `find_ignored_fields` is called once for every body,
whatever its protocol. It sorts each field into one of three groups:

- The request's struct declares it: it is served, unless `WITHOUT_EFFECT` lists it.
- `REFUSED` lists it: the answer would differ from what was requested, so the request fails and
  names the field.
- Any other field is ignored, and the answer names it in `localspec.ignored`.

Null means the same as a missing field, so a field that is null is in no group. All of this holds at any
depth, except within what is free-form: JSON schemas, arguments of calls, metadata, arguments of templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from localspec.protocol.reading import BadBody

MAX_NAMED = 64  # paths in one answer; any others are only counted
MAX_PATH = 120  # characters of one path


# The field names, and the positions in lists, that lead to a field.
FieldPath = tuple[str | int, ...]


class Rule(NamedTuple):
    """Why a field is refused or has no effect, and the neutral values that request nothing."""

    reason: str
    neutral: tuple[object, ...] = ()


_OFF = (False,)
_NONE: tuple[object, ...] = ([], {}, "")
_TOOLS = "send 'tools' and 'tool_choice'"
_CONSTRAINT = "send 'regex', 'grammar' or 'response_format'"
_SAMPLER = "there is no such sampler here"
_TEMPLATE = "prompts are made by the model's own chat template"
_BIAS = "forbid single tokens with 'logit_bias'"
_BOS = "the model's file says whether a text begins with BOS"
_MERGE = "adapters are not supported; merge them into the model's file"
_FLOAT = ("float", "float32")
_LENGTH = "a prompt that is too long is refused; shorten it before it is sent"

# Fields that would change the answer of a request that generates text, in any protocol.
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
    "bad_words": Rule(_BIAS, ([],)),
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
    "add_special_tokens": Rule(_BOS, (True,)),
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
    **dict.fromkeys(("banned_tokens", "custom_token_bans", "banned_strings"), Rule(_BIAS, _NONE)),
    **dict.fromkeys(("lora_path", "lora_request"), Rule(_MERGE, _NONE)),
}

_ELSEWHERE = "it is a field of /v1/chat/completions"
# Fields that constrain an answer, for requests whose struct does not declare them.
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
_SWITCHES = "each protocol has a switch of its own for thoughts; see localspec help api"
_REFUSED_CHAT = {
    **_REFUSED_TEXT,
    **_BINDING,
    **dict.fromkeys(
        (
            *("enable_thinking", "thinking", "think", "reasoning", "reasoning_effort"),
            *("thinking_budget", "reasoning_budget_tokens", "thinking_budget_tokens"),
            "thinking_token_budget",
        ),
        Rule(_SWITCHES),
    ),
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
    **dict.fromkeys(
        ("input_type", "task", "task_type", "prompt_name", "prompt"),
        Rule("put the model's own prefix before each text", _NONE),
    ),
    "late_chunking": Rule("each text is embedded alone", _OFF),
    "output_dtype": Rule("numbers are float32", _FLOAT),
    "embedding_type": Rule("numbers are float32; send 'encoding_format'", ("float", "float32")),
    "embedding_types": Rule("numbers are float32; send 'encoding_format'", (["float"], [])),
    "output_dimension": Rule("send 'dimensions'"),
    "truncate_dim": Rule("send 'dimensions'"),
    "normalize": Rule("send 'embd_normalize': -1 to leave vectors as they are", (True,)),
    "truncation_direction": Rule("the beginning of a text is read", ("right", "Right")),
    "add_special_tokens": Rule(_BOS, (True,)),
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

# Refused fields by the `refusal_table` of a request's struct.
REFUSED: dict[str, Mapping[str, Rule]] = {
    "": {},
    "text": _REFUSED_TEXT,
    "chat": _REFUSED_CHAT,
    "template": _REFUSED_TEMPLATE,
    "vectors": _REFUSED_VECTORS,
    "scores": _REFUSED_SCORES,
}

# Undeclared fields that are not reported, because what they request is the case anyway, by the struct of
# their object.
FULFILLED_FIELDS: dict[str, dict[str, Rule]] = {
    "JsonSchema": {"description": Rule("it is for people, as 'name' is")},
    "StreamOptions": {"include_obfuscation": Rule("nothing is padded", _OFF)},
    "ChatMessage": {
        "refusal": Rule("an empty one says nothing", _NONE),
        "annotations": Rule("an empty list says nothing", _NONE),
    },
    "ThinkingSwitch": {"clear_thinking": Rule("the chat template decides", (True,))},
    "ReasoningSwitch": {
        "exclude": Rule("thoughts are returned", _OFF),
        "summary": Rule("thoughts are returned as they are", ("auto",)),
    },
    "CallParam": {"index": Rule("calls are in their order")},
    "PictureParam": {"detail": Rule("there is one resolution", ("auto",))},
    # Responses
    "Part": {
        "annotations": Rule("an empty list says nothing", _NONE),
        "logprobs": Rule("an empty list says nothing", _NONE),
        "detail": Rule("there is one resolution", ("auto",)),
    },
    "InputItem": {
        "pending_safety_checks": Rule("an empty list says nothing", _NONE),
        "max_output_length": Rule("the client has cut the output"),
    },
    "ToolDefinition": {
        "defer_loading": Rule("every tool is offered at once", _OFF),
        "allowed_callers": Rule("the model calls", (["direct"],)),
    },
    # Anthropic
    "TextParam": {"citations": Rule("an empty list says nothing", _NONE)},
    "ToolUseParam": {"caller": Rule("the model calls", ({"type": "direct"},))},
    "SearchResultParam": {"citations": Rule("there are none", ({"enabled": False},))},
    # Ollama
    "AskedCall": {"type": Rule("there are functions only", ("function",))},
    "AskedCallFunction": {"index": Rule("calls are in their order")},
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

# Declared fields without effect, by the request's struct. They are declared because their values are checked,
# or because the answer repeats them.
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
        self.more = (self.more or 1) + 1  # with the last path, which the count replaces
        self[-1] = f"and {self.more} more"


def find_ignored_fields(body: Mapping[str, Any], request: Struct) -> IgnoredFields:
    """Return the fields of `body` without effect. `request` is the struct converted from it.

    A field that several items of a list have is named once, at its first position.

    Raises:
        BadBody: a field is refused by its name.
    """
    kind = type(request)
    refused = REFUSED[getattr(kind, "refusal_table", "")]
    ignored = IgnoredFields()
    for path, value in _find_undeclared(body, kind):
        name = str(path[0])
        rule = refused.get(name) if len(path) == 1 else None
        if rule is None:
            ignored.add(_format_path(path))
        elif not _is_among(value, rule.neutral):
            raise BadBody(f"'{name}' is not supported: {rule.reason}.", name)
    for name in fields_without_effect(request):
        ignored.add(name)
    return ignored


def fields_without_effect(request: Struct) -> Iterator[str]:
    """Yield the declared fields of a request that were sent and have no effect."""
    for name, rule in WITHOUT_EFFECT.get(type(request).__name__, {}).items():
        value = getattr(request, name)
        if value is not None and not _is_among(value, rule.neutral):
            yield name


def refuse_undeclared(body: Mapping[str, Any], request: Struct) -> None:
    """Raise BadBody for undeclared fields, in requests that change something on this machine."""
    first = next(_find_undeclared(body, type(request)), None)
    if first is not None:
        name = _shorten_path(_format_path(first.path))
        raise BadBody(f"'{name}' is not a field of this request.", name)


def _is_fulfilled(kind: type[Struct], name: str, value: object) -> bool:
    """Return whether what an undeclared field of `kind` requests is the case anyway."""
    tables = [FULFILLED_FIELDS.get(base.__name__, {}) for base in kind.__mro__]
    rule = next((table[name] for table in tables if name in table), None)
    return rule is not None and (not rule.neutral or _is_among(value, rule.neutral))


def _format_path(path: FieldPath) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _is_among(value: object, choices: tuple[object, ...]) -> bool:
    """Return whether `value` is one of `choices`; true and 1 are different values."""
    return any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool)
        for choice in choices
    )


class Described(NamedTuple):
    """What an object that is decoded as `dict[str, Any]` may have; it is metadata of that type.

    `structs` returns the structs by the value of the field `tag`, with one at "" for any other value. An
    object without a struct is free-form, or is named by whoever reads it.
    """

    structs: Callable[[], Mapping[str, type[Struct]]]
    tag: str = "type"


class _Undeclared(NamedTuple):
    """A field that the struct of its object does not declare."""

    path: FieldPath
    value: object


def _find_undeclared(body: Mapping[str, Any], kind: type[Struct]) -> Iterator[_Undeclared]:
    """Yield the fields of a body that its struct does not declare, also of objects at any depth."""
    declared = _declared_fields(kind)
    for name, value in body.items():
        if name not in declared:
            if value is not None:
                yield _Undeclared((name,), value)
        elif (place := declared[name]) and isinstance(value, _CONTAINERS):
            yield from _walk(value, place, [name], {})


class _Place(NamedTuple):
    """What may be in a place of a body: objects of some structs, and lists with items."""

    structs: tuple[type[Struct], ...] = ()
    described: Described | None = None
    items: _Place | None = None


_CONTAINERS = (dict, list)  # a union of them would be built anew for each object


def _walk(
    value: object, place: _Place, path: list[str | int], found: dict[tuple[int, str], _Undeclared]
) -> Iterable[_Undeclared]:
    """Return `found` with the undeclared fields in `value`, each of one place once. `path` leads to `value`.

    A body may have a hundred thousand objects, so this does no more for each than it has to.
    """
    if isinstance(value, list):
        if place.items is None:
            return found.values()
        path.append(0)
        for index, item in enumerate(value):
            if isinstance(item, _CONTAINERS):
                path[-1] = index
                _walk(item, place.items, path, found)
        path.pop()
    elif isinstance(value, dict) and (kind := _find_struct(value, place)):
        declared, nested = _fields(kind)
        if not declared.issuperset(value):
            for name, member in value.items():
                if name in declared or member is None or (id(place), name) in found:
                    continue
                if not _is_fulfilled(kind, name, member):
                    found[id(place), name] = _Undeclared((*path, name), member)
        for name, inner in nested:
            member = value.get(name)
            if isinstance(member, _CONTAINERS):
                path.append(name)
                _walk(member, inner, path, found)
                path.pop()
    return found.values()


def _find_struct(value: dict[str, object], place: _Place) -> type[Struct] | None:
    """Return the struct that describes an object. Among several, its tag decides."""
    if place.described is not None:
        structs, tag = place.described.structs(), value.get(place.described.tag)
        return structs.get(tag if isinstance(tag, str) else "") or structs.get("")
    if len(place.structs) > 1:
        for kind in place.structs:
            config = kind.__struct_config__
            if config.tag_field and value.get(config.tag_field) == config.tag:
                return kind
    return place.structs[0] if place.structs else None


@cache
def _declared_fields(kind: type[Struct]) -> dict[str, _Place | None]:
    hints, fields = get_type_hints(kind, include_extras=True), msgspec.structs.fields(kind)
    places = {field.encode_name: _find_place(hints[field.name]) for field in fields}
    if tag_field := kind.__struct_config__.tag_field:
        places[tag_field] = None
    return places


@cache
def _fields(kind: type[Struct]) -> tuple[frozenset[str], list[tuple[str, _Place]]]:
    """Return the declared names, and the places of those fields that may have objects."""
    declared = _declared_fields(kind)
    return frozenset(declared), [(name, place) for name, place in declared.items() if place]


def _find_place(hint: Any) -> _Place | None:
    place = _Place()
    for member in _union_members(hint):
        if isinstance(member, Described):
            place = place._replace(described=member)
        elif isinstance(member, type) and issubclass(member, Struct):
            place = place._replace(structs=(*place.structs, member))
        elif get_origin(member) is list and place.items is None:
            place = place._replace(items=_find_place(*get_args(member)))
    return place if any(place) else None


def _union_members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, without annotations. What describes an object stands in its place."""
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        described = [mark for mark in metadata if isinstance(mark, Described)]
        yield from described or _union_members(inner)
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _union_members(member)
    else:
        yield hint


def _shorten_path(path: str) -> str:
    return path if len(path) <= MAX_PATH else f"{path[: MAX_PATH - 1]}…"
