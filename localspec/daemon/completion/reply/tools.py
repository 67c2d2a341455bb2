"""Tools: how a model's template wants them, and a call when one is required.

Each family writes calls in its own way; which one it is shows in the template, which was written
for the same training data. A template that knows no tools is told of them in the first question.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from localspec.errors import InvalidRequest
from localspec.protocol import frames
from localspec.protocol.calls import ID, CallFormat, Tools, result_text, with_calls
from localspec.protocol.requests import ChatRequest, ToolChoice

GEMMA_QUOTE = '<|"|>'


NO_TOOLS = CallFormat("json")
HERMES = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n")
TAGS = CallFormat("tags", ("<tool_call>",), "</tool_call>", lead="\n")
TOLD = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n", told=True)
LLAMA = CallFormat("json", ("<|python_tag|>",), bare=True, arguments="parameters")
GRANITE = CallFormat("json", ("<|tool_call|>", "<tool_call>"))
MISTRAL = CallFormat("mistral", ("[TOOL_CALLS]",))
MISTRAL_ARGS = CallFormat("named", ("[TOOL_CALLS]",), middle="[ARGS]", identity="[CALL_ID]")
GEMMA = CallFormat("gemma", ("<|tool_call>",), "<tool_call|>")
FUNCTIONARY = CallFormat("named", ("<function=",), "</function>", middle=">")
NEMOTRON = CallFormat("mistral", ("<TOOLCALL>",), "</TOOLCALL>")
UNKNOWN = CallFormat("hermes", ("<tool_call>",), "</tool_call>", lead="\n", guessed=True)

# What a template has of each: a call is held to its notation, so a marker that several share is not enough.
_MARKS = (
    (r"\[ARGS\]", MISTRAL_ARGS),
    (r"\[TOOL_CALLS\]", MISTRAL),
    (r"<\|tool_call>", GEMMA),
    (r"<\|tool_call\|>", GRANITE),
    (r"(?s)\A(?=.*[^:]<tool_call>)(?=.*<function=).*<parameter=", TAGS),
    (r"<function=' \+ [^+]+ \+ '>' \+ [^+]+ \+ '</function>", FUNCTIONARY),
    (r"<TOOLCALL>\[", NEMOTRON),
    # GLM and others write a name and keys of their own between the markers that Hermes has
    (r"<tool_call>['\"] *[+~]|<arg_key>|<function=|:tool_call>|<tool_calls>|minimax", UNKNOWN),
    (r"<tool_call>", HERMES),
    (r"<\|python_tag\|>", LLAMA),
    (r"""\{"name": (?:function name|"' \+ [\w.]+ \+ '"), "parameters":""", LLAMA),
)


def markers(form: CallFormat) -> list[str]:
    """Control tokens, in some vocabularies, that must be seen in the answer."""
    found = [*form.opens, form.close, form.middle, form.identity]
    if form.kind == "found":
        literals = *form.opens, form.lead, form.middle, form.again, form.close, *form.parameter
        found = [each for text in literals for each in _CONTROL.findall(text)]
    found += [GEMMA_QUOTE] if form.kind == "gemma" else []
    return list(dict.fromkeys(filter(None, found)))


_CONTROL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|[|｜][^<>\s|｜]+[|｜]")


def described(form: CallFormat) -> str:
    """In what notation calls are, for a person."""
    if form.guessed:
        return "in a notation that is not known, so they are not constrained"
    if form.told:
        return "explained to the model in the question"
    if form.kind != "found":
        return f"in the notation of {_FAMILIES[form]}"
    arguments = "{…}"
    if form.parameter:
        opening, before, _, close = form.parameter
        arguments = f"{opening}KEY{before}VALUE{close}…"
    written = f"{form.opens[0]}{form.lead}NAME{form.middle}{arguments}{form.close}"
    return f"as seen in the template: {' '.join(written.replace(ID, 'ID').split())}"


_FAMILIES = {
    HERMES: "Hermes",
    TAGS: "Qwen Coder",
    LLAMA: "Llama 3",
    GRANITE: "Granite 3",
    MISTRAL: "Mistral",
    MISTRAL_ARGS: "newer Mistral models",
    GEMMA: "Gemma 4",
    FUNCTIONARY: "Functionary",
    NEMOTRON: "Nemotron Nano",
}

# A template's code, and in it what is text and no name.
_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_TOOLS = re.compile(r"\btools\b")


def format_of(template: str | None) -> CallFormat:
    """The format that goes with a chat template."""
    text = template or ""
    if not any(_TOOLS.search(_STRING.sub("", code)) for code in _CODE.findall(text)):
        return TOLD
    return next((form for mark, form in _MARKS if re.search(mark, text)), UNKNOWN)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request's tools come to: none where `tools` is empty. calls: those the answer may have."""

    form: CallFormat
    tools: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)
    parallel: bool = True
    calls: Tools | None = None


