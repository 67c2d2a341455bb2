"""`localspec ask`: one question, one answer."""

from __future__ import annotations

import os
import sys

from localspec.cli import render
from localspec.client.api import Client
from localspec.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXAMPLE = """\
  localspec ask "What does shutil.copytree do?"
  git diff | localspec ask "review this"
"""


def run(options: dict[str, Any]) -> int:
    """Ask and print. `options` as `options.ASK` names them, and `words`.

    Raises:
        UsageError: there is nothing to ask.
        LocalspecError: no daemon, or what it answered.
    """
    request = _request(options, _question(options["words"]))
    client = Client(autostart=not options["no_daemon_start"])
    if options["json"]:
        render.record(client.chat(request))
        return 0
    if options["no_stream"]:
        answer = client.chat(request)
        render.text(answer["choices"][0]["message"]["content"])
        render.end_of_text()
        last = answer
    else:
        last = _stream(client, request)
    if options["usage"]:
        render.statistics(last)
    return 0


def _stream(client: Client, request: dict[str, Any]) -> dict[str, Any]:
    """Print the answer as it comes. Its statistics: timings, localspec and usage."""
    last: dict[str, Any] = {}
    chunks = client.stream_chat({**request, "stream_options": {"include_usage": True}})
    try:
        for chunk in chunks:
            for choice in chunk["choices"]:
                render.text(choice["delta"].get("content") or "")
            for key in ("timings", "localspec", "usage"):
                if key in chunk:
                    last[key] = chunk[key]
    finally:
        chunks.close()  # the daemon sees it and stops generating
        render.end_of_text()
    return last


def _request(options: dict[str, Any], question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    if options["system"] is not None:
        messages.insert(0, {"role": "system", "content": _clean(options["system"])})
    request = {
        "model": options["model"] and _absolute(options["model"]),
        "messages": messages,
        "max_tokens": options["tokens"],
        "temperature": options["temperature"],
    }
    return {key: value for key, value in request.items() if value is not None}


def _absolute(model: str) -> str:
    """Files are named from here; the daemon lives elsewhere."""
    if not model.endswith(".gguf"):
        return model
    return ",".join(os.path.abspath(os.path.expanduser(part)) for part in model.split(","))  # noqa: PTH100, PTH111


def _question(words: list[str]) -> str:
    """What came on stdin, a blank line, the words; either may be missing."""
    parts = [_piped(), _clean(" ".join(words))]
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        raise UsageError(f"There is nothing to ask. For example:\n{EXAMPLE.rstrip()}")
    return question


def _piped() -> str:
    """All of stdin, unless a person sits there or it is closed."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    return sys.stdin.buffer.read().decode("utf-8", "replace").rstrip("\r\n")


def _clean(text: str) -> str:
    """Arguments that are not UTF-8 arrive with lone surrogates, which no JSON may carry."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
