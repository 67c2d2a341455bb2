"""Renders chat templates in a process of its own: `python -m localspec.engine.prompt.template_child`.

A template comes out of a downloaded file. jinja2's sandbox keeps it from reaching Python, but not from
looping or allocating; this process has a memory limit and its parent a clock. Reads one JSON line per
request on stdin ({"template", "variables"}), answers one JSON line ({"text"} or {"error"}).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 * 1024 * 1024  # bytes of address space beyond what start-up took
NICENESS = 5  # an answer that is being written goes before a prompt that is being made
MAX_OUTPUT = 8 * 1024 * 1024  # characters


class TemplateRaised(Exception):
    """The template itself called raise_exception."""


class _Generation(Extension):
    """Hugging Face's {% generation %} marks the assistant's text for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a block with a scope of its own, as transformers': what is set in it is not set behind it
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise(message: str) -> None:
    raise TemplateRaised(str(message)[:500])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # transformers' filter and the order of its options: no HTML escapes, real characters
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment() -> ImmutableSandboxedEnvironment:
    """The environment Hugging Face's templates are written for."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


@lru_cache(maxsize=1)  # one model's, rendered more than once a request
def _compiled(env: ImmutableSandboxedEnvironment, template: str) -> jinja2.Template:
    return env.from_string(template)


def render(env: ImmutableSandboxedEnvironment, template: str, variables: dict[str, Any]) -> str:
    """The text, MAX_OUTPUT characters at most.

    Raises:
        jinja2.TemplateError, TemplateRaised, MemoryError: and whatever the template's own mistakes are.
    """
    pieces = []
    total = 0
    for piece in _compiled(env, template).generate(**variables):
        total += len(piece)
        if total > MAX_OUTPUT:
            raise TemplateRaised(f"the result is longer than {MAX_OUTPUT} characters")
        pieces.append(piece)
    return "".join(pieces)


def _limit_memory() -> None:
    import resource

    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
        used = int(pages) * resource.getpagesize()
    except OSError:  # not Linux: the limit is on the whole
        used = 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MEMORY if hard == resource.RLIM_INFINITY else min(used + MEMORY, hard)
    # macOS refuses it; the parent's clock still holds
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def answer(env: ImmutableSandboxedEnvironment, line: str) -> dict[str, str]:
    try:
        request = json.loads(line)
        return {"text": render(env, request["template"], request["variables"])}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": f"it tries something the sandbox forbids: {error}"}
    except MemoryError:
        return {"error": "it needs more memory than a template may have"}
    except Exception as error:  # a template can fail in every way Python can
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    env = environment()
    _limit_memory()
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(env, line)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
