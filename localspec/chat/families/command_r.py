"""Command R+'s calls: an indented array in JSON in a fenced block."""

from __future__ import annotations

from localspec.chat.notations.family import Family
from localspec.protocol.calls import CallFormat

COMMAND_R = CallFormat(
    "found",
    ("Action:\n```json\n[", "Action: ```json\n["),
    "\n    }\n]```",
    lead='\n    {\n        "tool_name": "',
    middle='",\n        "parameters": ',
    again='\n    },\n    {\n        "tool_name": "',
)
FAMILY = Family("Command R+", COMMAND_R, r"Action:\\n```json")
