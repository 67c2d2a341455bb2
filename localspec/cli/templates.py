"""Questions to ask again: TOML files in the config folder, with $variables."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from localspec import paths
from localspec.cli import inputs
from localspec.cli import options as table
from localspec.cli.terminal import render
from localspec.errors import UsageError

# Options of `ask` that a template may hold, beside `prompt`.
KEPT = (
    *("model", "system", "tokens", *(each.name for each in table.SAMPLING)),
    *("draft", "exact", "schema", "extract", "extract_last"),
)
_NAME = re.compile(r"\w[\w.-]{0,63}")
_KINDS = {option.name: option.kind for option in table.ASK}
_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
# The prompts of `localspec cmd`, `commit` and `explain`, as the files that override them would hold them.
BUILTIN = {
    "cmd": """\
# What `localspec cmd` asks. $input: what the command is to do; $shell: bash, zsh, fish or sh;
# $system: the operating system.
system = "You write shell commands. You answer with one command in a code block and nothing else."
prompt = '''
Write one $shell command for $system that does the following. Use only common programs. Prefer one line.

$input'''
temperature = 0
tokens = 2048
""",
    "cmd-explain": """\
# What the x key of `localspec cmd` asks. $input: the command; $shell, $system: as in cmd.
system = "You explain shell commands briefly and exactly."
prompt = '''
Explain this $shell command for $system: one short list item for each part of it, in order. Then say in one
sentence what it changes, if anything.

$input'''
temperature = 0
tokens = 2048
""",
    "commit": """\
# What `localspec commit` asks. $input: the staged changes, as a diff; $recent: the last subjects.
system = "You write git commit messages. You answer with the message alone."
prompt = '''
Write the commit message for the changes at the end. The first line says in at most 72 characters what the
change does, in the imperative, as in "Add a retry to the upload". If the reason is not obvious, add an
empty line and one short paragraph with it. Do not repeat the diff.

Recent subject lines in this repository, for their style only:
$recent

$input'''
temperature = 0
tokens = 2048
""",
    "explain": """\
# What `localspec explain` asks. $input: the failed command and its exit code, or an error message;
# $shell, $system: as in cmd.
system = "You help with failed commands and error messages on $system. Be brief and concrete."
prompt = '''
Explain the most likely cause of this failure in a few sentences. Then show how to fix it, with the exact
command in a code block if a command helps.

$input'''
temperature = 0
""",
}


def folder() -> Path:
    return paths.default_paths().config / "templates"


def names() -> list[str]:
    return sorted({*BUILTIN, *(each.stem for each in folder().glob("*.toml"))})


def save(options: dict[str, Any]) -> None:
    """Write the words and options as the template `options["save"]`; one of that name is replaced.

    Raises:
        UsageError: the name is none, there is nothing to save, or a $ that names no variable.
    """
    name = options["save"]
    if not _NAME.fullmatch(name):
        raise UsageError(f"'{name}' is no name for a template; use letters, digits, - and _.")
    values = {"prompt": " ".join(options["words"])} if options["words"] else {}
    values |= {key: options[key] for key in KEPT if options[key] not in (None, False)}
    if not values:
        raise UsageError('There is nothing to save; as in: localspec ask --save fix "Fix: $input"')
    for key in ("model", "schema"):
        if key in values:
            values[key] = _lasting(key, values[key])
    for key in ("prompt", "system"):
        _variables(values.get(key, ""), name)
    # JSON's strings, numbers and booleans are TOML's, but for one control character.
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f")
        for key, value in values.items()
    ]
    file = folder() / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    paths.write_file(file, "".join(lines))
    render.line(f"Saved {file}. Use it with: localspec ask -t {name} …")


def _lasting(key: str, value: str) -> str:
    """Files are named from the folder where the template was made."""
    if key == "model":
        return inputs.pair(value)
    return value if value.lstrip().startswith("{") else inputs.absolute(value)


def applied(
    options: dict[str, Any], given: str, known: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], str]:
    """The options with the template's where none was given, and the question.

    `given` is what came on stdin and in files; with the words it is `$input`, which a prompt that
    does not name it is followed by. `known`: variables that have a value by themselves, used or not.

    Raises:
        UsageError: there is no such template, it is wrong, or a variable of it has no value.
    """
    name = options["template"]
    template = _load(name)
    values = {**(known or {}), **_values(options["values"])}
    words = " ".join(options["words"])
    text = "\n\n".join(part for part in (given, words) if part.strip())
    values.setdefault("input", text)
    prompt = template.pop("prompt", "")
    question = _filled(prompt, values, name)
    if text and "input" not in _variables(prompt, name):
        question = f"{question}\n\n{text}" if question else text
    if not question.strip():
        raise UsageError(f"There is nothing to ask; as in: localspec ask -t {name} WORDS")
    if "system" in template:
        template["system"] = _filled(template["system"], values, name)
    merged = {
        key: template.get(key, value) if value in (None, False) else value
        for key, value in options.items()
    }
    return merged, question


def _load(name: str) -> dict[str, Any]:
    file = folder() / f"{name}.toml"
    try:
        if not _NAME.fullmatch(name):
            raise FileNotFoundError
        builtin = name in BUILTIN and not file.exists()
        text = BUILTIN[name] if builtin else paths.read_file(file).decode()
        template = tomllib.loads(text)
    except FileNotFoundError:
        raise UsageError(
            f"There is no template '{name}'; there are {', '.join(names())}. To make it: "
            f"localspec ask --save {name} …"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {error}.") from error
    kinds = {"prompt": str, **{key: _KINDS[key] for key in KEPT}}
    for key, value in template.items():
        if key not in kinds:
            raise UsageError(f"{file}: unknown key '{key}'; the keys are {', '.join(kinds)}.")
        if type(value) is not kinds[key] and not (kinds[key] is float and type(value) is int):
            raise UsageError(f"{file}: '{key}' must be {_WORDS[kinds[key]]}, not {value!r}.")
    return template


def _values(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for name, equals, _ in pairs:
        if not equals or not name.isidentifier():
            raise UsageError(f"-p {name}: it must be NAME=VALUE, as in -p language=German")
    return {name: value for name, _, value in pairs}


def _variables(text: str, name: str) -> list[str]:
    template = Template(text)
    if not template.is_valid():
        raise UsageError(
            f"Template {name}: a $ that names no variable; write $$ for the sign itself."
        )
    return template.get_identifiers()


def _filled(text: str, values: dict[str, str], name: str) -> str:
    for variable in _variables(text, name):
        if variable not in values:
            raise UsageError(f"Template {name} needs ${variable}; give it with -p {variable}=VALUE")
    return Template(text).substitute(values)
