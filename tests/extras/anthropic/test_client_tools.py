"""Tools that Anthropic has defined and the client runs, through the official client and its helpers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.tools import BetaLocalFilesystemMemoryTool
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import InvalidRequest
from localspec.extras.anthropic.request import chat_request
from localspec.extras.anthropic.wire import MessagesRequest
from localspec.protocol.fields import IgnoredFields
from localspec.protocol.reading import decode
from tests.support.official_clients import written_call as call

BASH: Any = {"type": "bash_20250124", "name": "bash"}
EDITOR: Any = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
COMPUTER: Any = {
    "type": "computer_20251124",
    "name": "computer",
    "display_width_px": 1024,
    "display_height_px": 768,
}
SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
EDITS = ["view", "create", "str_replace", "insert"]


def translate(*tools: Any, **fields: Any) -> tuple[Any, list[str]]:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    request = decode(json.dumps({**body, **fields}).encode(), MessagesRequest)
    ignored = IgnoredFields()
    return chat_request(request, ignored)[0], ignored


def offered(*tools: Any) -> dict[str, Any]:
    """Return the one function that a template gets for the tools."""
    chat, ignored = translate(*tools)
    assert ignored == []
    [tool] = chat.tools
    template_object = tool.template_object()
    assert (
        msgspec.to_builtins(tool.function)["parameters"]
        == (template_object["function"]["parameters"])
    )
    return dict(template_object["function"])


@pytest.mark.parametrize(
    ("kind", "name", "member", "choices", "others"),
    [
        ("bash_20241022", "bash", "command", None, {"restart"}),
        ("bash_20250124", "bash", "command", None, {"restart"}),
        ("text_editor_20241022", "str_replace_editor", "command", [*EDITS, "undo_edit"], {"new_str"}),
        ("text_editor_20250124", "str_replace_editor", "command", [*EDITS, "undo_edit"], {"path"}),
        ("text_editor_20250429", EDITOR["name"], "command", EDITS, {"view_range", "insert_text"}),
        ("text_editor_20250728", EDITOR["name"], "command", EDITS, {"insert_line", "insert_text"}),
        ("memory_20250818", "memory", "command", [*EDITS, "delete", "rename"], {"old_path"}),
    ],
)  # fmt: skip
def test_a_tool_is_offered_with_the_schema_of_its_date(
    kind: str, name: str, member: str, choices: list[str] | None, others: set[str]
) -> None:
    function = offered({"type": kind, "name": name, "cache_control": {"type": "ephemeral"}})
    assert function["name"] == name
    assert function["description"]
    properties = function["parameters"]["properties"]
    assert properties[member]["type"] == "string"
    assert properties[member].get("enum") == choices
    assert others < properties.keys()
    assert set(function["parameters"]["required"]) <= properties.keys()


@pytest.mark.parametrize(
    ("date", "options", "absent", "present"),
    [
        ("20241022", {}, {"scroll", "wait", "zoom"}, {"left_click_drag", "cursor_position"}),
        ("20250124", {"display_number": 1}, {"zoom"}, {"scroll", "hold_key", "triple_click"}),
        ("20251124", {"enable_zoom": True}, set(), {"zoom", "wait", "screenshot"}),
    ],
)
def test_a_computer_is_offered_with_its_actions_and_its_screen(
    date: str, options: dict[str, Any], absent: set[str], present: set[str]
) -> None:
    function = offered({**COMPUTER, "type": f"computer_{date}", **options})
    parameters = function["parameters"]
    actions = set(parameters["properties"]["action"]["enum"])
    assert present <= actions
    assert not absent & actions
    assert ("region" in parameters["properties"]) == ("zoom" in actions)
    assert "1024 x 768" in function["description"]


@given(
    st.sampled_from(["bash", "text_editor", "memory", "computer"]),
    st.dates().map(lambda date: f"{date:%Y%m%d}"),
)
def test_a_tool_of_any_date_is_offered(kind: str, date: str) -> None:
    assert offered({"type": f"{kind}_{date}"})["parameters"]["properties"]


def test_a_limit_of_the_editor_is_told() -> None:
    assert "777 characters" in offered({**EDITOR, "max_characters": 777})["description"]


def test_fields_without_effect_are_named() -> None:
    _, ignored = translate({**BASH, "defer_loading": True, "x": 1})
    assert ignored == ["tools[0].defer_loading", "tools[0].x"]


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([SEARCH], {"type": "any"}),
        ([SEARCH], {"type": "tool", "name": "web_search"}),
        ([BASH, SEARCH], {"type": "tool", "name": "web_search"}),
        ([{"type": "mcp_toolset", "mcp_server_name": "x"}], {"type": "any"}),
    ],
)
def test_a_choice_that_only_anthropic_could_follow_is_refused(tools: Any, choice: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"runs at Anthropic alone") as refused:
        translate(*tools, tool_choice=choice)
    assert tools[-1]["type"] in refused.value.message
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("kind", ["computer_toolset_20260801", "browser_toolset_20260801"])
def test_a_set_of_tools_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=r"'tools\[1\]' is not supported"):
        translate(BASH, {"type": kind})


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "bash"}])
def test_a_required_call_is_a_tool_use_and_its_result_is_read(
    client: anthropic.Anthropic, choice: Any, streamed: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": f"raw {call('bash', command='ls')}"}]
    body: Any = {"model": "", "max_tokens": 2000, "tools": [BASH], "tool_choice": choice}
    if streamed:
        with client.messages.stream(**body, messages=messages) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**body, messages=messages)
    [use] = message.content
    assert use.type == "tool_use"
    assert (use.name, use.input, message.stop_reason) == ("bash", {"command": "ls"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "echo"}
    messages += [message.to_dict(), {"role": "user", "content": [result]}]
    messages[1] = {"role": "assistant", "content": messages[1]["content"]}
    [text] = client.messages.create(
        **{**body, "tool_choice": {"type": "auto"}}, messages=messages
    ).content
    assert text.type == "text"
    prompt = json.loads(text.text)["prompt"]
    assert [tool["function"]["name"] for tool in prompt["tools"]] == ["bash"]
    [earlier] = prompt["messages"][1]["extra"]["tool_calls"]
    assert earlier["function"] == {"name": "bash", "arguments": {"command": "ls"}}


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runner_runs_the_memory_tool(
    client: anthropic.Anthropic, tmp_path: Path, streamed: bool
) -> None:
    note = call("memory", command="create", path="/memories/a.txt", file_text="kept")
    runner: Any = client.beta.messages.tool_runner(
        model="",
        max_tokens=2000,
        tools=[BetaLocalFilesystemMemoryTool(str(tmp_path))],
        messages=[{"role": "user", "content": f"raw {note}"}],
        stream=streamed,
    )
    *_, final = [step.get_final_message() if streamed else step for step in runner]
    assert (tmp_path / "memories" / "a.txt").read_text() == "kept"
    assert final.content[0].text.startswith("File created")
