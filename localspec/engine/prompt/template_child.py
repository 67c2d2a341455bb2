"""Render chat templates in a process of its own: `python -m localspec.engine.prompt.template_child`.

A template comes from a downloaded file. jinja2's sandbox keeps it from reaching Python, but not from looping
or allocating memory. This process therefore has a memory limit, and its parent limits the time. Each
message to it is a request in JSON ({"template", "variables"}), to which it replies in JSON ({"text"} or
{"error"}).

A message {"spellings"} gives the vocabulary's special tokens. The reply to a later request with "special"
then has the positions of the template's own special tokens in the text: "special" is a list of pairs of
start and end. With the value "forged", it is sent only if the caller's text spells a special token, with
"always" in any case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localspec.children import (
    MAX_TEXT_CHARS,
    become_helper,
    limit_memory,
    receive_message,
    send_message,
)
from localspec.engine.prompt.provenance import ProvenanceEnvironment
from localspec.errors import TemplateRaised

MEMORY_LIMIT_BYTES = 512 * 1024 * 1024  # Bytes of address space in addition to those at start-up.


class _Generation(Extension):
    """Hugging Face's tag {% generation %}, which marks the assistant's text for training.

    It renders its body.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # The block has a scope of its own, as in transformers: variables set in it are not set after it.
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
    # Matches transformers' filter and the order of its options: no HTML escapes and no ASCII escapes.
    if isinstance(
        value, GeneratorType
    ):  # of `map`, which templates for llama.cpp do not turn into a list
        value = [*value]
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment(spellings: Sequence[str] | None = None) -> ImmutableSandboxedEnvironment:
    """Return the environment that Hugging Face's templates are written for.

    spellings: the special tokens; with them, those that the template itself writes are distinguished.
    """
    if spellings is None:
        env, tojson = ImmutableSandboxedEnvironment(), _tojson
    else:
        env = watching = ProvenanceEnvironment(spellings)
        tojson = watching.of_caller(_tojson)
    env.trim_blocks = env.lstrip_blocks = True
    env.add_extension(_Generation)
    env.add_extension("jinja2.ext.loopcontrols")
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


# Each request renders a template more than once. There is one model and there are two environments.
@lru_cache(maxsize=2)
def _compiled(env: ImmutableSandboxedEnvironment, template: str) -> jinja2.Template:
    return env.from_string(template)


def render(env: ImmutableSandboxedEnvironment, template: str, variables: dict[str, Any]) -> str:
    """Return the rendered text, of at most MAX_TEXT_CHARS.

    Raises:
        TemplateRaised: the template called raise_exception, or its text is too long.
        Exception: any exception of jinja2 or of the template's own mistakes.
    """
    pieces, total = [], 0
    for piece in _compiled(env, template).generate(**variables):
        total += len(piece)
        if total > MAX_TEXT_CHARS:
            raise TemplateRaised(f"the result is longer than {MAX_TEXT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def answer(
    env: ImmutableSandboxedEnvironment,
    message: str | bytes,
    watching: ImmutableSandboxedEnvironment | None = None,
) -> dict[str, Any]:
    """Return the reply to a request. watching: the environment that tracks special tokens, if any."""
    ordinary: Callable[[str], str] = str
    try:
        request = json.loads(message)
        template, variables = request["template"], request["variables"]
        if not isinstance(watching, ProvenanceEnvironment) or not request.get("special"):
            return {"text": render(env, template, variables)}
        ordinary = watching.ordinary
        try:
            json.dumps(variables, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # No tokenizer accepts the text.
            return {"text": render(env, template, variables)}
        written = render(watching, template, watching.mark_variables(variables))
        text, find = ordinary(written), watching.pattern.findall
        if request["special"] == "forged" and find(written) == find(text):
            return {"text": text}
        spans = [match.span() for match in watching.pattern.finditer(written)]
        return {"text": text, "special": spans}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": f"it tries something the sandbox forbids: {error}"}
    except MemoryError:
        return {"error": "it needs more memory than a template may have"}
    except TemplateRaised as error:  # The template's own message.
        return {"error": ordinary(str(error))[:500]}
    except Exception as error:  # A template can fail in every way that Python can.
        return {"error": ordinary(f"{type(error).__name__}: {error}")[:500]}


def main() -> None:
    """Serve the parent until it closes the connection."""
    connection = become_helper()
    env, watching = environment(), None
    limit_memory(MEMORY_LIMIT_BYTES)  # Allocations beyond it raise MemoryError.
    send_message(connection, b'{"ready": true}')
    while True:
        try:
            message = receive_message(connection)
        except EOFError:
            return
        if message.startswith(b'{"spellings"'):
            watching = environment(json.loads(message)["spellings"])
            reply: dict[str, Any] = {"ready": True}
        else:
            reply = answer(env, message, watching)
        send_message(connection, json.dumps(reply).encode())


if __name__ == "__main__":
    main()
