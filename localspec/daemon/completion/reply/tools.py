"""Offer tools in the way a model's template expects, and require a call where a request does.

Each family of models writes calls in its own notation. The template shows which one, because it was
written for the same training data. If a template does not support tools, they are explained in the first
question.
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

# What identifies each format in a template. Calls are constrained to the format, so a marker that several
# formats share is not enough.
_TEMPLATE_PATTERNS = (
    (r"\[ARGS\]", MISTRAL_ARGS),
    (r"\[TOOL_CALLS\]", MISTRAL),
    (r"<\|tool_call>", GEMMA),
    (r"<\|tool_call\|>", GRANITE),
    (r"(?s)\A(?=.*[^:]<tool_call>)(?=.*<function=).*<parameter=", TAGS),
    (r"<function=' \+ [^+]+ \+ '>' \+ [^+]+ \+ '</function>", FUNCTIONARY),
    (r"<TOOLCALL>\[", NEMOTRON),
    # GLM and others use Hermes' markers, with a notation of their own between them.
    (r"<tool_call>['\"] *[+~]|<arg_key>|<function=|:tool_call>|<tool_calls>|minimax", UNKNOWN),
    (r"<tool_call>", HERMES),
    (r"<\|python_tag\|>", LLAMA),
    (r"""\{"name": (?:function name|"' \+ [\w.]+ \+ '"), "parameters":""", LLAMA),
)


def markers(form: CallFormat) -> list[str]:
    """Return the control tokens of a format, whose text the answer has to contain."""
    tokens = [*form.opens, form.close, form.middle, form.identity]
    if form.kind == "found":
        literals = *form.opens, form.lead, form.middle, form.again, form.close, *form.parameter
        tokens = [token for text in literals for token in _CONTROL_TOKEN.findall(text)]
    tokens += [GEMMA_QUOTE] if form.kind == "gemma" else []
    return list(dict.fromkeys(filter(None, tokens)))


_CONTROL_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|[|｜][^<>\s|｜]+[|｜]")


def described(form: CallFormat) -> str:
    """Describe for a person in which notation calls are written."""
    if form.guessed:
        return "in a notation that is not known, so they are not constrained"
    if form.told:
        return "explained to the model in the question"
    if form.kind != "found":
        return f"in the notation of {_FAMILY_NAMES[form]}"
    arguments = "{…}"
    if form.parameter:
        opening, separator, _, close = form.parameter
        arguments = f"{opening}KEY{separator}VALUE{close}…"
    call_text = f"{form.opens[0]}{form.lead}NAME{form.middle}{arguments}{form.close}"
    return f"as seen in the template: {' '.join(call_text.replace(ID, 'ID').split())}"


_FAMILY_NAMES = {
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

# A template's code, and the string literals in it, which contain no variables.
_TEMPLATE_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_STRING_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_TOOLS_VARIABLE = re.compile(r"\btools\b")


def format_of(template: str | None) -> CallFormat:
    """Return the format that goes with a chat template."""
    text = template or ""
    if not any(
        _TOOLS_VARIABLE.search(_STRING_LITERAL.sub("", code))
        for code in _TEMPLATE_CODE.findall(text)
    ):
        return TOLD
    return next((form for pattern, form in _TEMPLATE_PATTERNS if re.search(pattern, text)), UNKNOWN)


@dataclass(frozen=True, slots=True)
class Offer:
    """A request's tools as they are offered; `tools` is empty without tools. `calls` are the allowed ones."""

    form: CallFormat
    tools: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)
    parallel: bool = True
    calls: Tools | None = None


NOTHING = Offer(NO_TOOLS)


def offer(request: ChatRequest, form: CallFormat) -> Offer:
    """Return the tools of a request for a model that writes calls in this format."""
    if not request.tools or request.tool_choice == "none":
        return Offer(form)
    required = request.tool_choice not in (None, "auto")
    functions = {tool.function.name: tool.function for tool in request.tools}
    # In OpenAI's API, a function without `parameters` takes none.
    schemas = {
        tool_name: function.parameters or {"type": "object", "properties": {}}
        for tool_name, function in functions.items()
    }
    shown = [tool.shown() for tool in request.tools]
    parallel = request.parallel_tool_calls is not False
    callable_schemas = schemas
    if isinstance(request.tool_choice, ToolChoice):
        name = request.tool_choice.function.name
        callable_schemas, parallel = {name: schemas[name]}, False
    elif required:  # A small model would otherwise never stop calling.
        parallel = bool(request.parallel_tool_calls)
    strict = [name for name in callable_schemas if functions[name].strict]
    return Offer(
        form, shown, schemas, parallel, Tools(form, callable_schemas, required, parallel, strict)
    )


_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


def check(request: ChatRequest) -> None:
    """Check the tools of a request, before any model is loaded.

    Raises:
        InvalidRequest: a name is invalid, or the choice is not among the tools.
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
    """Return the conversation for a template without tools: questions and answers contain them as text."""
    result_messages: list[frames.Message] = []
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    explained = not tools
    if tools and not any(message.role == "user" for message in messages):
        # A template without system messages also adds this one to the first question.
        instruction = _INSTRUCTION.format(tools=lines).rstrip()
        messages = [frames.Message("system", instruction), *messages]
        explained = True
    for message in messages:
        content = message.content or ""
        if message.role == "tool":
            result = result_text(content)
            last = result_messages[-1] if result_messages else None
            if last is not None and last.role == "user":  # templates require alternating roles
                last.content = f"{last.content}\n{result}"
            else:
                result_messages.append(frames.Message("user", result))
            continue
        if calls := message.extra.get("tool_calls"):
            content = with_calls(content, calls)
        if message.role == "user" and not explained:
            explained = True
            content = _INSTRUCTION.format(tools=lines) + content
        extra = {key: value for key, value in message.extra.items() if key != "tool_calls"}
        result_messages.append(frames.Message(message.role, content, extra))
    return result_messages
