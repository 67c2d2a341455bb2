"""The shipped openapi.yaml describes every endpoint, and the daemon's answers match it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import httpx2
import jsonschema_rs
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

import openapi
from localspec.daemon.routes import ENDPOINTS
from tests.support.any_request import description
from tests.support.daemons import Home, RunningDaemon, temporary_home
from tests.support.exploration import FACTOR
from tests.support.patience import PATIENCE

METHODS = ("get", "post", "put", "patch", "delete")
EXAMPLES = 2  # requests per operation that fit the description, and as many that do not

DESCRIPTION: dict[str, Any] = description()
SCHEMA = schemathesis.openapi.from_dict(DESCRIPTION)
# A body with too many values is refused with 413, as described, before it is compared with a schema.
REJECTION = SCHEMA.config.checks.negative_data_rejection
REJECTION.expected_statuses = [*REJECTION.expected_statuses, "413"]
OPERATIONS = [
    operation
    for result in SCHEMA.get_all_operations()
    if (operation := cast(Any, result).ok()).path
    != "/localspec/shutdown"  # or nobody answers the next one
]
load_all_checks()
# What a schema cannot say makes a request that fits it a 400: fields that exclude each other, texts
# that are no regex. What is not offered is a 501, and a 500 is looked for below. Everything else is checked.
UNCHECKED = ("positive_data_acceptance", "not_a_server_error")
CHECKED = [check for check in CHECKS.get_all() if check.__name__ not in UNCHECKED]


@pytest.fixture(scope="module")
def api() -> Iterator[Home]:
    with temporary_home() as home:
        home.use_fake()
        home.environment["HF_HUB_OFFLINE"] = "1"
        RunningDaemon(home)
        yield home


@pytest.fixture(scope="module")
def client(api: Home) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(uds=str(api.socket))
    with httpx2.Client(
        transport=transport, base_url="http://localhost", timeout=PATIENCE
    ) as client:
        yield client


def test_routes_and_descriptions_match() -> None:
    described = {
        (method.upper(), path)
        for path, item in DESCRIPTION["paths"].items()
        for method in item
        if method in METHODS
    }
    assert described == {(method, path) for method, path, _, _ in ENDPOINTS}


def test_every_answer_has_a_schema() -> None:
    """The outlines that scripts/openapi.py writes have an empty one."""
    responses = [
        (method, path, content)
        for path, item in DESCRIPTION["paths"].items()
        for method in METHODS
        for response in item.get(method, {}).get("responses", {}).values()
        for content in response.get("content", {}).values()
    ]
    assert len(responses) > 50
    assert [
        f"{method} {path}" for method, path, content in responses if content.get("schema") == {}
    ] == []


def test_schemas_match_the_structs() -> None:
    assert openapi.FILE.read_text(encoding="utf-8") == openapi.text(), "run scripts/openapi.py"


def test_the_daemon_serves_the_description(client: httpx2.Client) -> None:
    answer = client.get("/openapi.yaml")
    assert answer.headers["content-type"] == "application/yaml"
    assert yaml.safe_load(answer.text) == DESCRIPTION


def validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for({**schema, "components": DESCRIPTION["components"]})


def get_error_schema(operation: dict[str, Any]) -> Any:
    """Return the validator for an error, which is the same in a stream."""
    response = operation["responses"]["400"]["$ref"].rsplit("/", 1)[1]
    content = DESCRIPTION["components"]["responses"][response]["content"]
    return validator(content["application/json"]["schema"])


def check_events(operation: dict[str, Any], text: str) -> None:
    """Check that every event of a stream matches `x-event` or is an error."""
    response = operation["responses"]["200"]
    if "$ref" in response:
        response = DESCRIPTION["components"]["responses"][response["$ref"].rsplit("/", 1)[1]]
    event = validator(response["content"]["text/event-stream"]["x-event"])
    assert text.endswith("\n\n")
    for event_text in text.split("\n\n")[:-1]:
        name, _, line = event_text.rpartition("\n")
        assert line.startswith("data: "), line
        assert not name or name == f"event: {json.loads(line[6:])['type']}"
        if (data := line.removeprefix("data: ")) != "[DONE]":
            value = json.loads(data)
            (event if "error" not in value else get_error_schema(operation)).validate(value)


def check_lines(operation: dict[str, Any], text: str) -> None:
    """Check that every line matches `x-line` or is an error."""
    content = operation["responses"]["200"]["content"]
    line = validator(content["application/x-ndjson"]["x-line"])
    for value in map(json.loads, text.splitlines()):
        if list(value) != ["error"]:
            line.validate(value)


def send(client: httpx2.Client, case: Any) -> httpx2.Response:
    """Send a case with httpx2, because schemathesis cannot use a Unix socket."""
    request = case.as_transport_kwargs(base_url="http://localhost")
    request.pop("cookies", None)
    if "data" in request:
        request["content"] = request.pop("data")
    return client.request(**request)


def list_cases() -> Iterator[object]:
    """Yield each operation with valid requests, and with invalid ones if it can have any."""
    for operation in OPERATIONS:
        for mode in GenerationMode:
            if mode.is_positive or "requestBody" in operation.definition.raw:
                yield pytest.param(operation, mode, id=f"{operation.label} {mode.value}")


@pytest.mark.explore
@pytest.mark.slow
@pytest.mark.parametrize(("operation", "mode"), list(list_cases()))
def test_answers_to_random_requests_match_the_description(
    client: httpx2.Client, operation: Any, mode: GenerationMode
) -> None:
    @settings(max_examples=FACTOR * EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check_case(case: Any) -> None:
        answer = send(client, case)
        assert answer.status_code != 500, answer.text
        case.validate_response(answer, checks=CHECKED)
        if answer.headers.get("content-type") == "application/x-ndjson":
            check_lines(cast(dict[str, Any], operation.definition.raw), answer.text)
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            check_events(cast(dict[str, Any], operation.definition.raw), answer.text)

    check_case()