NOTHING = Offer(NO_TOOLS)


def offer(request: ChatRequest, form: CallFormat) -> Offer:
    """The tools that the model is shown, which writes calls in this form."""
    if not request.tools or request.tool_choice == "none":
        return Offer(form)
    required = request.tool_choice not in (None, "auto")
    functions = {each.function.name: each.function for each in request.tools}
    # OpenAI's function without parameters has none
    schemas = {
        n: f.parameters or {"type": "object", "properties": {}} for n, f in functions.items()
    }
    shown = [each.shown() for each in request.tools]
    parallel = request.parallel_tool_calls is not False
    callable = schemas
    if isinstance(request.tool_choice, ToolChoice):
        name = request.tool_choice.function.name
        callable, parallel = {name: schemas[name]}, False
    elif required:  # a small model would go on calling forever
        parallel = bool(request.parallel_tool_calls)
    strict = [name for name in callable if functions[name].strict]
    return Offer(form, shown, schemas, parallel, Tools(form, callable, required, parallel, strict))


_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


def check(request: ChatRequest) -> None:
    """What can be said before any model is loaded.

    Raises:
        InvalidRequest: a tool's name, or a choice that is not among the tools.
    """
    names: set[str] = set()
    for index, tool in enumerate(request.tools or []):
        name, path = tool.function.name, f"tools[{index}].function.name"
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"'{path}' may have 1 to 128 letters, digits, underscores, dots and dashes, "
                f"not {name[:80]!r}.",
                param=path,
            )
        if name in names:
            raise InvalidRequest(f"'{path}': there are two tools called '{name}'.", param=path)
        names.add(name)
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"'tool_choice' names '{choice.function.name[:80]}', which is not among the 'tools'.",
            param="tool_choice",
        )


# ---------------------------------------------------------------- templates that know no tools

_INSTRUCTION = """You may call these functions:
{tools}

To call one, answer with nothing but
<tool_call>
{{"name": "function's name", "arguments": {{...}}}}
</tool_call>
and you will be given its result. Otherwise answer as usual.

"""


def told(messages: list[frames.Message], tools: list[dict[str, Any]]) -> list[frames.Message]:
    """The conversation for a template without tools: they become text of questions and answers."""
    told_messages: list[frames.Message] = []
    lines = "\n".join(json.dumps(each["function"], ensure_ascii=False) for each in tools)
    explained = not tools
    if tools and not any(message.role == "user" for message in messages):
        # a system message: where a template knows none, it too becomes part of the first question
        instruction = _INSTRUCTION.format(tools=lines).rstrip()
        messages = [frames.Message("system", instruction), *messages]
        explained = True
    for message in messages:
        content = message.content or ""
        if message.role == "tool":
            result = result_text(content)
            last = told_messages[-1] if told_messages else None
            if last is not None and last.role == "user":  # templates want the roles to alternate
                last.content = f"{last.content}\n{result}"
            else:
                told_messages.append(frames.Message("user", result))
            continue
        if calls := message.extra.get("tool_calls"):
            content = with_calls(content, calls)
        if message.role == "user" and not explained:
            explained = True
            content = _INSTRUCTION.format(tools=lines) + content
        extra = {key: value for key, value in message.extra.items() if key != "tool_calls"}
        told_messages.append(frames.Message(message.role, content, extra))
    return told_messages
