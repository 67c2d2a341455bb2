"""Read the one constraint of an answer, under whichever of its many names a request gives it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.requests import GenerationRequest


def constraint(request: GenerationRequest) -> frames.Constraint | None:
    """Return the grammar, schema or expression that the answer must match; None if it is free.

    Raises:
        InvalidRequest: the request has two constraints, or an empty one.
    """
    constraints = [
        *_response_format(request),
        *_llama_server_fields(request),
        *_guided_fields(request),
        *_structured_outputs(request),
    ]
    if len(constraints) > 1:
        names = " and ".join(f"'{entry.param}'" for entry in constraints)
        raise InvalidRequest(f"{names} cannot be used together.", param=constraints[1].param)
    return constraints[0] if constraints else None


def _response_format(request: GenerationRequest) -> Iterator[frames.Constraint]:
    response_format = request.response_format
    if response_format is None or response_format.type == "text":
        return
    if response_format.type == "json_object" and response_format.schema is None:
        yield frames.Constraint("json_object", param="response_format")
        return
    schema = (
        response_format.json_schema.schema
        if response_format.json_schema
        else response_format.schema
    )
    strict = bool(
        response_format.json_schema.strict
        if response_format.json_schema
        else response_format.strict
    )
    if schema is None:
        raise InvalidRequest(
            "'response_format.json_schema' is missing.", param="response_format.json_schema"
        )
    # As in llama-server, an empty schema means any object.
    yield _schema_constraint("response_format", schema or {"type": "object"}, strict)


def _llama_server_fields(request: GenerationRequest) -> Iterator[frames.Constraint]:
    """Yield the constraints in the fields of llama-server and localspec, and in SGLang's `ebnf`."""
    if request.json_schema is not None:
        yield _schema_constraint("json_schema", request.json_schema)
    if request.grammar:
        yield frames.Constraint("grammar", request.grammar, param="grammar")
    if request.ebnf:
        yield frames.Constraint("grammar", request.ebnf, param="ebnf")
    if request.regex:
        yield frames.Constraint("regex", request.regex, param="regex")


def _guided_fields(request: GenerationRequest) -> Iterator[frames.Constraint]:
    """Yield the constraints in vLLM's older fields."""
    if request.guided_json:
        yield _schema_constraint("guided_json", _decode_schema(request.guided_json, "guided_json"))
    if request.guided_regex:
        yield frames.Constraint("regex", request.guided_regex, param="guided_regex")
    if request.guided_choice:
        yield _choice_constraint(request.guided_choice, "guided_choice")
    if request.guided_grammar:
        yield frames.Constraint("grammar", request.guided_grammar, param="guided_grammar")


def _structured_outputs(request: GenerationRequest) -> Iterator[frames.Constraint]:
    """Yield the constraint in vLLM's newer field."""
    outputs, field = request.structured_outputs, "structured_outputs"
    if outputs is None:
        return
    if outputs.structural_tag:
        raise InvalidRequest(
            f"'{field}.structural_tag' is not supported: send 'regex', 'grammar' or "
            "'response_format'.",
            param=f"{field}.structural_tag",
        )
    if outputs.json:
        yield _schema_constraint(f"{field}.json", _decode_schema(outputs.json, f"{field}.json"))
    if outputs.regex:
        yield frames.Constraint("regex", outputs.regex, param=f"{field}.regex")
    if outputs.choice:
        yield _choice_constraint(outputs.choice, f"{field}.choice")
    if outputs.grammar:
        yield frames.Constraint("grammar", outputs.grammar, param=f"{field}.grammar")
    if outputs.json_object:
        yield frames.Constraint("json_object", param=f"{field}.json_object")


def _choice_constraint(texts: Sequence[str], param: str) -> frames.Constraint:
    """Return an expression that matches exactly one of some texts."""
    if not all(texts):
        raise InvalidRequest(f"'{param}' contains an empty text.", param=param)
    source = "|".join(map(re.escape, dict.fromkeys(texts)))
    return frames.Constraint("regex", f"({source})", param=param)


def _decode_schema(schema: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return a schema, which vLLM's clients may also send as JSON text.

    Raises:
        InvalidRequest: the text is not a JSON object.
    """
    if isinstance(schema, dict):
        return schema
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is no JSON Schema: {error}.", param=param) from None


def _schema_constraint(
    param: str, schema: dict[str, Any], strict: bool = False
) -> frames.Constraint:
    source = msgspec.json.encode(schema).decode()
    return frames.Constraint("json_schema", source, param=param, strict=strict)
