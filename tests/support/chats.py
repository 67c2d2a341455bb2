"""Chats of every shape that clients send, as bodies of POST /apply-template."""

from __future__ import annotations

from typing import Any

USER = {"role": "user", "content": "What is the weather in Zürich, and is 3 < 5 & 'so' \"on\"?"}
SYSTEM = {"role": "system", "content": "You are terse."}
# Keys in the orders in which people write them; no two alike.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <now> – \"°C\" & 'wind' – foretold",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"type": "string", "description": "Like Zürich"},
                    "days": {"description": "1 to 7", "type": ["integer", "null"], "default": 1},
                    "unit": {"enum": ["C", "F"], "type": "string"},
                },
                "required": ["town"],
            },
        },
    },
    {
        "function": {
            "strict": True,
            "parameters": {
                "properties": {"at": {"items": {"type": "number"}, "type": "array"}},
                "type": "object",
                "additionalProperties": False,
            },
            "name": "look",
            "description": "Looks 👀 around",
        },
        "type": "function",
    },
]


def tool_call(name: str, arguments: dict[str, Any], number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def assistant_calls(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def tool_result(content: str, number: int = 1, name: str = "get_weather") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": content}


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


WEATHER = tool_call("get_weather", {"unit": "C", "town": "Genève", "days": None})
LOOK = tool_call("look", {"at": [1, 2.5, -3e-7], "deep": {"b": True, "a": "<é>"}, "for": "Zoë"}, 2)
THOUGHTS = "They want a sum.\n\nSo I add."

CHATS: dict[str, dict[str, Any]] = {
    "question": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {
        "messages": [SYSTEM, USER, message("assistant", "Rain.\n"), message("user", "  And now? ")]
    },
    "characters": {
        "messages": [
            message("system", "Tabs\tand\r\nlines"),
            message(
                "user", "é e\u0301 👩‍👩‍👧 שלום {{ x }} {% if %} <|im_end|> </s> \\n \u2028 \x01"
            ),
        ]
    },
    "tools offered": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "a call and its result": {
        "messages": [USER, assistant_calls(WEATHER), tool_result('{"t": 7, "a": "ü"}')],
        "tools": TOOLS,
    },
    "text beside a call": {
        "messages": [
            SYSTEM,
            USER,
            assistant_calls(WEATHER, content="Let me see."),
            tool_result("7 °C"),
            message("assistant", "7 degrees."),
            message("user", "Thanks!"),
        ],
        "tools": TOOLS,
    },
    "two calls at once": {
        "messages": [
            SYSTEM,
            USER,
            assistant_calls(WEATHER, LOOK),
            tool_result("7 °C"),
            tool_result("nothing", 2, "look"),
        ],
        "tools": TOOLS,
    },
    "calls in a row": {
        "messages": [
            USER,
            assistant_calls(LOOK, content=""),
            tool_result("nothing", 2, "look"),
            assistant_calls(tool_call("look", {}, 3)),
            tool_result("something", 3, "look"),
            message("assistant", "Something."),
            message("user", "Where?"),
        ],
        "tools": TOOLS[1:],
    },
    "a call without tools offered": {
        "messages": [
            USER,
            assistant_calls(WEATHER),
            tool_result("7 °C"),
            message("assistant", "7."),
            USER,
        ]
    },
    "thoughts": {
        "messages": [
            message("user", "2 + 2?"),
            message("assistant", "Four.", reasoning_content=THOUGHTS),
            message("user", "And 3 + 3?"),
        ]
    },
    "thoughts before a call": {
        "messages": [
            USER,
            assistant_calls(WEATHER, reasoning_content=THOUGHTS),
            tool_result("7 °C"),
        ],
        "tools": TOOLS[:1],
    },
    "a second system message": {
        "messages": [
            SYSTEM,
            USER,
            message("assistant", "Rain."),
            message("system", "Be kind."),
            USER,
        ]
    },
    "an answer at the end": {
        "messages": [SYSTEM, USER, message("assistant", "Rain.")],
        "add_generation_prompt": False,
        "continue_final_message": False,
    },
    "variables": {
        "messages": [SYSTEM, USER],
        "chat_template_kwargs": {
            "enable_thinking": False,
            "date_string": "01 Apr 2026",
            "documents": [{"title": "Weather", "text": "It <rains> in Zürich."}],
            "reasoning_effort": "low",
        },
    },
    "an empty answer": {
        "messages": [USER, message("assistant", ""), message("user", "?")],
        "add_generation_prompt": True,
    },
}
