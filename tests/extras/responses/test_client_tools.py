"""Tools that OpenAI has defined and the client runs: their calls, their results, and their choice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response as Published

from tests.extras.responses.test_responses import WEATHER, call, collapse_types, stream_events
from tests.support.daemons import Home

CLICK = {"type": "click", "button": "left", "x": 1, "y": 2}
SHELL_ARGUMENTS = {"commands": ["ls", "pwd"], "timeout_ms": 100, "max_output_length": 9}
RUN = {"command": ["ls", "-l"], "working_directory": "/"}
CREATE = {"type": "create_file", "path": "a", "diff": "+a"}
DELETE = {"type": "delete_file", "path": "a"}
# The type of a tool, the arguments of a call, and the item of the call.
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("shell", SHELL_ARGUMENTS, {"type": "shell_call", "action": SHELL_ARGUMENTS}),
    ("shell", {"commands": ["ls"]}, {"type": "shell_call", "action": {"commands": ["ls"]}}),
    ("local_shell", RUN, {"type": "local_shell_call", "action": {**RUN, "type": "exec", "env": {}}}),
    ("apply_patch", CREATE, {"type": "apply_patch_call", "operation": CREATE}),
    ("apply_patch", DELETE, {"type": "apply_patch_call", "operation": DELETE}),
    ("computer", {"actions": [CLICK]}, {"type": "computer_call", "actions": [CLICK]}),
    ("computer_use_preview", {"action": CLICK}, {"type": "computer_call", "action": CLICK}),
    ("tool_search", {"query": "x"}, {"type": "tool_search_call", "arguments": {"query": "x"}}),
]  # fmt: skip
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Find.", "parameters": QUERY}
SCREEN = {"display_width": 800, "display_height": 600, "environment": "linux"}


def tool(kind: str) -> dict[str, Any]:
    if kind == "tool_search":
        return SEARCH
    return {"type": kind, **(SCREEN if kind == "computer_use_preview" else {})}


def ask(home: Home, text: Any, **fields: Any) -> Any:
    """Return a response, validated strictly against its published type."""
    answer = home.request("POST", "/v1/responses", {"input": text, "model": "", **fields})
    assert answer.status == 200, answer.body
    Published.model_validate_json(answer.body, strict=True)
    return answer.json


def without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_null(part) for key, part in value.items() if part is not None}
    return value


def read_prompt(response: Any) -> Any:
    return json.loads(response["output"][0]["content"][0]["text"])["prompt"]


@pytest.mark.parametrize(("kind", "arguments", "item"), CALLS)
def test_a_call_is_an_item_of_its_own_and_is_read_again(
    home: Home, kind: str, arguments: dict[str, Any], item: dict[str, Any]
) -> None:
    question = f"raw {call(kind, arguments)}"
    response = ask(home, question, tools=[tool(kind)], tool_choice="required")
    [answered] = response["output"]
    assert item.items() <= without_null(answered).items()
    assert answered["status"] == "completed"
    result = {"type": "function_call_output", "call_id": answered["call_id"], "output": "echo"}
    history = [{"role": "user", "content": question}, answered, result]
    for fields in (
        {"text": history, "store": False},
        {"text": [result], "previous_response_id": response["id"]},
        {"text": [history[0], {"type": "item_reference", "id": answered["id"]}, result]},
    ):
        prompt = read_prompt(ask(home, tools=[tool(kind)], **fields))
        [earlier] = prompt["messages"][1]["extra"]["tool_calls"]
        assert (earlier["function"]["name"], earlier["id"]) == (kind, answered["call_id"])
        assert earlier["function"]["arguments"] == arguments
        [offered] = prompt["tools"]
        assert offered["function"]["name"] == kind
        assert offered["function"]["parameters"]["properties"].keys() >= arguments.keys()
    stored = home.request("GET", f"/v1/responses/{response['id']}").json
    assert stored["output"] == response["output"]


@pytest.mark.parametrize(("kind", "arguments", "item"), CALLS)
def test_a_streamed_call_is_the_same_item(
    home: Home, kind: str, arguments: dict[str, Any], item: dict[str, Any]
) -> None:
    events = stream_events(home, f"raw {call(kind, arguments)}", tools=[tool(kind)])
    commands = []
    if kind == "shell":
        commands = ["shell_call_command.added", "shell_call_command.delta"]
        commands = [*commands, "shell_call_command.done"] * len(arguments["commands"])
    types = ["created", "in_progress", "output_item.added", *commands, "output_item.done"]
    assert collapse_types(events) == [*types, "completed"]
    [done] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert item.items() <= without_null(done).items()
    written = [event["command"] for event in events if event["type"].endswith("command.done")]
    assert written == arguments.get("commands", [])
    assert events[-1]["response"]["output"] == [done]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("shell", '{"commands": "ls"}'),
        ("local_shell", '{"command": ["l'),
        ("apply_patch", '{"type": "rename_file", "path": "a"}'),
        ("computer", '{"action": {}}'),
    ],
)
def test_a_call_of_another_shape_is_sent_as_it_was_written(
    home: Home, kind: str, arguments: str
) -> None:
    text = f'raw <tool_call>\n{{"name": "{kind}", "arguments": {arguments}'
    events = stream_events(home, text, tools=[tool(kind)])
    [item] = ask(home, text, tools=[tool(kind)])["output"]
    assert (item["type"], item["name"]) == ("function_call", kind)
    assert item["arguments"].strip().startswith(arguments[:12])
    [streamed] = events[-1]["response"]["output"]
    assert streamed["arguments"] == item["arguments"]
    pieces = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(pieces) == item["arguments"]


OUTPUTS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "type": "shell_call_output",
            "call_id": "c",
            "output": [
                {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}},
                {"stdout": "", "stderr": "b", "outcome": {"type": "timeout"}},
            ],
        },
        "a\nExit code: 1\nb\nTimed out.",
    ),
    ({"type": "shell_call_output", "call_id": "c", "output": "plain"}, "plain"),
    ({"type": "local_shell_call_output", "call_id": "c", "output": "{}"}, "{}"),
    ({"type": "local_shell_call_output", "id": "c", "output": "x"}, "x"),
    ({"type": "local_shell_call_output", "id": "lsh_1", "output": "x"}, "x"),
    ({"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}, "failed"),
    ({"type": "apply_patch_call_output", "call_id": "c", "status": "failed", "output": "no"}, "no"),
]


@pytest.mark.parametrize(("output", "text"), OUTPUTS)
def test_a_result_is_read(home: Home, output: dict[str, Any], text: str) -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    earlier = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": action}
    items = [{"role": "user", "content": "x"}, earlier, output, {"role": "user", "content": "echo"}]
    response = ask(home, items, store=False)
    message = read_prompt(response)["messages"][2]
    assert (message["role"], message["content"]) == ("tool", text)
    assert message["extra"]["tool_call_id"] == "c"
    assert response["localspec"].get("ignored", []) == []


@pytest.mark.parametrize(
    ("tools", "choice", "name"),
    [
        (["shell", "function"], {"type": "shell"}, "shell"),
        (["apply_patch", "function"], {"type": "apply_patch"}, "apply_patch"),
        (["computer", "shell"], {"type": "computer_use"}, "computer"),
        (["computer", "shell"], {"type": "computer"}, "computer"),
        (["shell"], "required", "shell"),
        (
            ["function", "shell"],
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]},
            "shell",
        ),
    ],
)
def test_a_tool_can_be_chosen(home: Home, tools: list[str], choice: Any, name: str) -> None:
    offered = [WEATHER if kind == "function" else tool(kind) for kind in tools]
    response = ask(home, "echo", tools=offered, tool_choice=choice, store=False)
    calls = json.loads(response["output"][0]["content"][0]["text"])["tools"]
    assert calls["required"]
    assert list(calls["schemas"]) == [name]


HOSTED = [
    {"type": "web_search"},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "code_interpreter", "container": {"type": "auto"}},
]


@pytest.mark.parametrize("hosted", HOSTED)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "x"}, "own"])
def test_a_choice_that_only_openai_could_follow_is_refused(
    home: Home, hosted: dict[str, Any], choice: Any
) -> None:
    choice = {"type": hosted["type"]} if choice == "own" else choice
    body = {"input": "echo", "tools": [hosted], "tool_choice": choice}
    answer = home.request("POST", "/v1/responses", body)
    assert answer.status == 400
    assert answer.error["param"] == "tool_choice"
    assert hosted["type"] in answer.error["message"]


def test_a_local_environment_and_its_skills_are_told(home: Home) -> None:
    skill = {"name": "lint", "description": "Checks code.", "path": "/skills/lint"}
    shell = {"type": "shell", "environment": {"type": "local", "skills": [skill]}}
    [offered] = read_prompt(ask(home, "echo", tools=[shell], store=False))["tools"]
    assert "lint, in /skills/lint: Checks code." in offered["function"]["description"]


PATCH = {"type": "custom", "name": "patch"}
SPACE = {"type": "namespace", "name": "files", "description": "", "tools": [WEATHER, PATCH]}


def add_tools(kind: str, *tools: dict[str, Any]) -> dict[str, Any]:
    if kind == "additional_tools":
        return {"type": kind, "role": "developer", "tools": list(tools)}
    return {"type": kind, "call_id": "s", "execution": "client", "tools": list(tools)}


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_tools_that_come_later_are_offered_and_called(home: Home, kind: str) -> None:
    """Agents send all items again, so the same tools are added in each request."""
    search = {"type": "tool_search_call", "call_id": "s", "execution": "client"}
    question = f"raw {call('weather', {'city': 'Oslo'})}{call('patch', {'input': 'a'})}"
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {**search, "arguments": {"query": "x"}, "status": "completed"},
        add_tools(kind, WEATHER, PATCH),
        add_tools(kind, PATCH, {"type": "shell"}, SPACE, SPACE),
        {"role": "user", "content": question},
    ]
    fields = {"tools": [SEARCH, WEATHER], "store": False}
    response = ask(home, items, **fields)
    calls = [(item["type"], item["name"]) for item in response["output"]]
    assert calls == [("function_call", "weather"), ("custom_tool_call", "patch")]
    assert "ignored" not in response["localspec"]
    outputs = [
        {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "echo"}
        for item in response["output"]
    ]
    prompt = read_prompt(ask(home, [*items, *response["output"], *outputs], **fields))
    names = [offered["function"]["name"] for offered in prompt["tools"]]
    assert names == ["tool_search", "weather", "patch", "shell", "files.weather", "files.patch"]
    results = [message["content"] for message in prompt["messages"] if message["role"] == "tool"]
    searched = ["Loaded: weather, patch", "Loaded: patch, shell, files, files"]
    assert results == [*(searched if kind == "tool_search_output" else []), "echo", "echo"]


def test_a_search_that_openai_has_run_is_passed_over(home: Home) -> None:
    call_item = {"type": "tool_search_call", "arguments": {}, "execution": "server"}
    output = {"type": "tool_search_output", "execution": "server", "tools": [WEATHER]}
    items = [call_item, output, {"role": "user", "content": "echo"}]
    response = ask(home, items, tools=[{"type": "tool_search"}], store=False)
    assert [tool["function"]["name"] for tool in read_prompt(response)["tools"]] == ["weather"]
    assert response["localspec"]["ignored"] == [
        "'tools[0]': a tool of type \"tool_search\" cannot run here."
    ]


def test_a_mistake_in_a_tool_that_comes_later_is_named(home: Home) -> None:
    items = [add_tools("additional_tools", WEATHER, {"type": "function"})]
    answer = home.request("POST", "/v1/responses", {"input": items})
    assert (answer.status, answer.error["param"]) == (400, "input[0].tools[1].name")
