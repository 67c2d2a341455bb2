"""The one language that an answer must be in, under whichever of its names a request asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.requests import GenerationRequest


def constraint(request: GenerationRequest) -> frames.Constraint | None:
    """Return what the answer is held to; None where it is free.

    Raises:
        InvalidRequest: two constraints, or one that says nothing.
    """
    found = [*_response_format(request), *_own(request), *_guided(request), *_structured(request)]
    if len(found) > 1:
        names = " and ".join(f"'{each.param}'" for each in found)
        raise InvalidRequest(f"{names} cannot be used together.", param=found[1].param)
    return found[0] if found else None


def _response_format(request: GenerationRequest) -> Iterator[frames.Constraint]:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return
    if wanted.type == "json_object" and wanted.schema is None:
        yield frames.Constraint("json_object", param="response_format")
        return
    schema = wanted.json_schema.schema if wanted.json_schema else wanted.schema
    strict = bool(wanted.json_schema.strict if wanted.json_schema else wanted.strict)
    if schema is None:
        raise InvalidRequest(
            "'response_format.json_schema' is missing.", param="response_format.json_schema"
        )
    # As in llama-server, a schema that says nothing means an object.
    yield _schema("response_format", schema or {"type": "object"}, strict)


def _own(request: GenerationRequest) -> Iterator[frames.Constraint]:
    """Yield those of llama-server and ours, and SGLang's name for one of them."""
    if request.json_schema is not None:
        yield _schema("json_schema", request.json_schema)
    if request.grammar:
        yield frames.Constraint("grammar", request.grammar, param="grammar")
    if request.ebnf:
        yield frames.Constraint("grammar", request.ebnf, param="ebnf")
    if request.regex:
        yield frames.Constraint("regex", request.regex, param="regex")


def _guided(request: GenerationRequest) -> Iterator[frames.Constraint]:
    """Yield those of vLLM's older fields."""
    if request.guided_json:
        yield _schema("guided_json", _read(request.guided_json, "guided_json"))
    if request.guided_regex:
        yield frames.Constraint("regex", request.guided_regex, param="guided_regex")
    if request.guided_choice:
        yield _choice(request.guided_choice, "guided_choice")
    if request.guided_grammar:
        yield frames.Constraint("grammar", request.guided_grammar, param="guided_grammar")


def _structured(request: GenerationRequest) -> Iterator[frames.Constraint]:
    """Yield those of vLLM's newer field."""
    wanted, field = request.structured_outputs, "structured_outputs"
    if wanted is None:
        return
    if wanted.structural_tag:
        raise InvalidRequest(
            f"'{field}.structural_tag' is not supported: send 'regex', 'grammar' or "
            "'response_format'.",
            param=f"{field}.structural_tag",
        )
    if wanted.json:
        yield _schema(f"{field}.json", _read(wanted.json, f"{field}.json"))
    if wanted.regex:
        yield frames.Constraint("regex", wanted.regex, param=f"{field}.regex")
    if wanted.choice:
        yield _choice(wanted.choice, f"{field}.choice")
    if wanted.grammar:
        yield frames.Constraint("grammar", wanted.grammar, param=f"{field}.grammar")
    if wanted.json_object:
        yield frames.Constraint("json_object", param=f"{field}.json_object")


def _choice(texts: Sequence[str], param: str) -> frames.Constraint:
    """Hold an answer to one of some texts, as an expression of nothing but literals."""
    if not all(texts):
        raise InvalidRequest(f"'{param}' contains an empty text.", param=param)
    source = "|".join(map(re.escape, dict.fromkeys(texts)))
    return frames.Constraint("regex", f"({source})", param=param)


def _read(schema: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return the schema; as vLLM has it, it may be the text of one.

    Raises:
        InvalidRequest: the text is no JSON object.
    """
    if isinstance(schema, dict):
        return schema
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is no JSON Schema: {error}.", param=param) from None


def _schema(param: str, schema: dict[str, Any], strict: bool = False) -> frames.Constraint:
    source = msgspec.json.encode(schema).decode()
    return frames.Constraint("json_schema", source, param=param, strict=strict)
