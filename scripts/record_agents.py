"""Make test data of the requests that coding agents sent: their structure, without their texts.

    python scripts/record_agents.py RECORDING.json.xz claude.jsonl codex.jsonl …

Each input holds one session, a line per request: {"path": "/v1/messages", "body": {…}}, as a relay between
the agent and the daemon wrote it. The system prompts and tool descriptions are other people's texts, and the
results of tools name files of the machine. So every word is replaced by one of the same length, drawn from
its hash: equal texts stay equal and different texts stay different, with the same borders. Long texts lose
most of their lines, but none that tells one version of a text from another.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONG_TEXT_CHARS = 600  # of texts that lose lines
KEPT_SHARE = 6  # one line of so many stays
# Their values say what a request is, in the words of its protocol. Names of tools are among them.
STRUCTURE = {
    "type", "role", "name", "required", "enum", "format", "syntax", "status", "effort", "verbosity", "phase",
    "tool_choice", "reasoning_effort", "$schema", "pattern", "propertyNames", "display", "keep", "summary",
    "ttl", "strict",
}  # fmt: skip
IDENTIFIERS = {"id", "call_id", "tool_use_id", "tool_call_id"}
DROPPED = {
    "metadata", "client_metadata", "user", "prompt_cache_key", "include", "model", "store", "stream",
    "stream_options", "context_management",
}  # fmt: skip
# Parts of a text that our daemon knows.
KNOWN = re.compile(r"x-anthropic-billing-header|cc_version|cc_entrypoint|cch|system-reminder")
GRAMMAR = "start: /(.|\\n)+/"
_CONSONANTS, _VOWELS = "bcdfghklmnprstvw", "aeiou"


def scramble(text: str) -> str:
    """Return the text with every word and number replaced."""
    pieces = re.split(f"({KNOWN.pattern})", text)
    return "".join(
        piece if index % 2 else re.sub(r"[^\W\d_]+|\d+", _replacement, piece)
        for index, piece in enumerate(pieces)
    )


def _replacement(match: re.Match[str]) -> str:
    word = match[0]
    digest = hashlib.shake_256(word.lower().encode()).digest(max(len(word), 1))
    if word.isdigit():
        return "".join(str(byte % 10) for byte in digest)
    letters = (
        (_VOWELS if index % 2 else _CONSONANTS)[byte % (5 if index % 2 else 16)]
        for index, byte in enumerate(digest)
    )
    return "".join(
        new.upper() if old.isupper() else new for old, new in zip(word, letters, strict=True)
    )


def texts(value: Any, key: str = "") -> Iterator[str]:
    """Yield the texts of a request that are not its structure."""
    if isinstance(value, str):
        if key not in STRUCTURE | IDENTIFIERS:
            yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in DROPPED:
                yield from texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner, key)


class Session:
    """One agent's requests, whose long texts are thinned alike."""

    def __init__(self, requests: list[dict[str, Any]]) -> None:
        self._requests = requests
        self._ids: dict[str, str] = {}
        owners: dict[str, set[int]] = {}
        long_texts = {
            text for body in requests for text in texts(body) if len(text) > LONG_TEXT_CHARS
        }
        for number, text in enumerate(sorted(long_texts)):
            for line in text.split("\n"):
                owners.setdefault(line, set()).add(number)
        self._owners = {line: frozenset(numbers) for line, numbers in owners.items()}

    def bodies(self) -> list[dict[str, Any]]:
        return [
            {k: self._clean(v, k) for k, v in body.items() if k not in DROPPED}
            for body in self._requests
        ]

    def _clean(self, value: Any, key: str) -> Any:
        if isinstance(value, dict):
            if value.get("type") == "grammar":
                return {**value, "definition": GRAMMAR}
            return {k: self._clean(v, k) for k, v in value.items() if k not in DROPPED or key}
        if isinstance(value, list):
            return [self._clean(inner, key) for inner in value]
        if not isinstance(value, str) or key in STRUCTURE:
            return value
        if key in IDENTIFIERS:
            return self._ids.setdefault(value, f"call_{len(self._ids)}")
        if key == "arguments":
            arguments = {k: self._clean(v, "input") for k, v in json.loads(value).items()}
            return json.dumps(arguments, separators=(",", ":"))
        return scramble(self._thin(value))

    def _thin(self, text: str) -> str:
        """Drop most lines of a long text; those that other versions of it do not have stay."""
        if len(text) <= LONG_TEXT_CHARS:
            return text
        lines = text.split("\n")
        usual = Counter(self._owners[line] for line in lines).most_common(1)[0][0]
        return "\n".join(
            line
            for at, line in enumerate(lines)
            if at == 0
            or self._owners[line] != usual
            or hashlib.sha256(line.encode()).digest()[0] % KEPT_SHARE == 0
        )


def main(arguments: list[str]) -> int:
    """Write the recording; 2 where a file is missing."""
    if len(arguments) < 2:
        sys.stderr.write(__doc__ or "")
        return 2
    sessions = {}
    for file in map(Path, arguments[1:]):
        entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        entries = [entry for entry in entries if entry["body"]]
        bodies = Session([entry["body"] for entry in entries]).bodies()
        sessions[file.stem] = [
            {"path": entry["path"], "body": body}
            for entry, body in zip(entries, bodies, strict=True)
        ]
    content = json.dumps(sessions, separators=(",", ":")).encode()
    Path(arguments[0]).write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
