"""Llama 3's calls: JSON without a marker, or behind the one for Python."""

from __future__ import annotations

from localspec.chat.notations.family import Family, read_json
from localspec.protocol.calls import CallFormat

LLAMA = CallFormat("json", ("<|python_tag|>",), bare=True, arguments="parameters")
FAMILY = Family(
    "Llama 3",
    LLAMA,
    r"<\|python_tag\|>"
    r"""|\{"name": (?:function name|"' \+ [\w.]+ \+ '"), "parameters":""",
    read_json,
    rank=3,
)
